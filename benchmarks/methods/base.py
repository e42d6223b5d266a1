"""What a method is: for a task, a call to be timed, prepared beforehand."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.reference import Reference, Result
from benchmarks.workloads import Workload

COMPILE_LIMIT = 120.0  # seconds a first call may take


class DeclinedError(Exception):
    """A method has no way to do a task, or it is not sensible to run it."""


@dataclass(frozen=True)
class Setting:
    """What a method gets to prepare itself.

    Attributes:
        workload: With a model of the method's own.
        max_norm: What to clip to.
        scratch: A folder for files.
        stack: Takes what must be closed afterwards.
    """

    workload: Workload
    max_norm: float
    scratch: Path
    stack: ExitStack

    @property
    def model(self) -> nn.Module:
        """The method's own copy."""
        return self.workload.model

    @property
    def names(self) -> list[str]:
        """The trainable parameters' names, in the model's order."""
        return list(self.workload.trainable)


def nothing() -> None:
    """Do nothing."""


def as_it_is(result: Any) -> Result:
    """Return the result, which has the form that is compared."""
    named: Result = result
    return named


@dataclass(frozen=True)
class Call:
    """A prepared call.

    Attributes:
        run: What is timed.
        before: What is done before each run, untimed.
        result: Takes what `run` returned to {name: tensor}, untimed.
        expected: The right answer where it depends on the method; else the task's.
        first_limit: Seconds the first run may take (compilation).
        batches: How many batches a run computes; what is stated is the time of one.
        spent: Where a run is a process of its own, takes what it returned to that process's
            seconds on the processor and its peak of resident bytes.
    """

    run: Callable[[], Any]
    before: Callable[[], object] = nothing
    result: Callable[[Any], Result] = as_it_is
    expected: Callable[[Reference], Result] | None = None
    first_limit: float | None = None
    batches: int = 1
    spent: Callable[[Any], tuple[float, int]] | None = None


@dataclass(frozen=True)
class Method:
    """A tool, used in one way.

    Attributes:
        name: For tables and `--methods`.
        prepare: Takes a task's name and a setting; raises `DeclinedError`, or whatever the tool
            raises.
        needs: The top-level module that must be installed.
        compiled: It compiles: its first call is long.
        ours: It is gradscope.
        comparable: It does the task; else it is a unit or a bound.
    """

    name: str
    prepare: Callable[[str, Setting], Call]
    needs: str | None = None
    compiled: bool = False
    ours: bool = False
    comparable: bool = True


def plain(workload: Workload) -> Callable[[], tuple[Tensor, ...]]:
    """Return the unit: one forward pass, and one backward pass from the summed losses."""
    parameters = list(workload.trainable.values())

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(workload.losses().sum(), parameters)

    return run
