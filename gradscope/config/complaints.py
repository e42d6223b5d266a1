"""What is wrong with settings, in our words: where it stands, what was found, what is accepted."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from pydantic import BaseModel, ValidationError

from gradscope.config.references import HELD, function_of
from gradscope.config.runfile import Layer, shown
from gradscope.core.registry import suggestion
from gradscope.errors import SpecError

Parts = tuple[str | int, ...]

MOST = 20  # mistakes that are told at once
_ENOUGH = 10_000  # of what pydantic finds, to find these

_EXAMPLES = (("model", "factory", HELD), ("checkpoint", "path", "."), ("dataset", "path", "."))


def complaints(
    failure: ValidationError,
    model: type[BaseModel],
    merged: dict[str, Any],
    origin: Mapping[tuple[str, ...], Layer],
    *,
    missing: bool,
) -> list[SpecError]:
    """Return one error for each key that is wrong, `MOST` and one more at most.

    Args:
        failure: What pydantic found.
        model: The model it validated, sections within.
        merged: The settings it was given, {section: {key: value}}.
        origin: The layer that each (section, key) is from; () is where missing keys belong.
        missing: Report missing keys too.
    """
    errors = failure.errors(include_url=False, include_context=False)[:_ENOUGH]
    found = [
        (e["loc"] if e["type"] == "missing" else _walk(merged, e["loc"]), e["type"]) for e in errors
    ]
    # Of a value that may be of two kinds both complain: keep the one that points into it.
    places = {parts for parts, _ in found}
    outer = {parts[:k] for parts in places for k in range(len(parts))}
    told = (
        (parts, kind)
        for parts, kind in dict.fromkeys(found)
        if parts not in outer and (missing or kind != "missing")
    )
    return [
        _complaint(parts, kind, model, merged, origin) for parts, kind in islice(told, MOST + 1)
    ]


def combined(problems: list[SpecError]) -> SpecError:
    """Return one error that tells all of `problems`, or `MOST` of them and that there are more."""
    unique = list({(p.where, p.what): p for p in problems}.values())
    if len(unique) == 1:
        return unique[0]
    count = f"{len(unique)}" if len(unique) <= MOST else f"more than {MOST}"
    lines = [*map(_in_one_line, unique[:MOST]), *(["..."] if len(unique) > MOST else [])]
    error = SpecError(f"{count} settings are wrong:", remedy="\n".join(lines))
    error.parts = tuple(unique)
    return error


def salvaged(merged: Mapping[str, Any], failure: ValidationError) -> dict[str, Any]:
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


def _in_one_line(problem: SpecError) -> str:
    """Return an error as a line of a list; a remedy that is a picture stands below it."""
    place = "" if problem.where is None else f"{problem.where}: "
    remedy = problem.remedy or ""
    between = "\n" if "\n" in remedy else " "
    return f"{place}{problem.what}.{between}{remedy}".rstrip()


def _complaint(
    parts: Parts,
    kind: str,
    model: type[BaseModel],
    merged: dict[str, Any],
    origin: Mapping[tuple[str, ...], Layer],
) -> SpecError:
    names = tuple(map(str, parts))
    layer = origin.get(names[:2]) or origin.get(names[:1]) or origin[()]
    fields = model.model_fields
    if len(parts) > 1:
        section = fields[names[0]].annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        fields = section.model_fields
    name = names[min(1, len(parts) - 1)]
    if kind == "extra_forbidden":
        # `spec` is taken out of [dataset] before the rest is validated
        known = [*fields, *(["spec"] if names[0] == "dataset" and not layer.flat else [])]
        what, remedy = "unknown key", suggestion(name, known if len(parts) > 1 else [*fields])
    elif kind == "string_too_long":
        length = len(_value(merged, parts))
        what, remedy = f"found a text of {length:,} characters", "Write less."
    else:
        what = "missing" if kind == "missing" else f"found {shown(_value(merged, parts))}"
        remedy = f"Accepted: {fields[name].description}."
    return SpecError(what, where=f"{layer.source}: {layer.key(parts)}", remedy=remedy)


def _walk(values: Any, location: Parts) -> Parts:
    """Follow a location into the settings; parts that are pydantic's own words are left out."""
    parts: list[str | int] = []
    for part in location:
        inside = isinstance(values, Mapping) and part in values
        if inside or (isinstance(values, list | tuple) and isinstance(part, int)):
            parts, values = [*parts, part], values[part]
    return tuple(parts)


def _value(values: Any, parts: Parts) -> Any:
    for part in parts:
        values = values[part]
    return values
