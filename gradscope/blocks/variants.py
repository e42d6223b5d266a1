"""Kernel variants: several exact ways to compute one result, and the tuner that chooses one.

The fastest variant depends on the processor and the torch release. A tuner that may measure tries
the variants on the first batch. It stores the fastest for later work of the same sizes, and in the
cache for later processes. Without measurements, the variant with the least arithmetic in torch's
own kernels is used. A measured variant replaces it only if it is clearly faster.

Measurements differ from run to run, and with them the last digits of a result. A tuner that is
given choices uses exactly these, so that a resumed run gives the same bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradscope.core.precision import dtype_name
from gradscope.process.cache import Cache
from gradscope.process.memory import timed

FASTER = 0.9  # share of the default's time that a variant must beat to replace the default
_WORTH_MEASURING = 2e-4  # predicted seconds; below, a trial costs more than it can save
_HOPELESS = 4.0  # times the default's prediction: a slower variant is not tried
_ROUNDS, _MOST_ROUNDS = 3, 9  # in each round all variants run once, until times are steady
_ALIKE = 1.2  # times the shortest time: longer times are noise
# seconds of trials: in such long calls noise does not matter, and more rounds are expensive
_LONG = 0.5
_PATIENCE = 4.0  # times the fastest so far: a slower variant is not tried again,
_SET_UP = 0.01  # except within these seconds: a first call sets up kernels

# per second and per call, of a typical machine; fixed, so that unmeasured choices never differ
_FLOPS, _BYTES, _CALL = 1e11, 1e10, 2e-5


@dataclass(frozen=True)
class Variant:
    """One way to compute a result."""

    seconds: float  # predicted from arithmetic, for a typical machine
    run: Callable[[], Tensor]  # computes the result
    optional: bool = False  # a kernel that is fast on some machines: never used unmeasured


@dataclass(frozen=True)
class ChosenVariant:
    """The variant chosen for a request."""

    request: str  # the operation and its sizes
    variant: str  # its name
    seconds: dict[str, float]  # measured or predicted seconds of each variant
    measured: bool = True  # whether the choice was measured

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        own = {"request": self.request, "way": self.variant, "seconds": self.seconds}
        return own | {"measured": self.measured}


def seconds(flops: float, moved: float = 0.0, calls: float = 1.0) -> float:
    """Return the predicted seconds for these multiplications, bytes moved and kernel calls."""
    return flops / _FLOPS + moved / _BYTES + calls * _CALL


def fastest(request: str, sizes: Mapping[str, int], like: Tensor, variants: "Variants") -> Tensor:
    """Return the result of the variant that the active tuner chooses.

    `variants` has at least one that is not optional. `request` names the operation and the
    parameter's sizes. `sizes` has sizes that differ between batches, such as n and t; each power of
    two has its own choice. `like` is a tensor with the dtype and device of the work.
    """
    tuner = _active.get()
    if tuner is None:
        return variants[default(variants)].run()
    return tuner.run(request, sizes, like, variants)


Variants = Mapping[str, Variant]
# runs a function on a device; returns its seconds and its result
Clock = Callable[[Callable[[], Any], torch.device], tuple[float, Any]]


def default(variants: Variants) -> str:
    """Return the name of the variant for unmeasured use: the least arithmetic."""
    return min(variants, key=lambda name: (variants[name].optional, variants[name].seconds))


def power(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def known_of(device: torch.device) -> Cache | None:
    """Return the cache of measurements on this machine, or None."""
    return Cache.of("variants", device)


class Tuner:
    """Chooses variants while it is active, and remembers its choices."""

    def __init__(
        self,
        *,
        measures: bool = True,  # try variants if that can save time, and read the cache
        kept: Mapping[str, str] | None = None,  # earlier choices by request, which stay valid
        # returns the cache of earlier measurements on a device, or None
        cache: Callable[[torch.device], Cache | None] = lambda device: None,
        preferred: frozenset[str] = frozenset(),  # variants to use wherever they exist
        timed: Clock = timed,
    ) -> None:
        self.measures, self.preferred = measures, preferred
        # by request, in the order of choice
        self.chosen = {k: ChosenVariant(k, variant, {}) for k, variant in (kept or {}).items()}
        self._used = set(self.chosen)  # the rest was requested only inside trials of variants
        self._trying = False
        self._cache, self._timed = cache, timed

    @classmethod
    def remembering(cls, **options: Any) -> "Tuner":
        """Return a tuner that uses measurements of earlier processes on this machine."""
        return cls(cache=known_of, **options)

    def freeze(self) -> dict[str, str]:
        """Stop measuring; return the variant of each request that was measured and used.

        The cost model decides later requests that are not in the result.
        """
        if self.measures:
            self.measures = False
            used = {key: self.chosen[key] for key in sorted(self._used)}
            self.chosen = {key: one for key, one in used.items() if one.measured}
        return {key: one.variant for key, one in self.chosen.items() if one.measured}

    @contextmanager
    def active(self) -> Iterator["Tuner"]:
        """Choose for the code in the body, unless an outer tuner is active."""
        token = _active.set(_active.get() or self)
        try:
            yield self
        finally:
            _active.reset(token)

    def run(
        self, request: str, sizes: Mapping[str, int], like: Tensor, variants: Variants
    ) -> Tensor:
        """Return the result of the chosen variant; see `fastest`."""
        for name in self.preferred & variants.keys():
            return variants[name].run()
        likely = default(variants)
        if len(variants) == 1 or variants[likely].seconds < _WORTH_MEASURING:
            return variants[likely].run()
        classes = "".join(f", {name}≤{power(size)}" for name, size in sizes.items())
        key = f"{request}{classes}, {dtype_name(like.dtype)}, {like.device.type}"
        predicted = {name: variant.seconds for name, variant in variants.items()}
        unmeasured = ChosenVariant(key, likely, predicted, measured=False)
        measure = partial(self._measured, key, variants, like.device)
        name = self._choose(unmeasured, like.device, measure).variant
        return variants[name if name in variants else likely].run()

    def rank(
        self,
        request: str,
        size: int,
        device: torch.device,
        names: Sequence[str],
        measure: Callable[[Clock], Mapping[str, float]],
    ) -> tuple[list[str], ChosenVariant]:
        """Return `names` with the fastest first, and the choice of the first.

        A run has one choice for a request. The cache has one for each power of two of the size.
        `measure` returns the seconds of some names. The other names keep their order, after the
        choice.
        """
        unmeasured = ChosenVariant(request, names[0], dict.fromkeys(names, 0.0), False)

        def measured() -> ChosenVariant:
            spent = dict(measure(self._timed))
            if len(spent) < 2:
                return unmeasured
            usual, best = next(k for k in names if k in spent), min(spent, key=spent.__getitem__)
            fast = best if spent[best] < FASTER * spent[usual] else usual
            return ChosenVariant(request, fast, spent)

        found = self._choose(unmeasured, device, measured, f"{request}, n≤{power(size)}")
        spent = unmeasured.seconds | found.seconds
        return sorted(names, key=lambda name: (name != found.variant, spent[name])), found

    def _choose(
        self,
        unmeasured: ChosenVariant,
        device: torch.device,
        measure: Callable[[], ChosenVariant],
        stored: str = "",
    ) -> ChosenVariant:
        """Return the earlier choice for a request, or choose; `stored` is its name in the cache."""
        key = unmeasured.request
        if key not in self.chosen:
            new = self._new(unmeasured, device, measure, stored or key) if self.measures else None
            self.chosen[key] = new or unmeasured
        if not self._trying:
            self._used.add(key)
        return self.chosen[key]

    def _new(
        self,
        unmeasured: ChosenVariant,
        device: torch.device,
        measure: Callable[[], ChosenVariant],
        stored: str,
    ) -> ChosenVariant:
        """Choose by stored measurements, or measure and store."""
        cache = self._cache(device)
        known = None if cache is None else _remembered(cache, stored, unmeasured)
        if known is not None:
            return known
        outer, self._trying = self._trying, True
        try:
            found = measure()
        finally:
            self._trying = outer
        if cache is None or not found.measured:
            return found
        fact = {"way": found.variant, "seconds": found.seconds}
        cache.put(stored, fact)
        known = _remembered(cache, stored, unmeasured)  # another process may have been first
        if known is None:
            cache.put(stored, fact, over=True)
        return known or found

    def _measured(self, key: str, variants: Variants, device: torch.device) -> ChosenVariant:
        """Try all variants that may be fast, in rounds; return the fastest."""
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
        if not sure:  # another process keeps the machine busy
            return ChosenVariant(key, likely, shown, measured=False)
        return ChosenVariant(key, found if shown[found] < FASTER * shown[likely] else likely, shown)


def _steady(times: list[float]) -> bool:
    """Whether the two shortest times are similar, or there is only one time."""
    return len(times) < 2 or sorted(times)[1] <= _ALIKE * min(times)


def _remembered(cache: Cache, stored: str, unmeasured: ChosenVariant) -> ChosenVariant | None:
    """Return the choice of an earlier process, if this variant still exists."""
    fact = cache.get(stored) or {}
    way, spent = fact.get("way"), fact.get("seconds")
    if not (isinstance(way, str) and way in unmeasured.seconds and isinstance(spent, dict)):
        return None
    seconds = {str(k): float(v) for k, v in spent.items() if isinstance(v, float)}
    return ChosenVariant(unmeasured.request, way, seconds)


def active_tuner() -> Tuner:
    """Return the active tuner, or one that measures nothing."""
    return _active.get() or Tuner(measures=False)


@contextmanager
def unmeasured() -> Iterator[None]:
    """Let the cost model decide in the body, even if a tuner is active."""
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
