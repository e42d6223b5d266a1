"""Counts of what is not finite."""

import torch
from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.blocks.base import as_rows
from gradscope.stages.reducers.base import Reducer, State, added, count, entries, reducers


@reducers.register("nonfinite")
def nonfinite() -> Reducer:
    """Numbers of entries and of samples that are infinite or NaN, for each parameter.

    NAME.entries () counts over entries and samples, NAME.samples () the samples with at least one.
    Samples whose raw gradient is not finite never reach a reducer unless the run keeps them
    (nonfinite = "keep"); without that, what is counted here was made by the transforms.
    """

    def start(gradients: Gradients) -> State:
        state: State = {"n": count(gradients)}
        for name, block in gradients.items():
            bad = torch.cat([(~as_rows(tile).isfinite()).sum(1) for _, tile in block.tiles()])
            state[f"entries:{name}"] = bad.sum()
            state[f"samples:{name}"] = (bad > 0).sum()
        return state

    def result(state: State) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, bad in entries(state, "entries").items():
            found[f"{name}.entries"] = bad.double()
            found[f"{name}.samples"] = state[f"samples:{name}"].double()
        return found

    return Reducer(start, added, result)
