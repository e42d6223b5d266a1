"""Arguments of a training that are stored in its checkpoint, or in a file near it."""

import ast
import json
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_TABLES = (
    "model_args", "model_kwargs", "hyper_parameters", "hparams", "model_config", "config", "cfg",
    "args", "opt", "options", "params", "settings",
)  # fmt: skip
_OF_MODELS = {"model", "net", "network", "arch", "architecture", "model_params", *_TABLES}
# words in the name of a file with arguments: model_params.json, hparams.yaml, args.txt
_WORDS = {"args", "arguments", "config", "cfg", "hparams", "params", "opt", "options", "settings"}
_WORDS |= {"hyperparameters", "hyperparams", "model"}
_HYDRA = ".hydra"
_LARGE = 2**16  # bytes; a larger file holds no arguments
_SHARE = 0.5  # the least share of a script's options that a file of its arguments has


class StoredArguments(dict[str, Any]):
    """Arguments by name, and their sources."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str] = {}  # {argument: file}, if the checkpoint does not have it
        self.unread: dict[str, str] = {}  # {file: why it is not read}
        self.of_training: dict[str, Any] = {}  # arguments in a table of the checkpoint

    def source(self, name: str) -> str:
        """Return "the checkpoint", or the name of a file."""
        return self.files.get(name, "the checkpoint")


def stored_arguments(content: Any, checkpoint: Path | None = None) -> StoredArguments:
    """Return the arguments of a model that are stored with its weights.

    Args:
        content: The content of the checkpoint.
        checkpoint: Its file. The arguments may be in a file near it: model_params.json,
            hparams.yaml, args.txt, .hydra/config.yaml. If files differ in a value, it is left out.
    """
    found = StoredArguments()
    if isinstance(content, Mapping):
        parsed = [vars(value) for value in content.values() if isinstance(value, Namespace)]
        for value in (*parsed, *(content.get(name) for name in reversed(_TABLES))):
            if isinstance(value, Mapping):
                found.of_training |= {k: v for k, v in value.items() if isinstance(k, str)}
        plain = {k: v for k, v in content.items() if isinstance(v, bool | int | float | str)}
        found.update({**plain, **found.of_training})
    if checkpoint is None:
        return found
    of_files: dict[str, list[tuple[str, Any]]] = {}
    for file in files_near(checkpoint):
        table, why = read_table(file)
        if why:
            found.unread[os.path.relpath(file)] = why
        for name, value in _flat(table).items():
            of_files.setdefault(name, []).append((os.path.relpath(file), value))
    for name, values in of_files.items():
        if name not in found and all(value == values[0][1] for _, value in values):
            found[name] = values[0][1]
            found.files[name] = values[0][0]
    return found


def options_near(checkpoint: Path, names: set[str]) -> tuple[dict[str, Any], str]:
    """Return the values in a file near a checkpoint that has most of a script's options, and where.

    An example is logs/args.json, which a script writes with json.dump(vars(args), file).
    """
    here = Path.cwd()
    places = [here]
    with suppress(OSError):
        places += [each for each in sorted(here.iterdir()) if each.is_dir()]
    for file in (*files_near(checkpoint), *(file for place in places for file in _files(place))):
        table = read_table(file)[0]
        if len(names & table.keys()) > _SHARE * len(names):
            return dict(table), os.path.relpath(file)
    return {}, ""


def files_near(checkpoint: Path) -> list[Path]:
    """Return the files near a checkpoint that may have arguments, nearest first."""
    folder = checkpoint.absolute().parent
    places = [folder, folder / _HYDRA, folder.parent, folder.parent / _HYDRA]
    return [file for place in places for file in _files(place)]


def _files(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        for file in sorted(folder.iterdir()):
            words = {*re.split(r"[\W_]+", file.stem.lower())}
            known = file.suffix in (".json", ".yaml", ".yml", ".txt") and words & _WORDS
            hydras = folder.name != _HYDRA or file.stem == "config"
            if known and hydras and file.is_file() and file.stat().st_size <= _LARGE:
                yield file


def read_table(file: Path) -> tuple[Mapping[str, Any], str]:
    """Return the table in a file of JSON, YAML or of a printed Namespace, and why it is not read.

    No code is run.
    """
    value: Any = None
    with suppress(OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        text = file.read_text(encoding="utf-8")
        if file.suffix in (".yaml", ".yml"):
            try:
                import yaml  # type: ignore[import-untyped]
            except ImportError:
                return {}, "YAML: pip install pyyaml"
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                return {}, "it is not plain YAML"
        else:
            try:
                value = json.loads(text)
            except ValueError:
                value = _printed(text)
    usable = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return (value, "") if usable else ({}, "")


def _printed(text: str) -> Any:
    """Return the value of a printed dict or Namespace."""
    node = ast.parse(text.strip(), mode="eval").body
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Namespace":
        return {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
    return ast.literal_eval(node)


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values of nested tables by their keys; tables of a model come first.

    A key with different values in other tables is left out. {"value": x} of Weights & Biases is x.
    """
    tables = {k: v for k, v in table.items() if isinstance(v, Mapping) and "value" not in v}
    found = {
        k: v["value"] if isinstance(v, Mapping) else v for k, v in table.items() if k not in tables
    }
    inner = {name: _flat(own) for name, own in tables.items()}
    every: dict[str, list[Any]] = {}
    for key, value in (item for own in inner.values() for item in own.items()):
        every.setdefault(key, []).append(value)
    same = {key: first for key, (first, *rest) in every.items() if all(v == first for v in rest)}
    for own in (own for name, own in inner.items() if name in _OF_MODELS):
        same |= own
    return same | found
