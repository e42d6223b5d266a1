"""Where the settings of a run come from: a run file, a dataset spec, the command line.

Each is a layer `{section: {key: value}}`; a later layer wins, key by key. Paths in a layer are
made absolute here, each against the folder of its own file.
"""

import re
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.config.references import function_of
from gradscope.core.grammar import anchored
from gradscope.errors import SpecError

MAX_BYTES = 1_000_000  # a run file is written by hand; more is the wrong file
MAX_PARTS = 32  # of a dotted key: tomllib takes the square of their number in time and memory

_PART = r"""(?:[\w-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_PARTS}}}")

_PATHS = (("checkpoint", "path"), ("dataset", "path"), ("dataset", "spec"))
_PATH_TABLES = (("dataset", "files"), ("dataset", "tokenizer"))
_REFERENCES = (("model", "factory"), ("loss", "name"))
_RIVALS = {("compute", "batch_size"): "memory", ("compute", "memory"): "batch_size"}


@dataclass(frozen=True)
class Layer:
    """Settings of one origin.

    Attributes:
        source: The file, or "command line", for messages.
        values: {section: {key: value}}, paths absolute.
        flat: The file is a dataset spec: its keys stand at the top level, not under [dataset].
    """

    source: str
    values: dict[str, Any]
    flat: bool = False

    def key(self, parts: tuple[str | int, ...]) -> str:
        """Return the dotted key as the source writes it."""
        dotted = ""
        for part in parts[1:] if self.flat else parts:
            name = part if not isinstance(part, str) or _is_bare(part) else repr(part)
            dotted += f"[{part}]" if isinstance(part, int) else f".{name}"
        return dotted.removeprefix(".")


def gather(
    config: Path | None, overrides: Mapping[str, Any]
) -> tuple[list[Layer], list[SpecError]]:
    """Return the layers, lowest first, and what could not be read.

    Args:
        config: The run file, if there is one.
        overrides: {section: {key: value}} of the flags that were given; None is not given.
    """
    given = {
        section: {k: v for k, v in table.items() if v is not None}
        if isinstance(table, Mapping)
        else table
        for section, table in overrides.items()
    }
    above = Layer("command line", _anchored(given, Path.cwd()))
    problems: list[SpecError] = []
    below = []
    if config is not None:
        values = _read(config, problems)
        if _names_spec(above):  # another data set: nothing of the run file's describes it
            values.pop("dataset", None)
        base = config.absolute().parent
        values = _with_chains_anchored(_anchored(values, base), base)
        below = _expanded(Layer(str(config), values), problems)
    return [*below, *_expanded(above, problems)], problems


def merge(layers: list[Layer]) -> tuple[dict[str, Any], dict[tuple[str, ...], Layer]]:
    """Lay the layers over each other; also return which layer each (section, key) is from.

    Of two settings that decide the same, the one that was given last is kept: a --batch-size takes
    the place of the run file's memory.
    """
    merged: dict[str, Any] = {}
    origin: dict[tuple[str, ...], Layer] = {}
    for layer in layers:
        for section, table in layer.values.items():
            if table or (section,) not in origin:  # what is missing is missing where others stand
                origin[section,] = layer
            if not isinstance(table, dict):
                merged[section] = table
            elif isinstance(merged.setdefault(section, {}), dict):
                for rival in (_RIVALS.get((section, key)) for key in table):
                    merged[section].pop(rival, None)
                merged[section].update(table)
                origin.update({(section, key): layer for key in table})
    return merged, origin


def contradictions(
    merged: Mapping[str, Any], origin: Mapping[tuple[str, ...], Layer]
) -> list[SpecError]:
    """Return one error where a layer itself gives two settings that decide the same."""
    table = merged.get("compute")
    if not isinstance(table, Mapping) or not {"batch_size", "memory"} <= table.keys():
        return []
    layer = origin["compute", "memory"]
    return [
        SpecError(
            "memory is there to choose the batch size, and batch_size is given too",
            where=f"{layer.source}: {layer.key(('compute', 'memory'))}",
            remedy="Give one of them.",
        )
    ]


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file of at most a megabyte.

    Raises:
        SpecError: It is missing, no regular file, too big or too deep, not UTF-8 or not TOML.
    """

    def error(what: str, remedy: str) -> SpecError:
        return SpecError(what, where=str(path), remedy=remedy)

    try:
        if path.is_dir():
            raise error("this is a directory", "Give the TOML file in it.")
        if not path.exists():
            raise error("there is no such file", "Check the path.")
        if not path.is_file():
            raise error("this is no regular file", "Give a TOML file.")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise error(
                f"the file is larger than {MAX_BYTES:,} bytes",
                "This must be a TOML file of settings; data and weights have paths of their own.",
            )
        text = content.decode("utf-8-sig")
        long = _LONG_KEY.search(text)
        if long is not None:
            line = text.count("\n", 0, long.start()) + 1
            what = f"more than {MAX_PARTS} names are joined by dots at line {line}"
            raise error(what, "Shorten the key.")
        return tomllib.loads(text)
    except OSError as failure:
        raise error(f"cannot be read: {failure.strerror}", "Check its permissions.") from failure
    except UnicodeDecodeError as failure:
        raise error(f"not UTF-8 text at byte {failure.start}", "Save it as UTF-8.") from failure
    except RecursionError as failure:
        raise error("tables or arrays are nested too deeply", "Flatten them.") from failure
    except ValueError as failure:  # TOMLDecodeError, and numbers of thousands of digits
        reason = str(failure).partition("\n")[0]
        raise error(f"not valid TOML: {reason}", "Correct it there.") from failure


def shown(value: Any) -> str:
    """Return a setting as a message shows it: short, in quotes where it is text."""
    try:
        return repr(str(value)) if isinstance(value, Path) else reprlib.repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return "a huge integer"


def _read(path: Path, problems: list[SpecError]) -> dict[str, Any]:
    try:
        return read_toml(path)
    except SpecError as error:
        problems.append(error)
        return {}


def _anchored(values: Mapping[str, Any], base: Path) -> dict[str, Any]:
    result = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    for section, key in (*_PATHS, *_REFERENCES):
        table = result.get(section)
        if not isinstance(table, dict) or not isinstance(table.get(key), str | Path):
            continue
        value = table[key]
        if (section, key) in _REFERENCES:
            # a loss may have arguments behind the function
            function = function_of(str(value)) if section == "loss" else str(value)
            file, colon, _ = (function or "").rpartition(":")
            if colon and file.endswith(".py"):
                table[key] = f"{base / file}{str(value)[len(file) :]}"
        elif str(value):
            table[key] = base / value
    for section, key in _PATH_TABLES:
        table = result.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), Mapping):
            table[key] = {
                name: base / value if isinstance(value, str | Path) and str(value) else value
                for name, value in table[key].items()
            }
    return result


def _with_chains_anchored(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make the files that chains name (a user's stage, a stored vector) relative to `base`."""
    table = values.get("compute")
    if not isinstance(table, dict) or not isinstance(table.get("transform"), list):
        return values
    chains = [anchored(c, base) if isinstance(c, str) else c for c in table["transform"]]
    return values | {"compute": table | {"transform": chains}}


def _names_spec(layer: Layer) -> bool:
    table = layer.values.get("dataset")
    return isinstance(table, dict) and ("spec" in table or _is_toml(table.get("path")))


def _is_toml(value: Any) -> bool:
    return isinstance(value, Path) and value.suffix.lower() == ".toml"


def _is_bare(key: str) -> bool:
    return key.isascii() and key.replace("-", "_").isidentifier()


def _expanded(layer: Layer, problems: list[SpecError]) -> list[Layer]:
    """Put the dataset spec that the layer names, if any, as a layer of its own below it."""
    if not _names_spec(layer):
        return [layer]
    table = dict(layer.values["dataset"])
    spec = table.pop("spec") if "spec" in table else table.pop("path")
    rest = Layer(layer.source, layer.values | {"dataset": table})
    if not isinstance(spec, Path):
        where = f"{layer.source}: {layer.key(('dataset', 'spec'))}"
        problems.append(
            SpecError(
                f"found {shown(spec)}", where=where, remedy="Accepted: the path of a TOML file."
            )
        )
        return [rest]
    contents = _anchored({"dataset": _read(spec, problems)}, spec.parent)
    return [Layer(str(spec), contents, flat=True), rest]
