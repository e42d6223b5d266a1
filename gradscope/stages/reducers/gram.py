"""Inner products of all samples' gradients with each other.

The state keeps the factors of all samples. It grows with N, and the result grows with N². Rows of
factors are padded with zeros to a common number of positions, which changes no product.
"""

from functools import reduce
from math import prod
from operator import add

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.blocks import Block, DenseBlock, Gradients, TotalBlock, from_factors, wide
from gradscope.stages.reducers.base import (
    ParameterState,
    Reducer,
    State,
    count,
    joined,
    on_one_device,
    parts,
    reducers,
)

_POSITIONS = {"left": 2, "right": 2, "index": 1, "rows": 1}  # the axis t of each field


@reducers.register("gram")
def gram() -> Reducer:
    """⟨T(gᵢ), T(gⱼ)⟩ for all pairs of samples, over all parameters: `gram` (N, N).

    Rows and columns are in the order of the data set, without the samples that the run left out.
    The second factor of complex products is conjugated. The state holds the factors of each
    sample's gradient, or the gradient itself unless the factors are smaller.
    """

    def start(gradients: Gradients) -> State:
        n, index = count(gradients), gradients.index
        if index is None:  # equal positions keep the order in which they came
            index = torch.zeros(gradients.n, dtype=torch.int64)
        every = {name: _fields(block) for name, block in gradients.items()}
        return {"index": index.to(n.device), **joined(n, every)}

    @on_one_device
    def merge(a: State, b: State) -> State:
        right = parts(b)
        every = {name: _merged(part, right[name]) for name, part in parts(a).items()}
        return {"index": torch.cat([a["index"], b["index"]]), **joined(a["n"] + b["n"], every)}

    def result(state: State) -> dict[str, Tensor]:
        products = reduce(add, (wide(_block(part)).gram() for part in parts(state).values()))
        order = state["index"].argsort(stable=True)
        return {"gram": products[order][:, order]}

    return Reducer(start, merge, result)


def _fields(block: Block) -> ParameterState:
    """Return {"k.field": (n, ...)} with the factors of each term k, or dense if not larger."""
    if block.factored_size is None or block.factored_size < prod(block.shape):
        part: ParameterState = {}
        for k, term in enumerate(block.terms()):
            factors = term.factors()
            if factors is None:
                part[f"{k}.values"] = term.dense()
            else:
                part |= {f"{k}.{field}": values for field, values in factors.tensors.items()}
                part[f"{k}.shape"] = torch.tensor(factors.shape)
        kept = (prod(values.shape[1:]) for key, values in part.items() if "shape" not in key)
        if sum(kept) < prod(block.shape):
            return part
    return {"0.values": block.dense()}


def _block(part: ParameterState) -> Block:
    """Return the block of a part that `_fields` made."""
    terms: dict[int, ParameterState] = {}
    for key, values in part.items():
        number, _, field = key.partition(".")
        terms.setdefault(int(number), {})[field] = values
    blocks: list[Block] = []
    for _, term in sorted(terms.items()):
        if "values" in term:
            blocks.append(DenseBlock(term["values"]))
        else:
            kind = "scatter" if "rows" in term else "outer"
            blocks.append(from_factors(kind, term, tuple(term["shape"].tolist())))
    return blocks[0] if len(blocks) == 1 else TotalBlock(tuple(blocks))


def _merged(a: ParameterState, b: ParameterState) -> ParameterState:
    """Join the samples of two batches; blocks of different kinds become dense."""
    if _sizes(a) != _sizes(b):
        return {"0.values": torch.cat([_block(a).dense(), _block(b).dense()])}
    return {key: _stacked(key, values, b[key]) for key, values in a.items()}


def _sizes(part: ParameterState) -> dict[str, list[int]]:
    """Return the sizes that must be equal to join two parts: all except the positions axis."""
    found = {}
    for key, values in part.items():
        field = key.partition(".")[2]
        sizes = [s for axis, s in enumerate(values.shape) if axis not in (0, _POSITIONS.get(field))]
        found[key] = values.tolist() if field == "shape" else sizes
    return found


def _stacked(key: str, a: Tensor, b: Tensor) -> Tensor:
    field = key.partition(".")[2]
    if field == "shape":
        return a
    if field in _POSITIONS:
        axis = _POSITIONS[field]
        longest, after = max(a.shape[axis], b.shape[axis]), [0, 0] * (a.dim() - axis - 1)
        a, b = (F.pad(t, [*after, 0, longest - t.shape[axis]]) for t in (a, b))
    return torch.cat([a, b])
