"""Embeddings: rows of a shared table, or of one table a sample laid end to end."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.backends.expand.facts import aten
from gradscope.backends.expand.rules import rules
from gradscope.backends.expand.tensor import Samples, fold, is_shared, unfold


def _own_rows(s: Samples, indices: Tensor, size: int) -> Tensor:
    """Count indices (n, ...) into tables of `size` rows laid end to end."""
    offsets = torch.arange(s.n, device=indices.device) * size
    return indices + offsets.reshape(-1, *[1] * (indices.dim() - 1))


@rules.register("embedding.default")
def embedding(
    s: Samples,
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
    s: Samples,
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
    s: Samples,
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
