"""How the cost grows with n, width, depth and sequence length, one at a time, on the GPT."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.methods import Method
from benchmarks.reference import reference
from benchmarks.run import Cell, Conditions, cells
from benchmarks.workloads import workload

MODEL = "gpt"
METHODS = ("gradscope auto", "vmap(grad)", "Opacus hooks", "Opacus ghost")
TASKS = ("gradients", "norms")
FULL: dict[str, Any] = {"n": 8, "depth": 2, "width": 128, "length": 64, "vocabulary": 512}
QUICK: dict[str, Any] = {"n": 2, "depth": 1, "width": 8, "length": 4, "vocabulary": 9}
FULL_AXES: dict[str, Sequence[int]] = {
    "n": (2, 4, 8, 16, 32),
    "width": (64, 128, 256, 512),
    "depth": (1, 2, 4, 8),
    "length": (32, 64, 128, 256),
}
QUICK_AXES: dict[str, Sequence[int]] = {
    "n": (1, 2),
    "width": (8, 16),
    "depth": (1, 2),
    "length": (4, 8),
}


@dataclass(frozen=True)
class Point:
    """A cell at one value of one axis.

    Attributes:
        axis: "n", "width", "depth" or "length".
        value: Its value; the other sizes stay as they are.
        cell: What was measured.
    """

    axis: str
    value: int
    cell: Cell


def points(
    tasks: Iterable[str],
    methods: Iterable[Method],
    conditions: Conditions,
    device: str,
    *,
    quick: bool,
) -> Iterator[Point]:
    """Run every method at every point."""
    base, axes = (QUICK, QUICK_AXES) if quick else (FULL, FULL_AXES)
    wanted, chosen = tuple(tasks), tuple(methods)
    for axis, values in axes.items():
        for value in values:
            work = workload(MODEL, {**base, axis: value}, device)
            right = reference(work)
            for cell in cells(work, right, wanted, chosen, conditions):
                yield Point(axis, value, cell)
