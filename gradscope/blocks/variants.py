"""Kernel variants: several exact ways to one answer, and the tuner that chooses among them.

A cost model rules out what cannot win. Under a tuner that measures, the variants that are left run
twice on the first batch that asks, and the fastest is kept for later batches of the same sizes;
small work is not measured. What is measured differs from run to run, and with it the answer in its
last digits: without a tuner, or under one that does not measure, the cost model alone decides, so
that the same run gives the same bits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from gradscope.core.memory import timed

_WORTH_MEASURING = 2e-4  # predicted seconds; below, trying costs more than it can save
_HOPELESS = 3.0  # times the cheapest prediction
_BETTER = 0.8  # times what the likeliest variant took: less tells of the moment
_PATIENCE = 4.0  # times the fastest so far: what takes longer is not tried again,
_SET_UP = 0.01  # unless within these seconds: a first call sets up kernels

_FLOPS, _BYTES, _CALL = 1e11, 1e10, 2e-5  # of a typical machine: a second's, a call's


@dataclass(frozen=True)
class Variant:
    """One way to compute an answer."""

    seconds: float  # what the cost model predicts
    run: Callable[[], Tensor]  # computes the answer


@dataclass(frozen=True)
class Chosen:
    """The variant that was chosen for a request."""

    request: str  # what was asked for, of which sizes
    variant: str  # its name
    # what each variant that was tried took; predicted, if nothing was measured
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"request": self.request, "way": self.variant, "seconds": self.seconds}


def seconds(flops: float, moved: float = 0.0, calls: float = 1.0) -> float:
    """Return the predicted seconds of so many multiplications, bytes moved and kernels started."""
    return flops / _FLOPS + moved / _BYTES + calls * _CALL


def fastest(request: str, n: int, like: Tensor, variants: Mapping[str, Variant]) -> Tensor:
    """Return the answer by the variant that the active tuner chooses.

    Args:
        request: What is asked for, with all sizes but n.
        n: The number of samples; choices are kept for each power of two.
        like: A tensor of the dtype and on the device of the work.
        variants: At least one, by name.
    """
    tuner = _active.get()
    if tuner is not None:
        return tuner.run(request, n, like, variants)
    return min(variants.values(), key=lambda variant: variant.seconds).run()


def power(n: int) -> int:
    """Return the smallest power of two that is not below `n`."""
    return 1 << max(0, n - 1).bit_length()


class Tuner:
    """Chooses variants while it is active, and remembers what it chose for as long as it lives.

    Args:
        measures: Try variants, where that can save time; else the cost model alone decides.
        preferred: Names of variants to be taken wherever they exist.
        timed: Runs a variant for a device; returns its seconds and its answer.

    Attributes:
        chosen: By request, in the order chosen.
    """

    def __init__(
        self,
        *,
        measures: bool = True,
        preferred: frozenset[str] = frozenset(),
        timed: Callable[[Callable[[], Tensor], torch.device], tuple[float, Tensor]] = timed,
    ) -> None:
        self.measures, self.preferred = measures, preferred
        self.chosen: dict[str, Chosen] = {}
        self._timed = timed

    @contextmanager
    def active(self) -> Iterator["Tuner"]:
        """Choose what is computed in the body, unless another tuner does: the outermost decides."""
        outer = _active.get()
        with _set(outer or self):
            yield self

    def run(self, request: str, n: int, like: Tensor, variants: Mapping[str, Variant]) -> Tensor:
        """Return the answer by the variant that is chosen; see `fastest`."""
        for name in self.preferred & variants.keys():
            return variants[name].run()
        likely = min(variants, key=lambda name: variants[name].seconds)
        if len(variants) == 1 or variants[likely].seconds < _WORTH_MEASURING:
            return variants[likely].run()
        kind = str(like.dtype).removeprefix("torch.")
        key = f"{request}, n≤{power(n)}, {kind}, {like.device.type}"
        if not self.measures:
            predicted = {name: variant.seconds for name, variant in variants.items()}
            self.chosen[key] = Chosen(key, likely, predicted)
            return variants[likely].run()
        known = self.chosen.get(key)
        if known is not None and known.variant in variants:
            return variants[known.variant].run()
        return self._measured(key, variants, like.device)

    def _measured(self, key: str, variants: Mapping[str, Variant], device: torch.device) -> Tensor:
        """Try every variant that is not hopeless, the likeliest first; remember the fastest."""
        by_prediction = sorted(variants, key=lambda name: variants[name].seconds)
        limit = _HOPELESS * variants[by_prediction[0]].seconds
        spent: dict[str, float] = {}
        chosen, best, to_beat = "", None, inf
        for name in by_prediction:
            if variants[name].seconds > limit:
                break
            took, answer = self._timed(variants[name].run, device)
            if took <= max(_SET_UP, _PATIENCE * min(spent.values(), default=took)):
                again, answer = self._timed(variants[name].run, device)
                took = min(took, again)  # the first call of a kernel sets it up
            if took < to_beat:
                chosen, best = name, answer
                to_beat = took if spent else _BETTER * took
            spent[name] = took
        self.chosen[key] = Chosen(key, chosen, spent)
        assert best is not None  # the likeliest variant is never hopeless
        return best


@contextmanager
def unmeasured() -> Iterator[None]:
    """Let the cost model alone decide in the body, whichever tuner is active."""
    outer = _active.get()
    preferred = frozenset[str]() if outer is None else outer.preferred
    with _set(Tuner(measures=False, preferred=preferred)):
        yield


_active: ContextVar[Tuner | None] = ContextVar("tuner", default=None)


@contextmanager
def _set(tuner: Tuner) -> Iterator[None]:
    token = _active.set(tuner)
    try:
        yield
    finally:
        _active.reset(token)
