"""Indexing by tensors of positions: the sample's own number is one more index."""

from typing import Any

import torch
from torch import Tensor

from gradscope.backends.expand.rules import rules
from gradscope.backends.expand.tensor import PerSample, Samples

Indices = list[Tensor | None]


def _located(s: Samples, t: Tensor, indices: Indices) -> tuple[Tensor, tuple[Tensor, ...]] | None:
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


def _aligned(s: Samples, index: Tensor, width: int) -> Tensor:
    """Return the index (n, ...) with `width` axes after the sample axis."""
    return s.of(index)[(slice(None), *[None] * (width - index.dim()))]


@rules.register("index.Tensor")
def index(s: Samples, t: Tensor, indices: Indices) -> Any:
    """Pick entries by positions in the leading axes."""
    found = _located(s, t, indices)
    return NotImplemented if found is None else found[0][found[1]]


@rules.register("index_put.default")
def index_put(
    s: Samples, t: Tensor, indices: Indices, values: Tensor, accumulate: bool = False
) -> Any:
    """Return a copy with entries replaced or added to."""
    if not isinstance(t, PerSample):
        return NotImplemented
    return _put(s, t, s.of(t).clone(), indices, values, accumulate)


@rules.register("index_put_.default")
def index_put_(
    s: Samples, t: Tensor, indices: Indices, values: Tensor, accumulate: bool = False
) -> Any:
    """Replace entries, or add to them, in place."""
    return _put(s, t, s.of(t), indices, values, accumulate)


@rules.register("_index_put_impl_.default")
def _index_put_impl(
    s: Samples,
    t: Tensor,
    indices: Indices,
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Any:
    """Replace entries, or add to them, in place: what autograd calls."""
    return _put(s, t, s.of(t), indices, values, accumulate)


def _put(
    s: Samples, t: Tensor, target: Tensor, indices: Indices, values: Tensor, accumulate: bool
) -> Any:
    found = _located(s, t, indices)
    if found is None:
        return NotImplemented
    own = found[1]
    width = (own[1].dim() - 1) + t.dim() - (len(own) - 1)  # logical axes of what is replaced
    if values.dim() > width:
        return NotImplemented
    return target.index_put_(own, _aligned(s, values, width), accumulate)
