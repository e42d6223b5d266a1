"""Sums over samples and what is a sum divided by N: mean, second moment, any moment."""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients
from gradscope.stages.reducers.base import (
    Reducer,
    State,
    added,
    count,
    entries,
    power_sum,
    reducers,
    tiles,
    wide,
)
from gradscope.stages.reducers.spread import mean_of, merge_spread, start_spread, variance


@reducers.register("sum")
def sum_() -> Reducer:
    """Σᵢ T(gᵢ)."""
    return Reducer(
        _power_sums(1), added, lambda state: entries(state, "sum"), powers=frozenset({1})
    )


@reducers.register("mean")
def mean(standard_error: bool = False) -> Reducer:
    """(1/N) Σᵢ T(gᵢ): the expectation over the samples.

    Args:
        standard_error: Add NAME.standard_error (*shape), √(var / N) with ddof 1: how far the mean
            of so many independent samples is from the expectation, NaN for one sample.
            Transforms that follow see the mean and its error alike.
    """
    if not standard_error:
        return _expectation(_power_sums(1), 1)

    def result(state: State) -> dict[str, Tensor]:
        errors = {name: (v / state["n"]).sqrt() for name, v in variance(state, 1).items()}
        found: dict[str, Tensor] = {}
        for name, value in mean_of(state).items():
            found |= {name: value, f"{name}.standard_error": errors[name]}
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
    """(1/N) Σᵢ T(gᵢ)ᵏ elementwise, about zero; of complex entries the complex power.

    Args:
        k: The order, at least 1.

    Raises:
        ValueError: k is below 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if k == 1:
        return _expectation(_power_sums(1), 1)

    def start(gradients: Gradients) -> State:
        sums = {f"sum:{name}": _power_sum(block, k) for name, block in gradients.items()}
        return {"n": count(gradients), **sums}

    return _expectation(start)


def _power_sum(block: Block, k: int) -> Tensor:
    if k == 2 and not block.dtype.is_complex:
        return wide(block).squared_sum()
    return reduce(torch.add, (tile.pow(k).sum(0) for tile in tiles(block)))


def _power_sums(power: int) -> Callable[[Gradients], State]:
    def start(gradients: Gradients) -> State:
        sums = {f"sum:{name}": power_sum(gradients, name, power) for name in gradients}
        return {"n": count(gradients), **sums}

    return start


def _expectation(start: Callable[[Gradients], State], *powers: int) -> Reducer:
    def result(state: State) -> dict[str, Tensor]:
        n = float(state["n"])
        return {name: total / n for name, total in entries(state, "sum").items()}

    return Reducer(start, added, result, powers=frozenset(powers))
