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

from gradscope.blocks import Block, Gradients
from gradscope.errors import UnsupportedError
from gradscope.stages.reducers.base import (
    TILE_BYTES,
    Reducer,
    State,
    added,
    count,
    entries,
    on_one_device,
    reducers,
    wide,
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

    def result(state: State) -> dict[str, Tensor]:
        n = state["n"]
        found: dict[str, Tensor] = {}
        for name, columns in entries(state, "a").items():
            found[f"{name}.A"] = columns / (state[f"t:{name}"] if positions == "mean" else n)
            found[f"{name}.B"] = state[f"b:{name}"] / n
        for name, squares in entries(state, "squares").items():
            found[f"{name}.diagonal"] = squares / n
        return found

    return Reducer(_start, _merge, result, raw=True)


def _start(gradients: Gradients) -> State:
    state: State = {"n": count(gradients)}
    for name, block in gradients.items():
        if block.kind == "outer":
            state |= _factors(name, block)
        else:
            state[f"squares:{name}"] = wide(block).squared_sum()
    if not entries(state, "a"):
        names = ", ".join(gradients)
        raise UnsupportedError(
            f"kfac needs gradients that are sums of outer products, and none of {names} is",
            remedy="Use the backend hooks, and kfac without a transform before it.",
        )
    return state


def _factors(name: str, block: Block) -> State:
    """Return Σᵢₜ a aᴴ, Σᵢₜ b bᴴ and the number of positions, a few samples at a time."""
    step = max(1, TILE_BYTES // max(1, (block.factored_size or 1) * 16))
    sums: list[Tensor] = []
    positions = torch.zeros((), dtype=torch.float64, device=block.device)
    for start in range(0, block.n, step):
        part = wide(block.select(slice(start, start + step)))
        factors = part.factors()
        assert factors is not None  # of an outer product
        left, right = factors.tensors.values()
        positions += part.n * left.shape[2]
        new = [_second_moments(factor) for factor in (right, left)]
        sums = [a + b for a, b in zip(sums, new, strict=True)] if sums else new
    return {f"a:{name}": sums[0], f"b:{name}": sums[1], f"t:{name}": positions}


def _second_moments(factor: Tensor) -> Tensor:
    """Return Σᵢₜ f fᴴ of (n, k, t, f): (f, f), or (k, f, f) with several groups."""
    rows = factor.transpose(0, 1).flatten(1, 2)  # (k, n·t, f)
    moments = rows.mT @ rows.conj()
    return moments[0] if len(moments) == 1 else moments


@on_one_device
def _merge(a: State, b: State) -> State:
    differing = {key.partition(":")[2] for key in a.keys() ^ b.keys()}
    if differing:
        raise UnsupportedError(
            f"{', '.join(sorted(differing))}: an outer product in one batch and not in another",
            remedy="Use one backend, and batches of one form.",
        )
    return added(a, b)
