"""Indexing by tensors of positions, and embeddings: the sample's own number is one more index."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.backends.expand.facts import aten, rules
from gradscope.backends.expand.tensor import Expansion, PerSample, fold, is_shared, unfold

Indices = list[Tensor | None]


def _located(s: Expansion, t: Tensor, indices: Indices) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return `t` (n, indexed axes, others) and its indices, or None for masks and gaps.

    Indexed axes must stand together at the front: torch puts the result's axes elsewhere
    otherwise.
    """
    given = [i for i in indices if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given) or None in indices[: len(given)]:
        return None
    width = max(i.dim() for i in given)
    own = [_aligned(s, i, width) for i in given]
    first = torch.arange(s.n, device=t.device).reshape(-1, *[1] * width)
    return s.of(t), (first, *own)


def _aligned(s: Expansion, index: Tensor, width: int) -> Tensor:
    """Return the index (n, ...) with `width` axes after the sample axis."""
    return s.of(index)[(slice(None), *[None] * (width - index.dim()))]


@rules.register("index.Tensor")
def index(s: Expansion, t: Tensor, indices: Indices) -> Any:
    """Pick entries by positions in the leading axes."""
    found = _located(s, t, indices)
    return NotImplemented if found is None else found[0][found[1]]


@rules.register("index_put.default")
def index_put(s: Expansion, t: Tensor, *rest: Any) -> Any:
    """Return a copy with entries replaced or added to."""
    if not isinstance(t, PerSample):
        return NotImplemented
    return index_put_(s, PerSample(s.of(t).clone()), *rest)


@rules.register("index_put_.default")
@rules.register("_index_put_impl_.default")
def index_put_(
    s: Expansion,
    t: Tensor,
    indices: Indices,
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Any:
    """Replace entries, or add to them, in place."""
    found = _located(s, t, indices)
    if found is None:
        return NotImplemented
    target, own = found
    width = (own[1].dim() - 1) + t.dim() - (len(own) - 1)  # logical axes of what is replaced
    if values.dim() > width:
        return NotImplemented
    return target.index_put_(own, _aligned(s, values, width), accumulate)


def _own_rows(s: Expansion, indices: Tensor, size: int) -> Tensor:
    """Count indices (n, ...) into tables of `size` rows laid end to end."""
    offsets = torch.arange(s.n, device=indices.device) * size
    return indices + offsets.reshape(-1, *[1] * (indices.dim() - 1))


@rules.register("embedding.default")
def embedding(
    s: Expansion,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look rows up; the options are about the backward pass."""
    table, rows = s.of(weight), s.of(indices)
    if is_shared(table):
        return F.embedding(rows, table[0])
    if rows.numel() and (rows.min() < 0 or rows.max() >= table.shape[1]):
        return NotImplemented  # torch says what is wrong
    return F.embedding(_own_rows(s, rows, table.shape[1]), fold(table))


@rules.register("embedding_dense_backward.default")
def embedding_backward(
    s: Expansion,
    grad: Tensor,
    indices: Tensor,
    size: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Add gradients to their rows, except those of `padding_idx`."""
    values, rows = s.of(grad), s.of(indices)
    if padding_idx >= 0:
        values = values.masked_fill((rows == padding_idx).unsqueeze(-1), 0)
    flat = _own_rows(s, rows, size)
    out: Tensor = aten.embedding_dense_backward(values, flat, s.n * size, -1, scale_grad_by_freq)
    return unfold(out, s.n)


@rules.register("_sparse_coo_tensor_with_dims_and_tensors.default")
def sparse_gradient(
    s: Expansion,
    sparse_dim: int,
    dense_dim: int,
    size: list[int],
    indices: Tensor,
    values: Tensor,
    **kwargs: Any,
) -> Tensor:
    """Return what an embedding with sparse gradients makes of them, in dense form."""
    rows, added = s.of(indices), s.of(values)  # (n, axes, entries), (n, entries, ...)
    own = torch.arange(s.n, device=rows.device).unsqueeze(1)
    return added.new_zeros(s.n, *size).index_put_((own, *rows.unbind(1)), added, True)
