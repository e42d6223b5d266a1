"""The smallest and the largest value over samples."""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.stages.reducers.base import (
    Reducer,
    State,
    count,
    entries,
    on_one_device,
    ordered,
    reducers,
    tiles,
)


@reducers.register("min")
def minimum() -> Reducer:
    """minᵢ T(gᵢ), elementwise over the samples; complex gradients are refused."""
    return _extreme("min", torch.amin, torch.minimum)


@reducers.register("max")
def maximum() -> Reducer:
    """maxᵢ T(gᵢ), elementwise over the samples; complex gradients are refused."""
    return _extreme("max", torch.amax, torch.maximum)


def _extreme(
    name: str, over: Callable[[Tensor, int], Tensor], of_two: Callable[[Tensor, Tensor], Tensor]
) -> Reducer:
    def start(gradients: Gradients) -> State:
        state: State = {"n": count(gradients)}
        for key, block in ordered(gradients, name).items():
            state[f"value:{key}"] = reduce(of_two, (over(t, 0) for t in tiles(block)))
        return state

    @on_one_device
    def merge(a: State, b: State) -> State:
        merged = {f"value:{k}": of_two(v, b[f"value:{k}"]) for k, v in entries(a, "value").items()}
        return {"n": a["n"] + b["n"], **merged}

    return Reducer(start, merge, lambda state: entries(state, "value"))
