"""Several exact ways to one answer: the fastest is found once, by measuring, and remembered.

A cost model rules out what cannot win; what is left runs twice on the first batch that asks, and
the faster is kept for every later batch of the same sizes. Small work is not measured: there the
cost model decides. What is measured differs from run to run, and with it the answer in its last
digits; under `predicted` the cost model alone decides, so that the same run gives the same bits.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

_WORTH_MEASURING = 2e-4  # predicted seconds; below, trying costs more than it can save
_HOPELESS = 3.0  # times the cheapest prediction
_BETTER = 0.8  # times what the likeliest way took: less tells of the moment, not of the way
_PATIENCE = 4.0  # times the fastest so far: what takes longer is not tried again,
_SET_UP = 0.01  # unless within these seconds: a first call sets up kernels


@dataclass(frozen=True)
class Way:
    """One way to an answer.

    Attributes:
        seconds: What the cost model predicts, on a machine of no particular kind.
        run: Computes the answer.
    """

    seconds: float
    run: Callable[[], Tensor]


@dataclass(frozen=True)
class Choice:
    """What was chosen for a request.

    Attributes:
        request: What was asked for, of which sizes.
        way: The name of the way that was chosen.
        seconds: What each way that was tried took; by prediction, if nothing was measured.
    """

    request: str
    way: str
    seconds: dict[str, float]


_chosen: dict[str, Choice] = {}
_preferred: ContextVar[frozenset[str]] = ContextVar("preferred", default=frozenset())
_predicted: ContextVar[dict[str, Choice] | None] = ContextVar("predicted", default=None)


def fastest(request: str, n: int, like: Tensor, ways: Mapping[str, Way]) -> Tensor:
    """Return the answer by the fastest of `ways`.

    Args:
        request: What is asked for, with all sizes but n.
        n: The number of samples; choices are kept for each power of two.
        like: A tensor of the dtype and on the device of the work.
        ways: At least one, by name.
    """
    for name in _preferred.get() & ways.keys():
        return ways[name].run()
    likely = min(ways, key=lambda name: ways[name].seconds)
    if len(ways) == 1 or ways[likely].seconds < _WORTH_MEASURING:
        return ways[likely].run()
    kind = str(like.dtype).removeprefix("torch.")
    key = f"{request}, n≤{power(n)}, {kind}, {like.device.type}"
    known = _predicted.get()
    if known is not None:
        known[key] = Choice(key, likely, {name: way.seconds for name, way in ways.items()})
        return ways[likely].run()
    found = _chosen.get(key)
    if found is not None and found.way in ways:
        return ways[found.way].run()
    return _measured(key, ways, like.device)


def power(n: int) -> int:
    """Return the smallest power of two that is not below `n`."""
    return 1 << max(0, n - 1).bit_length()


def choices() -> tuple[Choice, ...]:
    """Return every choice of this process so far, in the order made."""
    return tuple(_chosen.values())


@contextmanager
def predicted() -> Iterator[Mapping[str, Choice]]:
    """Let the cost model alone choose; yield its choices by request, as they are made."""
    known: dict[str, Choice] = {}
    token = _predicted.set(known)
    try:
        yield known
    finally:
        _predicted.reset(token)


@contextmanager
def preferring(*names: str) -> Iterator[None]:
    """Take the ways of these names wherever they exist."""
    token = _preferred.set(frozenset(names))
    try:
        yield
    finally:
        _preferred.reset(token)


def _measured(key: str, ways: Mapping[str, Way], device: torch.device) -> Tensor:
    """Try every way that is not hopeless, the likeliest first; remember the fastest."""
    by_prediction = sorted(ways, key=lambda name: ways[name].seconds)
    limit = _HOPELESS * ways[by_prediction[0]].seconds
    spent: dict[str, float] = {}
    chosen, best, to_beat = "", None, inf
    for name in by_prediction:
        if ways[name].seconds > limit:
            break
        took, answer = _timed(ways[name].run, device)
        if took <= max(_SET_UP, _PATIENCE * min(spent.values(), default=took)):
            again, answer = _timed(ways[name].run, device)  # the first call of a kernel sets it up
            took = min(took, again)
        if took < to_beat:
            chosen, best = name, answer
            to_beat = took if spent else _BETTER * took
        spent[name] = took
    _chosen[key] = Choice(key, chosen, spent)
    assert best is not None  # the likeliest way is never hopeless
    return best


def _timed(run: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    _finish(device)
    begun = time.perf_counter()
    answer = run()
    _finish(device)
    return time.perf_counter() - begun, answer


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
