"""Normalisation layers, forward and backward.

Shapes: n sample, b row, c channel, then the spatial axes.
"""

from typing import Any

from torch import Tensor

from gradscope.backends.expand.convolution import as_groups, from_groups
from gradscope.backends.expand.facts import aten
from gradscope.backends.expand.rules import rules
from gradscope.backends.expand.tensor import Samples, fold, unfold


def _trailing(affine: Tensor, like: Tensor) -> Tensor:
    """Align (n, *shape) with `like` (n, ..., *shape)."""
    return affine[(slice(None), *[None] * (like.dim() - affine.dim()))]


@rules.register("native_layer_norm.default")
def layer_norm(
    s: Samples, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise over the trailing axes `shape`; the affine map is applied on its own."""
    out, mean, rstd = aten.native_layer_norm(s.of(x), shape, None, None, eps)
    if weight is not None:
        out = out * _trailing(s.of(weight), out)
    if bias is not None:
        out = out + _trailing(s.of(bias), out)
    return out, mean, rstd


@rules.register("native_layer_norm_backward.default")
def layer_norm_backward(
    s: Samples,
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the input, the weight and the bias, those the mask asks for."""
    pg, px, pm, pr = s.of(grad), s.of(x), s.of(mean), s.of(rstd)
    rows = list(range(1, px.dim() - len(shape)))
    to_x = to_weight = to_bias = None
    if mask[0]:
        scaled = pg if weight is None else pg * _trailing(s.of(weight), pg)
        inner = (scaled, px, shape, pm, pr, None, None, [True, False, False])
        to_x = aten.native_layer_norm_backward(*inner)[0]
    if mask[1]:
        to_weight = _summed(pg * (px - pm) * pr, rows)
    if mask[2]:
        to_bias = _summed(pg, rows)
    return to_x, to_weight, to_bias


def _summed(t: Tensor, axes: list[int]) -> Tensor:
    return t.sum(axes) if axes else t


@rules.register("native_group_norm.default")
def group_norm(
    s: Samples,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    b: int,
    c: int,
    spatial: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise groups of channels; the samples are rows."""
    px = s.of(x)
    folded = fold(px).contiguous()
    out, mean, rstd = aten.native_group_norm(folded, None, None, s.n * b, c, spatial, groups, eps)
    out = unfold(out, s.n)
    if weight is not None:
        out = out * _channels(s.of(weight), out)
    if bias is not None:
        out = out + _channels(s.of(bias), out)
    return out, unfold(mean, s.n), unfold(rstd, s.n)


def _channels(affine: Tensor, like: Tensor) -> Tensor:
    """Align (n, c) with `like` (n, b, c, ...)."""
    return affine[(slice(None), None, slice(None), *[None] * (like.dim() - 3))]


@rules.register("native_group_norm_backward.default")
def group_norm_backward(
    s: Samples,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    b: int,
    c: int,
    spatial: int,
    groups: int,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the input, the weight and the bias, those the mask asks for."""
    pg, px, pm, pr = s.of(grad), s.of(x), s.of(mean), s.of(rstd)  # pm, pr: (n, b, groups)
    to_x = to_weight = to_bias = None
    if mask[0]:
        scaled = pg if weight is None else pg * _channels(s.of(weight), pg)
        first = [fold(t).contiguous() for t in (scaled, px, pm, pr)]
        sizes = (s.n * b, c, spatial, groups)
        found = aten.native_group_norm_backward(*first, None, *sizes, [True, False, False])
        to_x = unfold(found[0], s.n)
    per_channel = pg.reshape(s.n, b, c, spatial)
    if mask[1]:
        grouped = px.reshape(s.n, b, groups, c // groups, spatial)
        normal = (grouped - pm[..., None, None]) * pr[..., None, None]
        to_weight = (per_channel * normal.reshape_as(per_channel)).sum((1, 3))
    if mask[2]:
        to_bias = per_channel.sum((1, 3))
    return to_x, to_weight, to_bias


def _flat(s: Samples, t: Tensor | None) -> Tensor | None:
    """Return (n, c) as (n·c,), a view where it is written to."""
    return None if t is None else s.of(t).reshape(-1)


def _saved(s: Samples, t: Tensor) -> Tensor:
    """Return saved statistics (n·c,), or (0,) in eval mode, as (n, c) or (n, 0)."""
    return t.reshape(s.n, -1) if t.numel() else t.new_empty(s.n, 0)


@rules.register("native_batch_norm.default")
def batch_norm(
    s: Samples,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each sample's channels by its own or by running statistics."""
    flat = [_flat(s, t) for t in (weight, bias, mean, var)]
    out, *saved = aten.native_batch_norm(as_groups(s.of(x)), *flat, training, *rest)
    return from_groups(out, s.n), _saved(s, saved[0]), _saved(s, saved[1])


@rules.register("native_batch_norm_backward.default")
def batch_norm_backward(
    s: Samples,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    saved_mean: Tensor | None,
    saved_rstd: Tensor | None,
    *rest: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the input, the weight and the bias, those the mask asks for."""
    flat = [_flat(s, t) for t in (weight, mean, var, saved_mean, saved_rstd)]
    groups = (as_groups(s.of(grad)), as_groups(s.of(x)))
    to_x, *affine = aten.native_batch_norm_backward(*groups, *flat, *rest)
    to_affine = [None if t is None else t.reshape(s.n, -1) for t in affine]
    return (None if to_x is None else from_groups(to_x, s.n)), to_affine[0], to_affine[1]
