"""Kernel variants: several exact ways to one answer, and the tuner that chooses among them.

Which is fastest differs from one processor, and one release of torch, to the next. So a tuner that
may measure tries the variants on the first batch that asks, and keeps the fastest for all later
work of these sizes, in the cache for later processes too. Unmeasured, the way with the least
arithmetic by torch's own kernels is taken. Another is taken only if it was clearly faster.

What is measured differs from run to run, and with it the answer in its last digits. Choices that a
tuner is given are kept to the letter, so that a run that goes on gives the same bits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscope.core.precision import dtype_name
from gradscope.process.cache import Cache
from gradscope.process.memory import timed

FASTER = 0.9  # times what the default takes: a variant that takes more does not replace it
_WORTH_MEASURING = 2e-4  # predicted seconds; below, trying costs more than it can save
_HOPELESS = 4.0  # times the default's prediction: not tried
_ROUNDS, _MOST_ROUNDS = 3, 9  # in which all variants take turns, until times are steady
_ALIKE = 1.2  # times the shortest: longer ones tell of the moment
_LONG = 0.5  # seconds of trying: in such long calls a moment does not count, and more cost much
_PATIENCE = 4.0  # times the fastest so far: what takes longer is not tried again,
_SET_UP = 0.01  # unless within these seconds: a first call sets up kernels

# of a typical machine: a second's, a call's; fixed, since what is not measured must not differ
_FLOPS, _BYTES, _CALL = 1e11, 1e10, 2e-5


@dataclass(frozen=True)
class Variant:
    """One way to compute an answer."""

    seconds: float  # what arithmetic predicts, for a typical machine
    run: Callable[[], Tensor]  # computes the answer
    optional: bool = False  # a kernel that is good on some machines: never taken unmeasured


@dataclass(frozen=True)
class ChosenVariant:
    """The variant that was chosen for a request."""

    request: str  # what was asked for, of which sizes
    variant: str  # its name
    seconds: dict[str, float]  # what each variant that was tried took, or is predicted to take
    measured: bool = True  # and the measurement decides

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        own = {"request": self.request, "way": self.variant, "seconds": self.seconds}
        return own | {"measured": self.measured}


def seconds(flops: float, moved: float = 0.0, calls: float = 1.0) -> float:
    """Return the predicted seconds of so many multiplications, bytes moved and kernels started."""
    return flops / _FLOPS + moved / _BYTES + calls * _CALL


def fastest(request: str, sizes: Mapping[str, int], like: Tensor, variants: "Variants") -> Tensor:
    """Return the answer by the variant that the active tuner chooses; one is not optional.

    `request` has the sizes that are the parameter's own; `sizes` are those that differ from batch
    to batch, such as n and t: choices are kept for each power of two. `like` is a tensor of the
    dtype and on the device of the work.
    """
    tuner = _active.get()
    if tuner is None:
        return variants[default(variants)].run()
    return tuner.run(request, sizes, like, variants)


Variants = Mapping[str, Variant]


def default(variants: Variants) -> str:
    """Return the name of the variant that is taken unmeasured: the least arithmetic."""
    return min(variants, key=lambda name: (variants[name].optional, variants[name].seconds))


def power(n: int) -> int:
    """Return the smallest power of two that is not below `n`."""
    return 1 << max(0, n - 1).bit_length()


def known_of(device: torch.device) -> Cache | None:
    """Return what was measured on this machine, None if nothing can be kept."""
    return Cache.of("variants", device)


class Tuner:
    """Chooses variants while it is active, and remembers what it chose for as long as it lives."""

    def __init__(
        self,
        *,
        measures: bool = True,  # try variants, where that can save time, and look into the cache
        kept: Mapping[str, str] | None = None,  # choices of earlier, by request, which stand
        # for a device, what was measured earlier on it, if that is of interest
        cache: Callable[[torch.device], Cache | None] = lambda device: None,
        preferred: frozenset[str] = frozenset(),  # variants to be taken wherever they exist
        # runs a variant for a device; returns its seconds and its answer
        timed: Callable[[Callable[[], Tensor], torch.device], tuple[float, Tensor]] = timed,
    ) -> None:
        self.measures, self.preferred = measures, preferred
        # by request, in the order chosen
        self.chosen = {k: ChosenVariant(k, variant, {}) for k, variant in (kept or {}).items()}
        self._used = set(self.chosen)  # others were asked for only by variants that were tried
        self._trying = False
        self._cache, self._timed = cache, timed

    @classmethod
    def remembering(cls, **options: Any) -> "Tuner":
        """Return a tuner that knows what earlier processes measured on this machine."""
        return cls(cache=known_of, **options)

    def freeze(self) -> dict[str, str]:
        """Measure nothing any more; return the variant of each request that was measured and used.

        What is asked for later and is not among these is decided by arithmetic.
        """
        if self.measures:
            self.measures = False
            used = {key: self.chosen[key] for key in sorted(self._used)}
            self.chosen = {key: one for key, one in used.items() if one.measured}
        return {key: one.variant for key, one in self.chosen.items() if one.measured}

    @contextmanager
    def active(self) -> Iterator["Tuner"]:
        """Choose what is computed in the body, unless another tuner does: the outermost decides."""
        outer = _active.get()
        with _set(outer or self):
            yield self

    def run(
        self, request: str, sizes: Mapping[str, int], like: Tensor, variants: Variants
    ) -> Tensor:
        """Return the answer by the variant that is chosen; see `fastest`."""
        for name in self.preferred & variants.keys():
            return variants[name].run()
        likely = default(variants)
        if len(variants) == 1 or variants[likely].seconds < _WORTH_MEASURING:
            return variants[likely].run()
        classes = "".join(f", {name}≤{power(size)}" for name, size in sizes.items())
        key = f"{request}{classes}, {dtype_name(like.dtype)}, {like.device.type}"
        if key not in self.chosen:
            self.chosen[key] = self._choice(key, variants, like.device)
        if not self._trying:
            self._used.add(key)
        name = self.chosen[key].variant
        return variants[name if name in variants else likely].run()

    def _choice(self, key: str, variants: Variants, device: torch.device) -> ChosenVariant:
        """Choose by what was measured, or is now, or by arithmetic."""
        if not self.measures:
            predicted = {name: variant.seconds for name, variant in variants.items()}
            return ChosenVariant(key, default(variants), predicted, measured=False)
        cache = self._cache(device)
        known = None if cache is None else _remembered(cache, key, variants)
        if known is not None:
            return known
        outer, self._trying = self._trying, True
        try:
            found = self._measured(key, variants, device)
        finally:
            self._trying = outer
        if cache is None or not found.measured:
            return found
        fact = {"way": found.variant, "seconds": found.seconds}
        cache.put(key, fact)
        known = _remembered(cache, key, variants)  # perhaps another process was first
        if known is None:
            cache.put(key, fact, over=True)
        return known or found

    def _measured(self, key: str, variants: Variants, device: torch.device) -> ChosenVariant:
        """Try all variants that are not hopeless, in turn; return the fastest."""
        likely = default(variants)
        limit = _HOPELESS * variants[likely].seconds
        tried = [likely, *(k for k, v in variants.items() if k != likely and v.seconds <= limit)]
        spent: dict[str, list[float]] = {name: [] for name in tried}
        for taken in range(1, _MOST_ROUNDS + 1):
            for name, times in spent.items():
                best = min((min(others) for others in spent.values() if others), default=0.0)
                if not times or min(times) <= max(_SET_UP, _PATIENCE * best):
                    times.append(self._timed(variants[name].run, device)[0])
            sure = taken >= _ROUNDS and all(map(_steady, spent.values()))
            sure = sure or sum(map(sum, spent.values())) > _LONG
            if sure:
                break
        shown = {name: min(times) for name, times in spent.items()}
        found = min(shown, key=lambda name: shown[name])
        if not sure:  # something else keeps the machine busy
            return ChosenVariant(key, likely, shown, measured=False)
        return ChosenVariant(key, found if shown[found] < FASTER * shown[likely] else likely, shown)


def _steady(times: list[float]) -> bool:
    """Whether the two shortest times are alike, or there is only one."""
    return len(times) < 2 or sorted(times)[1] <= _ALIKE * min(times)


def _remembered(cache: Cache, key: str, variants: Variants) -> ChosenVariant | None:
    """Return what an earlier process chose, if it is one of the variants."""
    fact = cache.get(key) or {}
    way, spent = fact.get("way"), fact.get("seconds")
    if not (isinstance(way, str) and way in variants and isinstance(spent, dict)):
        return None
    return ChosenVariant(
        key, way, {str(k): float(v) for k, v in spent.items() if isinstance(v, float)}
    )


@contextmanager
def unmeasured() -> Iterator[None]:
    """Let arithmetic alone decide in the body, whichever tuner is active."""
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
