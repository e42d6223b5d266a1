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

from gradscope.blocks import Block, Gradients, wide
from gradscope.blocks.base import squares
from gradscope.stages.reducers.base import (
    ParameterState,
    Reducer,
    State,
    added,
    count,
    entries,
    for_each_parameter,
    power_sum,
    reducers,
    tiles,
)

_SAFE = 0.01  # share of Σ|g|² that must be left after the mean's part is taken off: two digits lost


@reducers.register("sum")
def sum_() -> Reducer:
    """Σᵢ T(gᵢ)."""
    return _power_sums(1, divided=False)


@reducers.register("mean")
def mean(standard_error: bool = False) -> Reducer:
    """(1/N) Σᵢ T(gᵢ): the expectation over the samples.

    With `standard_error=true`, NAME.standard_error (*shape) is added, √(var / N) with ddof 1: how
    far the mean of so many independent samples is from the expectation, NaN for one sample.
    Transforms that follow see the mean and its error alike.
    """
    if not standard_error:
        return _power_sums(1)

    def result(part: ParameterState, n: Tensor) -> dict[str, Tensor]:
        error = (variance(part, n, 1) / n).sqrt()
        return {"": part["mean"] + part["rest"], "standard_error": error}

    return for_each_parameter(start_spread, merge_spread, result)


@reducers.register("second_moment")
def second_moment() -> Reducer:
    """(1/N) Σᵢ |T(gᵢ)|² elementwise: the diagonal of the empirical Fisher.

    A sample's gradient is summed over its positions first and squared then (Kunstner et al. 2019,
    arXiv:1905.12558, on what the empirical Fisher is and is not).
    """
    return _power_sums(2)


@reducers.register("moment")
def moment(k: int) -> Reducer:
    """(1/N) Σᵢ T(gᵢ)ᵏ elementwise, about zero; of complex entries the complex power."""
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if k == 1:
        return _power_sums(1)

    def start(block: Block) -> ParameterState:
        if k == 2 and not block.dtype.is_complex:
            return {"sum": wide(block).squared_sum()}
        return {"sum": reduce(torch.add, (tile.pow(k).sum(0) for tile in tiles(block)))}

    return for_each_parameter(start, None, lambda part, n: {"": part["sum"] / n})


@reducers.register("var")
def var(ddof: int = 1) -> Reducer:
    """Σᵢ |T(gᵢ) − mean|² / (N − ddof), elementwise; NaN where N ≤ ddof.

    `var:ddof=0 | norm:p=1` is Σⱼ (E[gⱼ²] − E[gⱼ]²), the ξ of CABS (Balles et al. 2017,
    arXiv:1612.05086). ddof (delta degrees of freedom) 1 is the unbiased estimate, 0 the
    population's variance.
    """
    return _spread(ddof, lambda value: value)


@reducers.register("std")
def std(ddof: int = 1) -> Reducer:
    """√var, elementwise; NaN where N ≤ ddof."""
    return _spread(ddof, torch.sqrt)


def _spread(ddof: int, of: Callable[[Tensor], Tensor]) -> Reducer:
    if ddof < 0:
        raise ValueError(f"ddof must not be negative, not {ddof}")

    def result(part: ParameterState, n: Tensor) -> dict[str, Tensor]:
        return {"": of(variance(part, n, ddof))}

    return for_each_parameter(start_spread, merge_spread, result)


def variance(part: ParameterState, n: Tensor, ddof: int) -> Tensor:
    """Return m2 / (N − ddof) (*shape), NaN where N ≤ ddof."""
    degrees = n - ddof
    return part["m2"] / torch.where(degrees > 0, degrees, torch.nan)


def merge_spread(a: ParameterState, b: ParameterState, n_a: Tensor, n_b: Tensor) -> ParameterState:
    """Merge two parts of `start_spread`."""
    share = n_b / (n_a + n_b)
    gap = (b["mean"] - a["mean"]) + (b["rest"] - a["rest"])
    mean, rest = _two_sum(a["mean"], a["rest"] + gap * share)
    between = squares(gap) * (n_a * share)
    return {"mean": mean, "rest": rest, "m2": a["m2"] + b["m2"] + between}


def _power_sums(power: int, *, divided: bool = True) -> Reducer:
    """Return the reducer to Σᵢ T(gᵢ) or Σᵢ |T(gᵢ)|², which the gradients may know; over N."""

    def start(gradients: Gradients) -> State:
        every = {f"sum:{name}": power_sum(gradients, name, power) for name in gradients}
        return {"n": count(gradients), **every}

    def result(state: State) -> dict[str, Tensor]:
        by = float(state["n"]) if divided else 1.0
        return {name: total / by for name, total in entries(state, "sum").items()}

    return Reducer(start, added, result, powers=frozenset({power}), additive=True, separate=True)


def start_spread(block: Block) -> ParameterState:
    """Return the mean of a batch, its rest and m2 = Σᵢ |gᵢ − mean|², all (*shape).

    Where the block knows Σ|g|² without a dense form, Σ|g|² − n|mean|² is taken, unless it cancels
    in some entry. Otherwise a second pass over dense tiles sums deviations from the mean.
    """
    n, whole = block.n, wide(block)
    mean = whole.weighted_sum() / n
    if n == 1:
        zero = torch.zeros_like(mean)
        return {"mean": mean, "rest": zero, "m2": squares(zero)}
    if whole.sums_squares:
        total = whole.squared_sum()
        m2 = total - n * squares(mean)
        if bool((m2 >= _SAFE * total).all()):
            return {"mean": mean, "rest": torch.zeros_like(mean), "m2": m2}
    rest = torch.zeros_like(mean)
    m2 = torch.zeros_like(squares(mean))
    for tile in tiles(block):
        deviations = tile - mean
        rest += deviations.sum(0)
        m2 += squares(deviations).sum(0)
    return {"mean": mean, "rest": rest / n, "m2": (m2 - squares(rest) / n).clamp_min(0.0)}


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b rounded, and what rounding left out, exactly (Knuth's TwoSum)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)
