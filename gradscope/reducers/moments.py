"""Sums over samples and what is a sum divided by N: mean, second moment, any moment."""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients
from gradscope.reducers.base import Reducer, State, added, count, entries, reducers, tiles, wide
from gradscope.reducers.spread import mean_of, merge_spread, start_spread, variance


@reducers.register("sum")
def sum_() -> Reducer:
    """Σᵢ T(gᵢ)."""
    return Reducer(_summed(_sum), added, lambda state: entries(state, "sum"))


@reducers.register("mean")
def mean(standard_error: bool = False) -> Reducer:
    """(1/N) Σᵢ T(gᵢ): the expectation over the samples.

    Args:
        standard_error: Add NAME.standard_error (*shape), √(var / N) with ddof 1: how far the mean
            of so many independent samples is from the expectation, NaN for one sample.
            Transforms that follow see the mean and its error alike.
    """
    if not standard_error:
        return _expectation(_sum)

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
    return _expectation(lambda block: wide(block).squared_sum())


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

    def power_sum(block: Block) -> Tensor:
        if k == 1:
            return _sum(block)
        if k == 2 and not block.dtype.is_complex:
            return wide(block).squared_sum()
        return reduce(torch.add, (tile.pow(k).sum(0) for tile in tiles(block)))

    return _expectation(power_sum)


def _sum(block: Block) -> Tensor:
    return wide(block).weighted_sum()


def _summed(of: Callable[[Block], Tensor]) -> Callable[[Gradients], State]:
    def start(gradients: Gradients) -> State:
        sums = {f"sum:{name}": of(block) for name, block in gradients.items()}
        return {"n": count(gradients), **sums}

    return start


def _expectation(of: Callable[[Block], Tensor]) -> Reducer:
    def result(state: State) -> dict[str, Tensor]:
        return {name: total / state["n"] for name, total in entries(state, "sum").items()}

    return Reducer(_summed(of), added, result)
