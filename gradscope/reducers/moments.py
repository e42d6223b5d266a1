"""Sum, mean and variance over samples."""

import torch
from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.reducers.base import Reducer, State, count, entries, reducers, wide


@reducers.register("sum")
def sum_() -> Reducer:
    """Σᵢ T(gᵢ)."""
    return Reducer(_start_sum, _merge_sum, lambda state: entries(state, "sum"))


@reducers.register("mean")
def mean() -> Reducer:
    """(1/N) Σᵢ T(gᵢ): the expectation over the samples."""

    def result(state: State) -> dict[str, Tensor]:
        return {name: total / state["n"] for name, total in entries(state, "sum").items()}

    return Reducer(_start_sum, _merge_sum, result)


@reducers.register("var")
def var(ddof: int = 1) -> Reducer:
    """Σᵢ |T(gᵢ) − mean|² / (N − ddof), elementwise; NaN where N ≤ ddof.

    Batches are merged by Chan, Golub and LeVeque's update (1979), which does not cancel.

    Args:
        ddof: Delta degrees of freedom: 1 is the unbiased estimate, 0 the population's variance.

    Raises:
        ValueError: ddof is negative.
    """
    if ddof < 0:
        raise ValueError(f"ddof must not be negative, not {ddof}")

    def result(state: State) -> dict[str, Tensor]:
        degrees = state["n"] - ddof
        nan = torch.tensor(torch.nan, dtype=torch.float64)
        by = torch.where(degrees > 0, degrees, nan)
        return {name: deviations / by for name, deviations in entries(state, "m2").items()}

    return Reducer(_start_var, _merge_var, result)


def _start_sum(gradients: Gradients) -> State:
    state = {f"sum:{name}": wide(block).weighted_sum() for name, block in gradients.items()}
    return {"n": count(gradients), **state}


def _merge_sum(a: State, b: State) -> State:
    return {key: value + b[key] for key, value in a.items()}


def _start_var(gradients: Gradients) -> State:
    n = gradients.n
    state: State = {"n": count(gradients)}
    for name, block in gradients.items():
        precise = wide(block)
        mean = precise.weighted_sum() / n
        state[f"mean:{name}"] = mean
        state[f"m2:{name}"] = (precise.squared_sum() - n * mean.abs().square()).clamp_min(0.0)
    return state


def _merge_var(a: State, b: State) -> State:
    n = a["n"] + b["n"]
    share = b["n"] / n
    merged: State = {"n": n}
    for name, mean in entries(a, "mean").items():
        gap = b[f"mean:{name}"] - mean
        between = gap.abs().square() * a["n"] * share
        merged[f"mean:{name}"] = mean + gap * share
        merged[f"m2:{name}"] = a[f"m2:{name}"] + b[f"m2:{name}"] + between
    return merged
