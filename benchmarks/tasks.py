"""The tasks, and what the right answer of each is."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.reference import Reference, Result
from gradscope.stages.transforms.base import transforms

DIMENSIONS = 512  # of the projection by random signs


@dataclass(frozen=True)
class Task:
    """Something that users do with per-sample gradients.

    Attributes:
        title: For tables.
        expected: The right answer; a method whose answer depends on its own random numbers (a
            projection) brings its own.
        by_row: The first axis of a result counts samples.
        rows: A result is compared at the reference's rows only.
    """

    title: str
    expected: Callable[[Reference], Result]
    by_row: bool = True
    rows: bool = False


def prefixed(**parts: Result) -> Result:
    """Return several {name: array} as one, with names `part:name`."""
    return {f"{part}:{k}": v for part, values in parts.items() for k, v in values.items()}


TASKS = {
    "gradients": Task("All gradients in memory", lambda ref: ref.gradients, rows=True),
    "norms": Task("Norms", lambda ref: {"norms": ref.norms}),
    "moments": Task(
        "Mean and second moment",
        lambda ref: prefixed(mean=ref.mean, second=ref.second),
        by_row=False,
    ),
    "clipped": Task("Mean of clipped gradients", lambda ref: ref.clipped, by_row=False),
    "projection": Task(f"Projection to {DIMENSIONS} dimensions", lambda ref: {}, rows=True),
    "kronecker": Task("Projection, kronecker", lambda ref: {}, rows=True),
    "sjlt": Task("Projection, sparse signs", lambda ref: {}, rows=True),
    "file": Task("Compute to file", lambda ref: ref.gradients, rows=True),
    "command": Task(
        "Norms, clipped mean and projection by the command", lambda ref: {}, by_row=False
    ),
}


def available() -> tuple[str, ...]:
    """Return the tasks that gradscope can do as it is installed."""
    absent = () if "project" in transforms else ("projection", "kronecker", "sjlt")
    return tuple(name for name in TASKS if name not in absent)
