"""Where the settings of a run come from, and what is wrong with them: all of it at once.

    spec = resolve(Path("run.toml"), {"compute": {"backend": "loop"}})

A run file, a dataset spec and the command line are layers `{section: {key: value}}`; a later layer
wins, key by key. Paths in a layer are made absolute, each against the folder of its own file.
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
from gradscope.config.values import FROM_CHECKPOINT, function_of, is_folder
from gradscope.core.filetypes import describe
from gradscope.core.grammar import resolve_paths
from gradscope.core.registry import suggestion
from gradscope.errors import SpecError

MAX_ERRORS = 20  # as many are listed at once

_ENOUGH = 10_000  # of what pydantic finds, to find these
_MAX_BYTES = 1_000_000  # a run file is written by hand; more is the wrong file
_MAX_PARTS = 32  # of a dotted key: tomllib takes the square of their number in time and memory
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{_MAX_PARTS}}}")

_TOML = (
    'Write TABLE headings as [model], and settings as key = "text", key = 32 or key = ["a", "b"]. '
    "A path with backslashes stands in single quotes."
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
class _Origin:
    """Settings of one origin."""

    source: str  # the file, or "command line", for messages
    values: dict[str, Any]  # {section: {key: value}}, paths absolute
    # the file is a dataset spec: its keys stand at the top level, not under [dataset]
    flat: bool = False

    def place(self, parts: Location) -> str:
        """Return "SOURCE: dotted.key", the key as the source writes it; of a flag, its name."""
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


Origin = dict[tuple[str, ...], _Origin]


_REQUIRED = ("model", "checkpoint", "dataset", "loss")
_BEGIN = (
    "To begin, `gradscope init CHECKPOINT DATASET` writes a run file, run.toml. Complete it, and "
    "run `gradscope check --config run.toml`."
)


def resolve(
    config: Path | None,
    overrides: Mapping[str, Any],
    also: Callable[[RunSpec], Iterable[SpecError]] = lambda _: (),
    examples: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> RunSpec:
    """Return the settings of a run file with those of the command line over them.

    Args:
        config: The run file, or None. Paths in it are relative to it.
        overrides: {section: {key: value}} of the flags; None is not given. Paths in it are
            relative to the working directory. A dataset path ending in .toml is a dataset spec.
        also: Where settings are not of the form they must have: what else is wrong with the rest.
        examples: {section: {key: value}} of settings that need not be given.

    Raises:
        SpecError: Anything is wrong; one error tells everything that is.
    """
    problems: list[SpecError] = []
    lowest = _Origin("example", {section: {**table} for section, table in examples.items()})
    layers = [lowest, *_layers(config, overrides, problems)]
    merged, origin = _merge(layers)
    opposed = []
    computing = merged.get("compute")
    if isinstance(computing, Mapping) and {"batch_size", "memory"} <= computing.keys():
        where = origin["compute", "memory"].place(("compute", "memory"))
        what = "memory chooses the batch size, and a batch size is given too"
        opposed.append(SpecError(what, where=where, remedy="Give one of the two."))
    for section in _REQUIRED:
        merged.setdefault(section, {})  # so that the missing key is named, not only its table
    places = {
        parts: None if layer is layers[-1] else layer.place(parts)  # the last is the command line
        for parts, layer in origin.items()
    }
    try:
        spec = RunSpec.model_validate(merged)
        spec._places = places
    except ValidationError as failure:
        origin[()] = next(layer for layer in layers[1:] if not layer.flat)
        missing = not problems  # what is missing may be in the file that could not be read
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
        SpecError: It cannot be read, or anything in it is wrong.
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
        between = "\n" if "\n" in remedy else " "  # a picture stands below its line
        lines.append(f"{place}{problem.what}.{between}{remedy}".rstrip())
    lines += ["..."] if len(unique) > MAX_ERRORS else []
    error = SpecError(f"{count} settings are wrong:", remedy="\n".join(lines))
    error.parts = tuple(unique)
    return error


def _layers(
    config: Path | None, overrides: Mapping[str, Any], problems: list[SpecError]
) -> list[_Origin]:
    """Return the layers, lowest first; what could not be read is added to `problems`."""
    given = {
        section: {k: v for k, v in table.items() if v is not None}
        if isinstance(table, Mapping)
        else table
        for section, table in overrides.items()
    }
    above = _Origin(_COMMAND_LINE, _with_absolute_paths(given, Path.cwd(), flags=True))
    below = []
    weights = _toml(above, "checkpoint")
    if config is None and weights is not None:
        problems.append(_run_file(weights))
    if config is not None:
        values = _read(config, problems)
        if _names_spec(above):  # another data set: nothing of the run file's describes it
            values.pop("dataset", None)
        values = _with_absolute_paths(values, config.absolute().parent)
        below = _with_dataset_spec(_Origin(str(config), values), problems)
    return [*below, *_with_dataset_spec(above, problems)]


def _merge(layers: list[_Origin]) -> tuple[dict[str, Any], Origin]:
    """Lay the layers over each other; also return which layer each (section, key) is from.

    Of two settings that decide the same, the one that was given last is kept: a --batch-size takes
    the place of the run file's memory.
    """
    merged: dict[str, Any] = {}
    origin: Origin = {}
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


def _read(path: Path, problems: list[SpecError]) -> dict[str, Any]:
    """Read a TOML file of at most a megabyte; {} where it cannot be read."""
    try:
        if not path.is_file():
            found = "this is a directory" if path.is_dir() else "this is no regular file"
            what = found if path.exists() else "there is no such file"
            remedy = "Give a run file, which gradscope init writes, or a dataset spec."
        else:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
            what = f"the file is larger than {_MAX_BYTES:,} bytes"
            remedy = "This must be a TOML file of settings; data and weights have paths of their "
            remedy += "own."
            if len(content) <= _MAX_BYTES:
                text = content.decode("utf-8-sig")
                long = _LONG_KEY.search(text)
                if long is None:
                    return tomllib.loads(text)
                line = text.count("\n", 0, long.start()) + 1
                what = f"more than {_MAX_PARTS} names are joined by dots at line {line}"
                remedy = "Shorten the key."
    except OSError as error:
        what, remedy = f"cannot be read: {error.strerror}", "Check its permissions."
    except UnicodeDecodeError as error:
        kind, _ = describe(content[:4096])
        what = f"this is {kind}, and a TOML file is expected: byte {error.start} is not UTF-8"
        remedy = "Give a run file, which gradscope init writes, or a dataset spec."
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
    """Make the paths in a layer absolute; those in chains that are flags stay as they are."""
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
    """Make the file absolute in FILE.py:NAME, arguments of a loss behind it or not."""
    text = str(value) if isinstance(value, str | Path) else ""
    file, colon, _ = (function_of(text) or text).rpartition(":")
    return f"{base / file}{text[len(file) :]}" if colon and file.endswith(".py") else value


def _factory(value: Any, base: Path) -> Any:
    """Make a file of FILE.py:NAME absolute, or the folder of an adapter's base model."""
    folder = isinstance(value, str | Path) and value != FROM_CHECKPOINT and is_folder(base / value)
    return f"{base / value}" if folder else _reference(value, base)


def _chains(value: Any, base: Path) -> Any:
    """Make the files absolute that chains name: a stage of the user's, a stored vector."""
    if not isinstance(value, list):
        return value
    return [resolve_paths(chain, base) if isinstance(chain, str) else chain for chain in value]


_ANCHORS: dict[tuple[str, str], Callable[[Any, Path], Any]] = {
    ("model", "factory"): _factory,
    ("checkpoint", "path"): _path,
    ("dataset", "path"): _path,
    ("dataset", "spec"): _path,
    ("dataset", "files"): _paths,
    ("dataset", "tokenizer"): _paths,
    ("loss", "name"): _reference,
    ("compute", "transform"): _chains,
}


def _names_spec(layer: _Origin) -> bool:
    table = layer.values.get("dataset")
    return isinstance(table, dict) and ("spec" in table or _toml(layer, "dataset") is not None)


def _toml(layer: _Origin, section: str) -> Path | None:
    """Return the path of a section, if it ends in .toml."""
    table = layer.values.get(section)
    path = table.get("path") if isinstance(table, dict) else None
    return path if isinstance(path, Path) and path.suffix.lower() == ".toml" else None


def _with_dataset_spec(layer: _Origin, problems: list[SpecError]) -> list[_Origin]:
    """Put the dataset spec that the layer names, if any, as a layer of its own below it."""
    if not _names_spec(layer):
        return [layer]
    table = dict(layer.values["dataset"])
    spec = table.pop("spec") if "spec" in table else table.pop("path")
    rest = _Origin(layer.source, layer.values | {"dataset": table})
    if not isinstance(spec, Path):
        where, remedy = layer.place(("dataset", "spec")), "Accepted: the path of a TOML file."
        problems.append(SpecError(f"found {short_repr(spec)}", where=where, remedy=remedy))
        return [rest]
    values = _read(spec, problems)
    if {"model", "dataset"} <= values.keys():
        problems.append(_run_file(spec))
        return [rest]
    contents = _with_absolute_paths({"dataset": values}, spec.parent)
    return [_Origin(str(spec), contents, flat=True), rest]


def _run_file(path: Path) -> SpecError:
    """Say that a run file stands where a checkpoint or data belong."""
    remedy = f"Run `gradscope check --config {path.name}` without CHECKPOINT and DATASET."
    return SpecError("this is a run file", where=str(path), remedy=remedy)


def short_repr(value: Any) -> str:
    """Return a setting as a message shows it: short, in quotes where it is text."""
    try:
        return repr(str(value)) if isinstance(value, Path) else reprlib.repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return "a huge integer"


def _complaints(
    failure: ValidationError, merged: dict[str, Any], origin: Origin, *, missing: bool
) -> list[SpecError]:
    """Return an error for each key that pydantic finds wrong, at most `MAX_ERRORS` and one more.

    Missing keys are told only if `missing` says so; () is where in `origin` they belong.
    """
    errors = failure.errors(include_url=False, include_context=False)[:_ENOUGH]
    found = [
        (e["loc"] if e["type"] == "missing" else _walk(merged, e["loc"]), e["type"]) for e in errors
    ]
    # Of a value that may be of two kinds both complain: keep the one that points into it.
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
            known.append("spec")  # which is taken out before the rest is validated
        known = known if len(names) > 1 else [*RunSpec.model_fields]
        what, remedy = "unknown key", suggestion(names[min(1, len(names) - 1)], known)
    elif kind == "string_too_long":
        what, remedy = f"found a text of {len(value):,} characters", "Write less."
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
    """Follow a location into the settings; parts that are pydantic's own words are left out."""
    parts: list[str | int] = []
    for part in location:
        inside = isinstance(values, Mapping) and part in values
        if inside or (isinstance(values, list | tuple) and isinstance(part, int)):
            parts, values = [*parts, part], values[part]
    return tuple(parts)


def _valid_settings(merged: Mapping[str, Any], failure: ValidationError) -> dict[str, Any]:
    """Return the settings that are of the right form, with examples where one must be given.

    A loss of the user's is replaced, too: none of their code is to run for a run that cannot be.
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
