"""Reducers based on sums over samples: mean, moments, variance and standard deviation.

The variance is exact also if the mean is far larger than the spread. Its state holds the mean as
an unevaluated sum of two float64 numbers, `mean` + `rest`, and the sum of squared deviations from
the mean, `m2`. Two means differ by (mean_b − mean_a) + (rest_b − rest_a). The first difference is
exact if the means are close (Sterbenz 1974). So the update of Chan, Golub and LeVeque (1979) merges
two states without cancellation.
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

_SAFE = 0.01  # least share of Σ|g|² after n|mean|² is subtracted: at most two digits are lost


@reducers.register("sum")
def sum_() -> Reducer:
    """Σᵢ T(gᵢ)."""
    return _power_sums(1, divided=False)


@reducers.register("mean")
def mean(standard_error: bool = False) -> Reducer:
    """(1/N) Σᵢ T(gᵢ): the expectation over the samples.

    With `standard_error=true`, the result also has NAME.standard_error (*shape), √(var / N) with
    ddof 1: the standard error of the mean of N independent samples. It is NaN for one sample.
    Transforms after the reducer act on both the mean and its error.
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

    A sample's gradient is first summed over its positions, then squared (Kunstner et al. 2019,
    arXiv:1905.12558, on limits of the empirical Fisher).
    """
    return _power_sums(2)


@reducers.register("moment")
def moment(k: int) -> Reducer:
    """(1/N) Σᵢ T(gᵢ)ᵏ elementwise, about zero; complex entries are raised to the complex power."""
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
    arXiv:1612.05086). ddof (delta degrees of freedom) = 1 gives the unbiased estimate, ddof=0 the
    population variance.
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
    """Return the reducer Σᵢ T(gᵢ) or Σᵢ |T(gᵢ)|², divided by N if `divided`."""

    def start(gradients: Gradients) -> State:
        every = {f"sum:{name}": power_sum(gradients, name, power) for name in gradients}
        return {"n": count(gradients), **every}

    def result(state: State) -> dict[str, Tensor]:
        by = float(state["n"]) if divided else 1.0
        return {name: total / by for name, total in entries(state, "sum").items()}

    return Reducer(start, added, result, powers=frozenset({power}), additive=True, separate=True)


def start_spread(block: Block) -> ParameterState:
    """Return the mean of a batch, its rest and m2 = Σᵢ |gᵢ − mean|², all (*shape).

    If the block computes Σ|g|² without a dense form, m2 is Σ|g|² − n|mean|², unless that cancels in
    some entry. Otherwise a second pass over dense tiles sums the deviations from the mean.
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
    """Return a + b rounded, and its exact rounding error (Knuth's TwoSum)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)
