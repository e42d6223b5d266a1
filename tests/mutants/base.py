"""What a mutant is, and the tools to make one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, Protocol

import numpy as np
import pytest

Numbers = Mapping[str, np.ndarray]
Patch = pytest.MonkeyPatch
Install = Callable[[Patch], None]

GUARDS = {
    "certificate": "the proof of the first batch, or what is tried before it",
    "audit": "the proof of a later batch",
    "compare": "the comparison of backends",
    "completion": "the checks of a file before it takes its place",
    "seal": "the checksums that a reader compares",
    "tests": "nothing but the test suite",
}
TOLERANCE = 1e-6  # of an answer in float64, relative to the largest number of its kind


class Scenario(Protocol):
    """Something that a user asks for, small enough to be done in a moment."""

    name: str

    def numbers(self) -> Numbers:
        """Return the answer, with every guard that can be left out left out."""

    def right(self) -> Numbers:
        """Return what it should be, computed without the engine in float64."""

    def caught_by(self) -> str | None:
        """Ask with all guards; return the first that objects, or None."""


@dataclass(frozen=True)
class Mutant:
    """A defect."""

    name: str  # of it
    room: str  # the part of the engine that it is in
    defect: str  # what is wrong, in a line
    scenario: Scenario  # where it shows
    guard: str  # what has to catch it
    install: Install  # puts it in
    # of the test suite; fails under the defect, where no guard of the product can tell
    test: Callable[[], None] | None = None


MUTANTS: dict[str, Mutant] = {}


def mutant(
    name: str,
    room: str,
    defect: str,
    scenario: Scenario,
    guard: str,
    install: Install,
    test: Callable[[], None] | None = None,
) -> None:
    """File a mutant under its name."""
    assert name not in MUTANTS, name
    assert guard in GUARDS, guard
    assert (guard == "tests") == (test is not None), name
    MUTANTS[name] = Mutant(name, room, defect, scenario, guard, install, test)


def wrong(found: Numbers, right: Numbers) -> list[str]:
    """Return the names of the numbers that are not what they should be."""
    assert right
    return [name for name, value in right.items() if not _close(found.get(name), value)]


def _close(found: np.ndarray | None, right: np.ndarray) -> bool:
    if found is None or found.shape != right.shape:
        return False
    loose = 1e-4 if found.dtype == np.float32 else TOLERANCE
    size = float(np.abs(right).max(initial=0.0))
    return bool(np.allclose(found, right, rtol=0.0, atol=loose * size + 1e-12))


def around(owner: Any, name: str, make: Callable[..., Any], *more: Any) -> Install:
    """Put `make(original, ...)` in the place of a function or method, in each of the owners."""

    def install(patch: Patch) -> None:
        found = getattr_static(owner, name)
        if isinstance(found, staticmethod | property):
            inner = found.__func__ if isinstance(found, staticmethod) else found.fget
            made: Any = type(found)(make(inner))
        else:
            made = make(found)
        for place in (owner, *more):
            patch.setattr(place, name, made)

    return install


def entry(table: Any, key: str, make: Callable[..., Any]) -> Install:
    """Put `make(original)` in the place of an entry of a registry or a table."""
    held = getattr(table, "_entries", table)
    return lambda patch: patch.setitem(held, key, make(held[key]))


def after(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes a function's result another: `change(result, *arguments)`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: change(original(*args, **kwargs), *args)

    return make


def before(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return what gives a function other arguments: `change(*arguments)` is a tuple of them."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*change(*args), **kwargs)

    return make


def always(value: Any) -> Callable[..., Any]:
    """Return what puts a function in a place that answers the same whatever it is asked."""
    return lambda original: lambda *args, **kwargs: value
