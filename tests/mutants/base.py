"""What a mutant is, and how it gets into the functions that are loaded."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Protocol

import numpy as np

import gradscope

Numbers = Mapping[str, np.ndarray]

GUARDS = {
    "certificate": "the proof of the first batch, or what is tried before it",
    "audit": "the proof of a later batch",
    "compare": "the comparison of backends",
    "completion": "the checks of a file before it takes its place",
    "seal": "the checksums that a reader compares",
    "tests": "nothing but the test suite",
}
_PACKAGE = Path(gradscope.__file__).parent
TOLERANCE = 1e-6  # of an answer in float64, relative to the largest number of its kind


class Scenario(Protocol):
    """Something that a user asks for, small enough to be done in a moment."""

    def numbers(self) -> Numbers:
        """Return the answer, with all guards off that can be switched off."""

    def right(self) -> Numbers:
        """Return what it should be, computed without the engine in float64."""

    def caught_by(self) -> str | None:
        """Ask with all guards on; return the name of the first that refuses, or None."""


@dataclass(frozen=True)
class Mutant:
    """A defect: one piece of a file's text that is replaced."""

    file: str  # of the package
    name: str
    defect: str  # what is wrong, in a line
    old: str  # text that the file has exactly once
    new: str  # what stands there under the defect; names are those that the file knows
    scenario: Scenario  # where it shows
    guard: str  # what has to catch it
    # of the test suite; fails under the defect, where no guard of the package can tell
    test: Callable[[], None] | None = None

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have every function of the file that is loaded run as if it had the new text.

        Methods, registered, decorated and imported functions are still the objects they were: it
        is their code that changes, and the functions inside them with it.
        """
        path = str(_PACKAGE / self.file)
        source = Path(path).read_text()
        said = f"mutant {self.name!r}: {self.file} is to have its old text once"
        assert source.count(self.old) == 1, f"{said}, not {source.count(self.old)} times; mend it"
        before, after = (_codes(s, path) for s in (source, source.replace(self.old, self.new)))
        changed = {code: after[key] for key, code in before.items() if after.get(key, code) != code}
        every = (f for f in _functions() if f.__code__.co_filename == path)
        held = [(f, f.__code__) for f in every if f.__code__ in changed]
        assert held, f"mutant {self.name!r}: no loaded function of {self.file} has its old text"
        try:
            for function, code in held:
                if len(function.__closure__ or ()) == len(changed[code].co_freevars):
                    function.__code__ = changed[code]
            yield
        finally:
            for function, code in held:
                function.__code__ = code


@cache
def _codes(source: str, path: str) -> dict[tuple[str, int], CodeType]:
    """Return the code objects of a module by their names, and how often the name came before."""
    found: dict[tuple[str, int], CodeType] = {}
    left = [compile(source, path, "exec", dont_inherit=True)]
    while left:
        code = left.pop()
        number = 0
        while (code.co_qualname, number) in found:
            number += 1
        found[code.co_qualname, number] = code
        left += [const for const in code.co_consts if isinstance(const, CodeType)]
    return found


@cache
def _functions() -> list[FunctionType]:
    """Return all functions of the package in memory, once all files with mutants are loaded."""
    for mutant in MUTANTS.values():
        if (_PACKAGE / mutant.file).exists():
            name = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            import_module(f"gradscope.{name}")
    gc.unfreeze()  # tests/conftest.py freezes what is there, which hides it from `get_objects`
    every = [f for f in gc.get_objects() if type(f) is FunctionType]
    gc.freeze()
    return [f for f in every if f.__code__.co_filename.startswith(str(_PACKAGE))]


MUTANTS: dict[str, Mutant] = {}


def mutant(
    file: str,
    text: str,
    old: str,
    new: str,
    scenario: Scenario,
    guard: str = "certificate",
    test: Callable[[], None] | None = None,
) -> None:
    """File a mutant; `text` is "its name: what is wrong"."""
    name, _, defect = text.partition(": ")
    guard = "tests" if test else guard
    assert name not in MUTANTS and guard in GUARDS, name
    MUTANTS[name] = Mutant(file, name, defect, old, new, scenario, guard, test)


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
