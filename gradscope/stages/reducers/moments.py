"""Sums over samples and what follows from them: mean, moments, variance and standard deviation.

The variance is exact also where the mean is far larger than the spread. Its state holds the mean as
an unevaluated sum of two float64 numbers, `mean` + `rest`, and the sum of squared deviations from
it, `m2`. Two such means differ by (mean_b − mean_a) + (rest_b − rest_a), whose first difference is
exact where they are close (Sterbenz 1974), so that merging by Chan, Golub and LeVeque's update
(1979) does not lose the digits that the mean and the spread do not share.
"""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients, OuterBlock, ScatterBlock
from gradscope.blocks.base import squares
from gradscope.stages.reducers.base import (
    Reducer,
    State,
    added,
    count,
    entries,
    on_one_device,
    power_sum,
    reducers,
    tiles,
    wide,
)

_SAFE = 0.01  # share of Σ|g|² that must be left after the mean's part is taken off: two digits lost


@reducers.register("sum")
def sum_() -> Reducer:
    """Σᵢ T(gᵢ)."""
    return _sums(_power_sums(1), lambda state: entries(state, "sum"), 1)


@reducers.register("mean")
def mean(standard_error: bool = False) -> Reducer:
    """(1/N) Σᵢ T(gᵢ): the expectation over the samples.

    With `standard_error=true`, NAME.standard_error (*shape) is added, √(var / N) with ddof 1: how
    far the mean of so many independent samples is from the expectation, NaN for one sample.
    Transforms that follow see the mean and its error alike.
    """
    if not standard_error:
        return _expectation(_power_sums(1), 1)

    def result(state: State) -> dict[str, Tensor]:
        errors = variance(state, 1)
        found: dict[str, Tensor] = {}
        for name, high in entries(state, "mean").items():
            found[name] = high + state[f"rest:{name}"]
            found[f"{name}.standard_error"] = (errors[name] / state["n"]).sqrt()
        return found

    return Reducer(start_spread, merge_spread, result)


@reducers.register("second_moment")
def second_moment() -> Reducer:
    """(1/N) Σᵢ |T(gᵢ)|² elementwise: the diagonal of the empirical Fisher.

    A sample's gradient is summed over its positions first and squared then (Kunstner et al. 2019,
    arXiv:1905.12558, on what the empirical Fisher is and is not).
    """
    return _expectation(_power_sums(2), 2)


@reducers.register("moment")
def moment(k: int) -> Reducer:
    """(1/N) Σᵢ T(gᵢ)ᵏ elementwise, about zero; of complex entries the complex power."""
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if k == 1:
        return _expectation(_power_sums(1), 1)

    def start(gradients: Gradients) -> State:
        sums = {f"sum:{name}": _power_sum(block, k) for name, block in gradients.items()}
        return {"n": count(gradients), **sums}

    return _expectation(start)


@reducers.register("var")
def var(ddof: int = 1) -> Reducer:
    """Σᵢ |T(gᵢ) − mean|² / (N − ddof), elementwise; NaN where N ≤ ddof.

    `var:ddof=0 | norm:p=1` is Σⱼ (E[gⱼ²] − E[gⱼ]²), the ξ of CABS (Balles et al. 2017,
    arXiv:1612.05086). ddof (delta degrees of freedom) 1 is the unbiased estimate, 0 the
    population's variance.
    """
    _require_degrees(ddof)
    return Reducer(start_spread, merge_spread, lambda state: variance(state, ddof))


@reducers.register("std")
def std(ddof: int = 1) -> Reducer:
    """√var, elementwise; NaN where N ≤ ddof."""
    _require_degrees(ddof)

    def result(state: State) -> dict[str, Tensor]:
        return {name: value.sqrt() for name, value in variance(state, ddof).items()}

    return Reducer(start_spread, merge_spread, result)


def variance(state: State, ddof: int) -> dict[str, Tensor]:
    """Return m2 / (N − ddof) by name, NaN where N ≤ ddof."""
    degrees = state["n"] - ddof
    by = torch.where(degrees > 0, degrees, torch.nan)
    return {name: m2 / by for name, m2 in entries(state, "m2").items()}


def start_spread(gradients: Gradients) -> State:
    """Return N, and for each name the mean, its rest and the squared deviations of a batch."""
    state: State = {"n": count(gradients)}
    for name, block in gradients.items():
        mean, rest, m2 = _centred(block)
        state |= {f"mean:{name}": mean, f"rest:{name}": rest, f"m2:{name}": m2}
    return state


@on_one_device
def merge_spread(a: State, b: State) -> State:
    """Merge two states of `start_spread`."""
    n = a["n"] + b["n"]
    share = b["n"] / n
    merged: State = {"n": n}
    for name, mean in entries(a, "mean").items():
        rest = a[f"rest:{name}"]
        gap = (b[f"mean:{name}"] - mean) + (b[f"rest:{name}"] - rest)
        merged[f"mean:{name}"], merged[f"rest:{name}"] = _two_sum(mean, rest + gap * share)
        between = squares(gap) * (a["n"] * share)
        merged[f"m2:{name}"] = a[f"m2:{name}"] + b[f"m2:{name}"] + between
    return merged


def _sums(
    start: Callable[[Gradients], State],
    result: Callable[[State], dict[str, Tensor]],
    *powers: int,
) -> Reducer:
    return Reducer(start, added, result, powers=frozenset(powers), additive=True)


def _expectation(start: Callable[[Gradients], State], *powers: int) -> Reducer:
    def result(state: State) -> dict[str, Tensor]:
        n = float(state["n"])
        return {name: total / n for name, total in entries(state, "sum").items()}

    return _sums(start, result, *powers)


def _power_sums(power: int) -> Callable[[Gradients], State]:
    def start(gradients: Gradients) -> State:
        sums = {f"sum:{name}": power_sum(gradients, name, power) for name in gradients}
        return {"n": count(gradients), **sums}

    return start


def _power_sum(block: Block, k: int) -> Tensor:
    if k == 2 and not block.dtype.is_complex:
        return wide(block).squared_sum()
    return reduce(torch.add, (tile.pow(k).sum(0) for tile in tiles(block)))


def _require_degrees(ddof: int) -> None:
    if ddof < 0:
        raise ValueError(f"ddof must not be negative, not {ddof}")


def _centred(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, its rest and Σᵢ |gᵢ − mean|² (*shape) of a batch.

    Where the block knows Σ|g|² without a dense form, Σ|g|² − n|mean|² is taken, unless it cancels
    in some entry. Otherwise a second pass over dense tiles sums deviations from the mean.
    """
    n, whole = block.n, wide(block)
    mean = whole.weighted_sum() / n
    if n == 1:
        return mean, torch.zeros_like(mean), torch.zeros_like(squares(mean))
    if isinstance(whole, ScatterBlock) or (isinstance(whole, OuterBlock) and whole.sizes[1] == 1):
        total = whole.squared_sum()
        m2 = total - n * squares(mean)
        if bool((m2 >= _SAFE * total).all()):
            return mean, torch.zeros_like(mean), m2
    rest = torch.zeros_like(mean)
    m2 = torch.zeros_like(squares(mean))
    for tile in tiles(block):
        deviations = tile - mean
        rest += deviations.sum(0)
        m2 += squares(deviations).sum(0)
    return mean, rest / n, (m2 - squares(rest) / n).clamp_min(0.0)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b rounded, and what rounding left out, exactly (Knuth's TwoSum)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)
