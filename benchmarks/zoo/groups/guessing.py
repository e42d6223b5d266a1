"""Values for constructors and inputs by the names of their parameters, for several libraries."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from benchmarks.zoo.groups.inputs import Make, Shape, guesses, maker, required
from benchmarks.zoo.groups.shrinking import Recipe, shrunk


def arguments(kind: Any, values: Mapping[str, Any], recipe: Recipe | None = None) -> dict[str, Any]:
    """Return arguments of a constructor: required ones from `values`, and smaller defaults."""
    parameters = inspect.signature(kind.__init__).parameters
    found: dict[str, Any] = {}
    if recipe is not None:
        defaults = {
            key: list(p.default) if isinstance(p.default, tuple) else p.default
            for key, p in parameters.items()
            if p.default is not p.empty and p.kind is not p.VAR_KEYWORD
        }
        small = shrunk(defaults, recipe)
        found = {
            key: tuple(small[key]) if isinstance(parameters[key].default, tuple) else small[key]
            for key, value in defaults.items()
            if key in small and small[key] != value
        }
    return found | {key: values[key] for key in required(kind.__init__) if key in values}


def makes(
    model: nn.Module, shapes: Mapping[str, list[Shape]], fixed: Mapping[str, Any]
) -> Iterator[Make]:
    """Yield makers of the inputs that a model needs, and of those it also knows by these names."""
    known = inspect.signature(model.forward).parameters
    needed = required(model.forward)
    absent = [key for key in needed if key not in shapes]
    if absent:
        raise ValueError(f"no guess at its input {absent[0]!r}")
    more = [key for key in shapes if key in known and key not in needed]
    given = {key: value for key, value in fixed.items() if key in known}
    for chosen in dict.fromkeys((tuple(needed), (*needed, *more))):
        for guess in guesses({key: shapes[key] for key in chosen}):
            yield maker(guess, given)
