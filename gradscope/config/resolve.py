"""Merges the settings of a run from files and flags, and reports all wrong settings in one error.

    spec = resolve(Path("run.toml"), {"compute": {"backend": "loop"}})

A run file, a dataset spec and the command line are layers `{section: {key: value}}`. A later layer
overrides an earlier layer key by key. Paths in a layer are made absolute, relative to the folder of
its file.
"""

import re
import reprlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from gradscope.config.spec import RunSpec, run_options
from gradscope.config.values import FROM_CHECKPOINT, file_of, function_of, is_folder, nested_factory
from gradscope.core.filetypes import describe
from gradscope.core.grammar import resolve_paths
from gradscope.core.registry import suggestion
from gradscope.errors import SpecError

MAX_ERRORS = 20  # the most errors to list at once

_ENOUGH = 10_000  # the most errors of pydantic to read
_MAX_BYTES = 1_000_000  # a run file is written by hand; a larger file is the wrong file
_MAX_PARTS = 32  # the most names in a dotted key: tomllib's time and memory are quadratic in it
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{_MAX_PARTS}}}")

_TOML = (
    'Write TABLE headings as [model], and settings as key = "text", key = 32 or key = ["a", "b"]. '
    "Write a path with backslashes in single quotes."
)
_COMMAND_LINE = "command line"
_RIVALS = {("compute", "batch_size"): "memory", ("compute", "memory"): "batch_size"}
_EXAMPLES = (
    ("model", "factory", FROM_CHECKPOINT),
    ("checkpoint", "path", "."),
    ("dataset", "path", "."),
)

Location = tuple[str | int, ...]


@dataclass(frozen=True)
class _SettingsSource:
    """The settings from one source."""

    source: str  # the file, or "command line", for messages
    values: dict[str, Any]  # {section: {key: value}}, paths absolute
    # the file is a dataset spec, with its keys at the top level, not under [dataset]
    flat: bool = False

    def place(self, parts: Location) -> str:
        """Return "SOURCE: dotted.key" as written in the source, or the name of a flag."""
        if self.source == _COMMAND_LINE:
            names = tuple(map(str, parts[:2]))
            flags = next((s.flags for s in run_options() if (s.section, s.key) == names), ())
            if flags:
                return flags[0]
        dotted = ""
        for part in parts[1:] if self.flat else parts:
            bare = isinstance(part, str) and part.isascii()
            bare = bare and str(part).replace("-", "_").isidentifier()
            name = part if bare or isinstance(part, int) else repr(part)
            dotted += f"[{part}]" if isinstance(part, int) else f".{name}"
        return f"{self.source}: {dotted.removeprefix('.')}"


Origin = dict[tuple[str, ...], _SettingsSource]


_REQUIRED = ("model", "checkpoint", "dataset", "loss")
_BEGIN = (
    "To start, run `gradscope init CHECKPOINT DATASET`. It writes a run file, run.toml. "
    "Complete it, and run `gradscope check --config run.toml`."
)


def resolve(
    config: Path | None,
    overrides: Mapping[str, Any],
    also: Callable[[RunSpec], Iterable[SpecError]] = lambda _: (),
    examples: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> RunSpec:
    """Return the settings of a run file, overridden by the flags of the command line.

    Args:
        config: The run file, or None. Its paths are relative to its folder.
        overrides: {section: {key: value}} of the flags; a flag that is not given has the value
            None. Paths are relative to the working directory. A dataset path ending in .toml is a
            dataset spec.
        also: If a setting is wrong, this returns further errors in the valid settings.
        examples: {section: {key: value}} for required settings that may be missing.

    Raises:
        SpecError: A setting is wrong. The error lists all wrong settings.
    """
    problems: list[SpecError] = []
    lowest = _SettingsSource("example", {section: {**table} for section, table in examples.items()})
    layers = [lowest, *_layers(config, overrides, problems)]
    merged, origin = _merge(layers)
    opposed = []
    computing = merged.get("compute")
    if isinstance(computing, Mapping) and {"batch_size", "memory"} <= computing.keys():
        where = origin["compute", "memory"].place(("compute", "memory"))
        what = "memory and batch_size cannot be combined: memory chooses the batch size"
        opposed.append(SpecError(what, where=where, remedy="Remove one of the two."))
    for section in _REQUIRED:
        merged.setdefault(section, {})  # so the error names the missing key, not only its table
    places = {
        parts: None if layer is layers[-1] else layer.place(parts)  # the last is the command line
        for parts, layer in origin.items()
    }
    try:
        spec = RunSpec.model_validate(merged)
        spec._places = places
    except ValidationError as failure:
        origin[()] = next(layer for layer in layers[1:] if not layer.flat)
        missing = not problems  # missing keys may be in a file that could not be read
        problems += _complaints(failure, merged, origin, missing=missing)
        if missing:
            salvaged = RunSpec.model_validate(_valid_settings(merged, failure))
            salvaged._places = places
            problems += also(salvaged)
    problems += opposed
    if problems:
        error = combine_errors(problems)
        begun = any("this is a run file" in problem.what for problem in problems)
        if config is None and not begun and not all(merged[section] for section in _REQUIRED):
            error.remedy = f"{error.remedy}\n{_BEGIN}"
        raise error
    return spec


def load(path: Path) -> RunSpec:
    """Return the settings of a run file.

    Raises:
        SpecError: The file cannot be read, or a setting is wrong.
    """
    return resolve(path, {})


def combine_errors(problems: list[SpecError]) -> SpecError:
    """Return one error that lists all of `problems`, or the first `MAX_ERRORS` of them."""
    unique = list({(p.where, p.what): p for p in problems}.values())
    if len(unique) == 1:
        return unique[0]
    count = f"{len(unique)}" if len(unique) <= MAX_ERRORS else f"more than {MAX_ERRORS}"
    lines = []
    for problem in unique[:MAX_ERRORS]:
        place = "" if problem.where is None else f"{problem.where}: "
        remedy = problem.remedy or ""
        between = "\n" if "\n" in remedy else " "  # keeps a marker below its line
        lines.append(f"{place}{problem.what}.{between}{remedy}".rstrip())
    lines += ["..."] if len(unique) > MAX_ERRORS else []
    error = SpecError(f"{count} settings are wrong:", remedy="\n".join(lines))
    error.parts = tuple(unique)
    return error


def _layers(
    config: Path | None, overrides: Mapping[str, Any], problems: list[SpecError]
) -> list[_SettingsSource]:
    """Return the layers, lowest first; append errors for unreadable files to `problems`."""
    given = {
        section: {k: v for k, v in table.items() if v is not None}
        if isinstance(table, Mapping)
        else table
        for section, table in overrides.items()
    }
    above = _SettingsSource(_COMMAND_LINE, _with_absolute_paths(given, Path.cwd(), flags=True))
    below = []
    weights = _toml(above, "checkpoint")
    if config is None and weights is not None:
        problems.append(_toml_as_weights(weights))
    if config is not None:
        values = _read(config, problems)
        if _names_spec(above):  # the run file does not describe this data set
            values.pop("dataset", None)
        values = _with_absolute_paths(values, config.absolute().parent)
        below = _with_dataset_spec(_SettingsSource(str(config), values), problems)
    return [*below, *_with_dataset_spec(above, problems)]


def _merge(layers: list[_SettingsSource]) -> tuple[dict[str, Any], Origin]:
    """Return the merged layers, and the source layer of each (section, key).

    If two settings exclude each other, the later setting is kept: --batch-size replaces the run
    file's memory.
    """
    merged: dict[str, Any] = {}
    origin: Origin = {}
    for layer in layers:
        for section, table in layer.values.items():
            if table or (section,) not in origin:  # missing keys belong to the layer with the rest
                origin[section,] = layer
            if not isinstance(table, dict):
                merged[section] = table
            elif isinstance(merged.setdefault(section, {}), dict):
                for rival in (_RIVALS.get((section, key)) for key in table):
                    merged[section].pop(rival, None)
                merged[section].update(table)
                origin.update({(section, key): layer for key in table})
    return merged, origin


def _read(path: Path, problems: list[SpecError]) -> dict[str, Any]:
    """Return the contents of a TOML file of at most 1 MB, or {} if it cannot be read."""
    try:
        if not path.is_file():
            found = "this is a directory" if path.is_dir() else "this is not a regular file"
            what = found if path.exists() else "there is no such file"
            remedy = "Give a run file (gradscope init writes one) or a dataset spec."
        else:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
            what = f"the file is larger than {_MAX_BYTES:,} bytes"
            remedy = "Give a TOML file of settings here, and name data and weights in it."
            if len(content) <= _MAX_BYTES:
                text = content.decode("utf-8-sig")
                long = _LONG_KEY.search(text)
                if long is None:
                    return tomllib.loads(text)
                line = text.count("\n", 0, long.start()) + 1
                what = f"a key in line {line} has more than {_MAX_PARTS} names joined by dots"
                remedy = "Shorten the key."
    except OSError as error:
        what, remedy = f"cannot be read: {error.strerror}", "Check its permissions."
    except UnicodeDecodeError as error:
        kind, _ = describe(content[:4096])
        what = f"this is {kind}, not a TOML file: byte {error.start} is not UTF-8"
        remedy = "Give a run file (gradscope init writes one) or a dataset spec."
    except RecursionError:
        what, remedy = "tables or arrays are nested too deeply", "Flatten them."
    except ValueError as error:  # TOMLDecodeError, and numbers of thousands of digits
        what = f"not valid TOML: {str(error).partition(chr(10))[0]}"
        at = re.search(r"at line (\d+)", what)
        shown = text.splitlines()[int(at[1]) - 1].strip() if at else ""
        remedy = _TOML if not shown else f"The line is: {shown[:200]}\n{_TOML}"
    problems.append(SpecError(what, where=str(path), remedy=remedy))
    return {}


def _with_absolute_paths(
    values: Mapping[str, Any], base: Path, *, flags: bool = False
) -> dict[str, Any]:
    """Make the paths in a layer absolute, except for paths in chains given as flags."""
    result = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    for (section, key), anchor in _ANCHORS.items():
        table = result.get(section)
        if isinstance(table, dict) and key in table and not (flags and key == "transform"):
            table[key] = anchor(table[key], base)
    return result


def _path(value: Any, base: Path) -> Any:
    return base / value if isinstance(value, str | Path) and str(value) else value


def _paths(value: Any, base: Path) -> Any:
    return {k: _path(v, base) for k, v in value.items()} if isinstance(value, Mapping) else value


def _reference(value: Any, base: Path) -> Any:
    """Make FILE.py absolute in FILE.py:NAME, with or without a loss's arguments after it."""
    text = str(value) if isinstance(value, str | Path) else ""
    file = file_of(text)
    return value if file is None else f"{base / file}{text[len(file) :]}"


def _factory(value: Any, base: Path) -> Any:
    """Make FILE.py absolute in FILE.py:NAME, or the folder of an adapter's base model."""
    folder = isinstance(value, str | Path) and value != FROM_CHECKPOINT and is_folder(base / value)
    return f"{base / value}" if folder else _reference(value, base)


def _arguments(value: Any, base: Path) -> Any:
    """Make the files of nested factories absolute."""
    if not isinstance(value, Mapping):
        return value
    found = {k: _arguments(v, base) for k, v in value.items()}
    nested = nested_factory(value)
    return found if nested is None else found | {"factory": _reference(nested, base)}


def _chains(value: Any, base: Path) -> Any:
    """Make files in chains absolute: files of users' stages and of stored vectors."""
    if not isinstance(value, list):
        return value
    return [resolve_paths(chain, base) if isinstance(chain, str) else chain for chain in value]


_ANCHORS: dict[tuple[str, str], Callable[[Any, Path], Any]] = {
    ("model", "factory"): _factory,
    ("model", "kwargs"): _arguments,
    ("checkpoint", "path"): _path,
    ("dataset", "path"): _path,
    ("dataset", "spec"): _path,
    ("dataset", "files"): _paths,
    ("dataset", "tokenizer"): _paths,
    ("loss", "name"): _reference,
    ("compute", "transform"): _chains,
}


def _names_spec(layer: _SettingsSource) -> bool:
    table = layer.values.get("dataset")
    return isinstance(table, dict) and ("spec" in table or _toml(layer, "dataset") is not None)


def _toml(layer: _SettingsSource, section: str) -> Path | None:
    """Return the path of a section, if it ends in .toml."""
    table = layer.values.get(section)
    path = table.get("path") if isinstance(table, dict) else None
    return path if isinstance(path, Path) and path.suffix.lower() == ".toml" else None


def _with_dataset_spec(layer: _SettingsSource, problems: list[SpecError]) -> list[_SettingsSource]:
    """Return the layer; if it names a dataset spec, with the spec as a separate layer below it."""
    if not _names_spec(layer):
        return [layer]
    table = dict(layer.values["dataset"])
    spec = table.pop("spec") if "spec" in table else table.pop("path")
    rest = _SettingsSource(layer.source, layer.values | {"dataset": table})
    if not isinstance(spec, Path):
        where, remedy = layer.place(("dataset", "spec")), "Accepted: the path of a TOML file."
        problems.append(SpecError(f"found {short_repr(spec)}", where=where, remedy=remedy))
        return [rest]
    values = _read(spec, problems)
    if {"model", "dataset"} <= values.keys():
        problems.append(_run_file(spec))
        return [rest]
    contents = _with_absolute_paths({"dataset": values}, spec.parent)
    return [_SettingsSource(str(spec), contents, flat=True), rest]


def _toml_as_weights(path: Path) -> SpecError:
    """Return the error for a TOML file given as the checkpoint."""
    problems: list[SpecError] = []
    values = _read(path, problems)
    if problems or "model" in values:
        return problems[0] if problems else _run_file(path)
    remedy = "Give the checkpoint first, then the data: gradscope COMMAND CHECKPOINT DATASET."
    return SpecError("this is a dataset spec, not a checkpoint", where=str(path), remedy=remedy)


def _run_file(path: Path) -> SpecError:
    """Return the error for a run file given as the checkpoint or the data."""
    remedy = f"Run `gradscope check --config {path.name}` without CHECKPOINT and DATASET."
    return SpecError("this is a run file", where=str(path), remedy=remedy)


def short_repr(value: Any) -> str:
    """Return a setting for a message: shortened, and in quotes if it is text."""
    try:
        return repr(str(value)) if isinstance(value, Path) else reprlib.repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return "a huge integer"


def _complaints(
    failure: ValidationError, merged: dict[str, Any], origin: Origin, *, missing: bool
) -> list[SpecError]:
    """Return an error for each key that pydantic finds wrong, at most `MAX_ERRORS` + 1.

    Missing keys are reported only if `missing`. `origin[()]` is the layer that should have them.
    """
    errors = failure.errors(include_url=False, include_context=False)[:_ENOUGH]
    found = [
        (e["loc"] if e["type"] == "missing" else _walk(merged, e["loc"]), e["type"]) for e in errors
    ]
    # For a value with two possible types, both types report it: keep the error inside the value.
    outer = {parts[:k] for parts, _ in found for k in range(len(parts))}
    told = (
        (parts, kind)
        for parts, kind in dict.fromkeys(found)
        if parts not in outer and (missing or kind != "missing")
    )
    return [_complaint(parts, kind, merged, origin) for parts, kind in islice(told, MAX_ERRORS + 1)]


def _complaint(parts: Location, kind: str, merged: dict[str, Any], origin: Origin) -> SpecError:
    names = tuple(map(str, parts))
    layer = origin.get(names[:2]) or origin.get(names[:1]) or origin[()]
    value: Any = merged
    for part in parts if kind != "missing" else ():
        value = value[part]
    if kind == "extra_forbidden":
        known = [option.key for option in run_options() if option.section == names[0]]
        if names[0] == "dataset" and not layer.flat:
            known.append("spec")  # removed before validation
        known = known if len(names) > 1 else [*RunSpec.model_fields]
        what, remedy = "unknown key", suggestion(names[min(1, len(names) - 1)], known)
    elif kind == "string_too_long":
        what, remedy = f"found a text of {len(value):,} characters", "Shorten the text."
    else:
        what = "missing" if kind == "missing" else f"found {short_repr(value)}"
        if len(names) > 1:
            found = next(s for s in run_options() if (s.section, s.key) == names[:2])
            named = found.flags and layer.source != _COMMAND_LINE
            accepted = f"{found.accepted} ({found.flags[0]})" if named else found.accepted
        else:
            accepted = RunSpec.model_fields[names[0]].description or f"a table [{names[0]}]"
        remedy = f"Accepted: {accepted}."
    return SpecError(what, where=layer.place(parts), remedy=remedy)


def _walk(values: Any, location: Location) -> Location:
    """Return the part of a pydantic location that exists in the settings."""
    parts: list[str | int] = []
    for part in location:
        inside = isinstance(values, Mapping) and part in values
        if inside or (isinstance(values, list | tuple) and isinstance(part, int)):
            parts, values = [*parts, part], values[part]
    return tuple(parts)


def _valid_settings(merged: Mapping[str, Any], failure: ValidationError) -> dict[str, Any]:
    """Return the valid settings, with examples for missing required settings.

    A user's loss is also replaced, so that no user code runs for a run with errors.
    """
    kept = {key: dict(t) if isinstance(t, Mapping) else t for key, t in merged.items()}
    for error in failure.errors():
        section, *keys = map(str, error["loc"][:2])
        table = kept.get(section)
        if keys and isinstance(table, dict):
            table.pop(keys[0], None)
        else:
            kept.pop(section, None)
    for section, key, value in _EXAMPLES:
        kept.setdefault(section, {}).setdefault(key, value)
    loss = kept.setdefault("loss", {})
    if function_of(str(loss.get("name", "a:b"))) is not None:
        kept["loss"] = {"name": "mse"}
    return kept
