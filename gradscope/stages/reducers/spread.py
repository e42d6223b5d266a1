"""Variance and standard deviation, exact also where the mean is far larger than the spread.

The state holds the mean as an unevaluated sum of two float64 numbers, `mean` + `rest`, and the sum
of squared deviations from it, `m2`. Two such means differ by (mean_b − mean_a) + (rest_b − rest_a),
whose first difference is exact where they are close (Sterbenz 1974), so that merging by Chan, Golub
and LeVeque's update (1979) does not lose the digits that the mean and the spread do not share.
"""

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients
from gradscope.blocks.base import squares
from gradscope.stages.reducers.base import (
    Reducer,
    State,
    count,
    entries,
    on_one_device,
    reducers,
    tiles,
    wide,
)

_SAFE = 0.01  # share of Σ|g|² that must be left after the mean's part is taken off: two digits lost


@reducers.register("var")
def var(ddof: int = 1) -> Reducer:
    """Σᵢ |T(gᵢ) − mean|² / (N − ddof), elementwise; NaN where N ≤ ddof.

    `var:ddof=0 | norm:p=1` is Σⱼ (E[gⱼ²] − E[gⱼ]²), the ξ of CABS (Balles et al. 2017,
    arXiv:1612.05086).

    Args:
        ddof: Delta degrees of freedom: 1 is the unbiased estimate, 0 the population's variance.

    Raises:
        ValueError: ddof is negative.
    """
    _check(ddof)
    return Reducer(start_spread, merge_spread, lambda state: variance(state, ddof))


@reducers.register("std")
def std(ddof: int = 1) -> Reducer:
    """√var, elementwise; NaN where N ≤ ddof.

    Args:
        ddof: Delta degrees of freedom of the variance.

    Raises:
        ValueError: ddof is negative.
    """
    _check(ddof)

    def result(state: State) -> dict[str, Tensor]:
        return {name: value.sqrt() for name, value in variance(state, ddof).items()}

    return Reducer(start_spread, merge_spread, result)


def variance(state: State, ddof: int) -> dict[str, Tensor]:
    """Return m2 / (N − ddof) by name, NaN where N ≤ ddof."""
    degrees = state["n"] - ddof
    by = torch.where(degrees > 0, degrees, torch.nan)
    return {name: m2 / by for name, m2 in entries(state, "m2").items()}


def mean_of(state: State) -> dict[str, Tensor]:
    """Return the mean by name."""
    return {name: m + state[f"rest:{name}"] for name, m in entries(state, "mean").items()}


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


def _check(ddof: int) -> None:
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
    if whole.sums_squares:
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
