"""Kronecker factors: the second moments of a gradient's two factors.

A layer's gradient is Σₜ bₜ ⊗ aₜ over T positions (one for a linear layer on vectors, output pixels
for a convolution, time steps for a shared layer), with a the activation and b the output gradient.
Martens and Grosse 2015 (arXiv:1503.05671) take E[b bᵀ] ⊗ E[a aᵀ] for E[vec(g) vec(g)ᵀ]; with
several positions, and these taken as independent, it is E[Σₜ b bᵀ] ⊗ E[(1/T) Σₜ a aᵀ] (Grosse and
Martens 2016, arXiv:1602.01407; "expand" in Eschenhagen et al. 2023, arXiv:2311.00636).

A bias whose gradient is Σₜ b belongs to the same layer: with (a, 1) in the place of a, both are one
block (Grosse and Martens 2016, section 2).
"""

from math import prod
from typing import Literal

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients, OuterBlock, SegmentBlock, belongs, bias_of, wide
from gradscope.core.precision import double, wider
from gradscope.errors import UnsupportedError
from gradscope.stages.reducers.base import (
    TILE_BYTES,
    Part,
    Reducer,
    State,
    added,
    count,
    joined,
    parts,
    reducers,
)


@reducers.register("kfac")
def kfac(
    positions: Literal["mean", "sum"] = "mean",
    bias: Literal["separate", "column"] = "separate",
    full: int = 0,
) -> Reducer:
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

    With `bias=column` a bias whose gradient is Σₜ b in every sample is the last column of its
    weight: the activations are (a, 1), A is (c + 1, c + 1), and the bias has nothing of its own.
    Where a weight is stored inputs first it is the last row, and B is (r + 1, r + 1).

    A dense parameter without factors of at most `full` numbers (a norm's) is taken as one row, with
    A its whole second moment E[g gᵀ] and B = 1, instead of the diagonal.
    """

    def start(gradients: Gradients) -> State:
        if all(block.kind != "outer" for block in gradients.values()):
            raise UnsupportedError(
                "kfac needs gradients that are sums of outer products, and none of "
                f"{', '.join(gradients)} is",
                remedy="Use the backend hooks, and kfac without a transform before it.",
            )
        every = {}
        for name, block in gradients.items():
            own = gradients.get(bias_of(name) or "") if bias == "column" else None
            if block.kind is None and 0 < prod(block.shape) <= full:
                block, own = _as_row(block), None
            every[name] = _sums(block, own)
        return joined(count(gradients), every)

    def merge(a: State, b: State) -> State:
        differing = {key.partition(":")[2] for key in a.keys() ^ b.keys()}
        if differing:
            raise UnsupportedError(
                f"{', '.join(sorted(differing))}: an outer product in one batch and not in another",
                remedy="Use one backend, and batches of one form.",
            )
        return added(a, b)

    def result(state: State) -> dict[str, Tensor]:
        n, every = state["n"], parts(state)
        layers = {name: _with_bias(part) for name, part in every.items() if "a" in part}
        inside = {bias_of(name) for name, (_, _, has_bias) in layers.items() if has_bias}
        found: dict[str, Tensor] = {}
        for name, (a, b, _) in layers.items():
            if name not in inside:
                found[f"{name}.A"] = a / (every[name]["t"] if positions == "mean" else n)
                found[f"{name}.B"] = b / n
        squares = {name: part["squares"] for name, part in every.items() if "squares" in part}
        return found | {f"{k}.diagonal": v / n for k, v in squares.items() if k not in inside}

    return Reducer(start, merge, result, raw=True)


def _as_row(block: Block) -> Block:
    """Return gradients as outer products of 1 and all of their numbers."""
    rows = block.dense().reshape(block.n, 1, 1, -1)
    return OuterBlock(rows.new_ones(block.n, 1, 1, 1), rows, block.shape)


def _sums(block: Block, bias: Block | None) -> Part:
    """Return Σᵢₜ a aᴴ, Σᵢₜ b bᴴ and the number of positions, a few samples at a time.

    With a bias, of (a, 1) and of (b, 1); and of how many samples it is not Σₜ b, and not Σₜ a.
    """
    if block.kind != "outer":
        return {"squares": wide(block).squared_sum()}
    step = max(1, TILE_BYTES // max(1, (block.factored_size or 1) * 16))
    found: Part = {}
    for start in range(0, block.n, step):
        rows = slice(start, start + step)
        part = block.select(rows)
        factors = part.factors()
        assert factors is not None  # of an outer product
        left, right = factors.tensors.values()
        more: Part = {}
        if bias is not None:
            own = bias.select(rows)
            more["apart"] = torch.stack([~belongs(own, side) for side in (left, right)]).sum(1)
        if isinstance(part, SegmentBlock):  # its own rows are not padded to the longest sample
            left, right = part.left[None, None], part.right[None, None]
        count = float(left.shape[0] * left.shape[2])
        more["t"] = torch.tensor(count, dtype=double(block.device), device=block.device)
        for key, side in (("a", right), ("b", left)):
            moments = _moments(side, ones=bias is not None)  # with one group (f, f), else (k, f, f)
            more[key] = moments[0] if len(moments) == 1 else moments
        found = {key: found[key] + value for key, value in more.items()} if found else more
    return {key: found[key] for key in ("a", "b", "t", "apart") if key in found}


def _moments(factor: Tensor, *, ones: bool) -> Tensor:
    """Return Σᵢₜ f fᴴ (k, f, f) of a factor (n, k, t, f) in float64; if asked, that of (f, 1)."""
    n, k, t, f = factor.shape
    dtype = wider(factor.dtype, factor.device)
    rows = torch.empty(k, n, t, f, dtype=dtype, device=factor.device)
    rows = rows.copy_(factor.transpose(0, 1)).flatten(1, 2)  # copied once
    found = rows.mT @ rows.conj()
    if not ones:
        return found
    sums = rows.sum(1, keepdim=True)  # (k, 1, f)
    below = torch.cat([sums.conj(), sums.new_full((k, 1, 1), n * t)], 2)
    return torch.cat([torch.cat([found, sums.mT], 2), below], 1)


def _with_bias(part: Part) -> tuple[Tensor, Tensor, bool]:
    """Return the sums A and B of the layer with its bias where that belongs to it, and whether."""
    a, b = part["a"], part["b"]
    if "apart" not in part:
        return a, b, False
    beside, below = (part["apart"] == 0).tolist()
    below = below and not beside
    a = a if beside else a[..., :-1, :-1]
    return a, b if below else b[..., :-1, :-1], beside or below
