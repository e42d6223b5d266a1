"""Kronecker factors: the second moments of a gradient's two factors.

A layer's gradient is Σₜ bₜ ⊗ aₜ over T positions (one for a linear layer on vectors, output pixels
for a convolution, time steps for a shared layer), with a the activation and b the output gradient.
Martens and Grosse 2015 (arXiv:1503.05671) take E[b bᵀ] ⊗ E[a aᵀ] for E[vec(g) vec(g)ᵀ]; with
several positions, and these taken as independent, it is E[Σₜ b bᵀ] ⊗ E[(1/T) Σₜ a aᵀ] (Grosse and
Martens 2016, arXiv:1602.01407; "expand" in Eschenhagen et al. 2023, arXiv:2311.00636).
"""

from typing import Literal

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients, wide
from gradscope.errors import UnsupportedError
from gradscope.stages.reducers.base import (
    TILE_BYTES,
    Part,
    Reducer,
    State,
    for_each_parameter,
    reducers,
)


@reducers.register("kfac")
def kfac(positions: Literal["mean", "sum"] = "mean") -> Reducer:
    """Kronecker factors NAME.A, NAME.B of each layer's Fisher block; NAME.diagonal without them.

    B ⊗ A approximates the block E[vec(g) vec(g)ᵀ] for a gradient read row by row (A ⊗ B read
    column by column), and equals it for one sample without weight sharing. B (r, r) belongs to the
    weight's first axis, A (c, c) to the others: output gradient and activation for linear layers
    and convolutions, the other way round where a weight is stored inputs first (transposed
    convolutions, `x @ W`). With G groups they are (G, r, r) and (G, c, c). With complex factors
    they are E[b bᴴ] and E[a aᴴ].

    Parameters whose gradients have no factors (biases, norms, tables) have NAME.diagonal (*shape),
    E[|g|²], instead. Factors are known to the backend `hooks`. A transform before scales one
    factor or destroys both: nothing should come before.

    With `positions=mean`, A = (1/NT) Σᵢₜ a aᵀ; with `sum`, A = (1/N) Σᵢₜ a aᵀ. B = (1/N) Σᵢₜ b bᵀ.
    """

    def result(part: Part, n: Tensor) -> dict[str, Tensor]:
        if "squares" in part:
            return {"diagonal": part["squares"] / n}
        return {"A": part["a"] / (part["t"] if positions == "mean" else n), "B": part["b"] / n}

    made = for_each_parameter(_sums, None, result)

    def start(gradients: Gradients) -> State:
        if all(block.kind != "outer" for block in gradients.values()):
            raise UnsupportedError(
                "kfac needs gradients that are sums of outer products, and none of "
                f"{', '.join(gradients)} is",
                remedy="Use the backend hooks, and kfac without a transform before it.",
            )
        return made.start(gradients)

    def merge(a: State, b: State) -> State:
        differing = {key.partition(":")[2] for key in a.keys() ^ b.keys()}
        if differing:
            raise UnsupportedError(
                f"{', '.join(sorted(differing))}: an outer product in one batch and not in another",
                remedy="Use one backend, and batches of one form.",
            )
        return made.merge(a, b)

    def in_order(state: State) -> dict[str, Tensor]:
        found = made.result(state).items()
        return dict(sorted(found, key=lambda item: item[0].endswith(".diagonal")))

    return Reducer(start, merge, in_order, raw=True)


def _sums(block: Block) -> Part:
    """Return Σᵢₜ a aᴴ, Σᵢₜ b bᴴ and the number of positions, a few samples at a time."""
    if block.kind != "outer":
        return {"squares": wide(block).squared_sum()}
    step = max(1, TILE_BYTES // max(1, (block.factored_size or 1) * 16))
    found: Part = {"t": torch.zeros((), dtype=torch.float64, device=block.device)}
    for start in range(0, block.n, step):
        factors = wide(block.select(slice(start, start + step))).factors()
        assert factors is not None  # of an outer product
        left, right = factors.tensors.values()
        found["t"] = found["t"] + len(left) * left.shape[2]
        for key, factor in (("a", right), ("b", left)):
            rows = factor.transpose(0, 1).flatten(1, 2)  # (k, n·t, ·)
            moments = rows.mT @ rows.conj()  # with one group (f, f), else (k, f, f)
            moments = moments[0] if len(moments) == 1 else moments
            found[key] = found[key] + moments if key in found else moments
    return {key: found[key] for key in "abt"}
