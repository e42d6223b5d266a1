"""Time, beside the unit in the same minutes, and peak memory."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from types import FrameType
from typing import Any

import torch

from gradscope.process.memory import peak_memory, timed

BUDGET = 20.0  # seconds of repeats a cell
_BUDGET_OF_FEW = 120.0  # likewise, at real sizes
_MOST = 50  # repeats of a short call


class OutOfTimeError(BaseException):
    """A call took longer than it may; no `Exception`, so that nobody below keeps it."""


@dataclass(frozen=True)
class Timing:
    """What a call took.

    Attributes:
        first: Seconds of the first call, with whatever is planned or compiled in it.
        seconds: Of each later call.
        unit: Of a plain forward and backward pass, each just before one of them.
        peak_bytes: Above the start, None where it cannot be known.
    """

    first: float
    seconds: tuple[float, ...]
    unit: tuple[float, ...]
    peak_bytes: int | None

    def of_one(self, batches: int) -> "Timing":
        """Return the times of one batch, of calls that compute several."""
        seconds = tuple(spent / batches for spent in self.seconds)
        return replace(self, first=self.first / batches, seconds=seconds)

    @property
    def ratio(self) -> float:
        """The fastest call as a multiple of the fastest plain pass."""
        return min(self.seconds) / min(self.unit)

    @property
    def median(self) -> float:
        """The median of the ratios of a call and the plain pass just before it."""
        return median(spent / unit for spent, unit in zip(self.seconds, self.unit, strict=True))


def measured(
    call: Callable[[], Any],
    before: Callable[[], object],
    unit: Callable[[], Any],
    device: torch.device,
    repeats: int,
    limit: float | None = None,
    enough: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Timing, Any]:
    """Return how long `call` takes, and what its second call returned.

    The first call warms up, the second is watched for memory, the others are timed, each after a
    plain pass: what else the machine does weighs on both alike. A call that takes longer than
    `BUDGET`, and does not compile, is not made again.

    Args:
        call: What is timed.
        before: Called before each call, untimed.
        unit: The plain pass.
        device: Where both run.
        repeats: How often; less if `BUDGET` seconds are over.
        limit: Seconds the first call may take.
        enough: Seconds to which short calls are repeated beyond that.
        clock: Tells the seconds.
    """
    before()
    with peak_memory(device) as peak, time_limit(limit):
        first, result = timed(call, device, clock)
    unit()
    if limit is None and first > BUDGET:
        return Timing(first, (first,), (timed(unit, device, clock)[0],), _known(peak)), result
    del result
    before()
    with peak_memory(device) as peak:
        _, result = timed(call, device)
    spent: list[float] = []
    units: list[float] = []
    with _no_collection():
        while _more(len(spent), sum(spent) + sum(units), repeats, enough):
            units.append(timed(unit, device, clock)[0])
            before()
            spent.append(timed(call, device, clock)[0])
    return Timing(first, tuple(spent), tuple(units), _known(peak)), result


def measured_sparingly(
    call: Callable[[], Any],
    before: Callable[[], object],
    unit: Callable[[], Any],
    device: torch.device,
    repeats: int,
    limit: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Timing, Any]:
    """Return how long a call of real size takes, and what its last one returned.

    As `measured`, but the first call is the one that is watched for memory, and two calls are
    enough: `repeats` pairs are timed unless they take longer than two minutes.
    """
    before()
    with peak_memory(device) as peak, time_limit(limit):
        first, result = timed(call, device, clock)
    spent: list[float] = []
    units: list[float] = []
    while not spent or (len(spent) < repeats and sum(spent) + sum(units) < _BUDGET_OF_FEW):
        del result
        units.append(timed(unit, device, clock)[0])
        before()
        seconds, result = timed(call, device, clock)
        spent.append(seconds)
    return Timing(first, tuple(spent), tuple(units), _known(peak)), result


def measured_apart(
    call: Callable[[], Any],
    before: Callable[[], object],
    unit: Callable[[], Any],
    device: torch.device,
    spent: Callable[[Any], tuple[float, int]],
) -> tuple[Timing, Any]:
    """Return what a process of its own took, which `call` runs: seconds on the processor.

    It is made once; the plain pass is made here, and counted likewise.
    """
    before()
    result = call()
    unit()
    plain, _ = timed(unit, device, time.process_time)
    seconds, peak = spent(result)
    return Timing(seconds, (seconds,), (plain,), peak), result


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `OutOfTimeError` when the block takes longer (where there are alarm signals)."""
    able = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not able:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError(f"it took more than {seconds:.0f} s")

    former = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, if somebody swallows it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def _more(done: int, seconds: float, repeats: int, enough: float) -> bool:
    """Whether to time the call again: the fastest of few short calls is a matter of luck."""
    if done < repeats:
        return not done or seconds < BUDGET
    return done < _MOST and seconds < enough


def _known(peak: list[int]) -> int | None:
    return peak[0] if peak else None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the collector, which takes long and runs when it likes, out of the timed calls."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
