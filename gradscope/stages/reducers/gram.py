"""Inner products of all samples' gradients with each other.

The state keeps the factors of all samples: it grows with N, as the result does with N². Rows of
factors are padded with zeros to a common number of positions, which changes no product.
"""

from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.blocks import Block, DenseBlock, Gradients, TotalBlock, from_factors
from gradscope.stages.reducers.base import Reducer, State, count, on_one_device, reducers, wide

_POSITIONS = {"left": 2, "right": 2, "index": 1, "rows": 1}  # the axis t of each field

Part = dict[str, Tensor]  # the tensors of one block by field; the fields say of which kind it is


@reducers.register("gram")
def gram() -> Reducer:
    """⟨T(gᵢ), T(gⱼ)⟩ for all pairs of samples, over all parameters: `gram` (N, N).

    Rows and columns are in the order of the samples' positions in the data set, without those that
    were left out; the second factor is conjugated when complex. The state holds, of each sample,
    the factors of its gradient where they are smaller than the gradient, else the gradient.
    """
    return Reducer(_start, _merge, _result)


def _start(gradients: Gradients) -> State:
    n, index = count(gradients), gradients.index
    if index is None:  # equal positions keep the order in which they came
        index = torch.zeros(gradients.n, dtype=torch.int64)
    every = {name: _parts(block) for name, block in gradients.items()}
    return {"n": n, "index": index.to(n.device), **_flat(every)}


@on_one_device
def _merge(a: State, b: State) -> State:
    right = _nested(b)
    every = {name: _joined(parts, right[name]) for name, parts in _nested(a).items()}
    index = torch.cat([a["index"], b["index"]])
    return {"n": a["n"] + b["n"], "index": index, **_flat(every)}


def _result(state: State) -> dict[str, Tensor]:
    products = sum(wide(_block(parts)).gram() for parts in _nested(state).values())
    assert isinstance(products, Tensor)  # there is at least one parameter
    order = state["index"].argsort(stable=True)
    return {"gram": products[order][:, order]}


def _parts(block: Block) -> list[Part]:
    """Take a block apart into tensors (n, ...), dense where that is no larger."""
    if block.factored_size is not None and block.factored_size >= prod(block.shape):
        return [{"values": block.dense()}]
    found = [_fields(part) for part in block.terms()]
    kept = sum(prod(part[key].shape[1:]) for part in found for key in part if key != "shape")
    return found if kept < prod(block.shape) else [{"values": block.dense()}]


def _fields(block: Block) -> Part:
    factors = block.factors()
    if factors is None:
        return {"values": block.dense()}
    return {**factors.tensors, "shape": torch.tensor(factors.shape)}


def _block(parts: list[Part]) -> Block:
    """Put a block together again."""
    blocks: list[Block] = []
    for part in parts:
        if "values" in part:
            blocks.append(DenseBlock(part["values"]))
        else:
            kind = "scatter" if "rows" in part else "outer"
            blocks.append(from_factors(kind, part, tuple(part["shape"].tolist())))
    return blocks[0] if len(blocks) == 1 else TotalBlock(tuple(blocks))


def _joined(a: list[Part], b: list[Part]) -> list[Part]:
    """Join the samples of two batches, densely where their blocks are of different kinds."""
    if [_kind(part) for part in a] != [_kind(part) for part in b]:
        return [{"values": torch.cat([_block(a).dense(), _block(b).dense()])}]
    return [
        {key: v if key == "shape" else _stacked(v, right[key], key) for key, v in left.items()}
        for left, right in zip(a, b, strict=True)
    ]


def _kind(part: Part) -> dict[str, list[int]]:
    """Return what must be equal for two parts to be joined: all sizes but those of positions."""
    return {
        key: values.tolist()
        if key == "shape"
        else [s for axis, s in enumerate(values.shape) if axis not in (0, _POSITIONS.get(key))]
        for key, values in part.items()
    }


def _stacked(a: Tensor, b: Tensor, key: str) -> Tensor:
    axis = _POSITIONS.get(key)
    if axis is not None:
        longest, after = max(a.shape[axis], b.shape[axis]), [0, 0] * (a.dim() - axis - 1)
        a, b = (F.pad(t, [*after, 0, longest - t.shape[axis]]) for t in (a, b))
    return torch.cat([a, b])


def _flat(every: dict[str, list[Part]]) -> State:
    """Return {"k.field:NAME": tensor} for the k-th part of each name."""
    return {
        f"{k}.{key}:{name}": value
        for name, parts in every.items()
        for k, part in enumerate(parts)
        for key, value in part.items()
    }


def _nested(state: State) -> dict[str, list[Part]]:
    """Undo `_flat`, whatever order the entries are in."""
    every: dict[str, dict[int, Part]] = {}
    for key, value in state.items():
        head, colon, name = key.partition(":")
        if colon:
            number, _, field = head.partition(".")
            every.setdefault(name, {}).setdefault(int(number), {})[field] = value
    return {name: [parts[k] for k in sorted(parts)] for name, parts in every.items()}
