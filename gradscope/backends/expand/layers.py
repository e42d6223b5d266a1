"""Rules of layers: matrix products, convolutions, normalisation, fused attention.

In a product with a shared matrix, samples become rows. In a convolution with shared weights,
samples become images; with per-sample weights, they become groups.

Shapes: n sample, b row or image, c channel, then the spatial axes; in products p row, k contracted,
q column; in attention h head, t query position, s key position, d feature.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradscope.backends.expand.facts import aten, each, rules
from gradscope.backends.expand.tensor import Expansion, fold, is_shared, leaves, unfold

Scalar = int | float | complex
Align = Callable[[Tensor, Tensor], Tensor]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply physical matrices (n, p, k) and (n, k, q) sample by sample: (n, p, q).

    A shared factor is not repeated in memory.
    """
    n, p, k = a.shape
    q = b.shape[2]
    if k == 1:  # an outer product, several times as fast as a matrix product
        return a * b
    if is_shared(b):
        return (a.reshape(n * p, k) @ b[0]).reshape(n, p, q)
    if is_shared(a):
        return (b.mT.reshape(n * q, k) @ a[0].mT).reshape(n, q, p).mT
    return torch.bmm(a, b)


def batched(a: Tensor, b: Tensor) -> Tensor:
    """Multiply physical (n, b, p, k) and (n, b, k, q): (n, b, p, q)."""
    n, size, p, k = a.shape
    q = b.shape[3]
    if size == 1:
        return product(a[:, 0], b[:, 0]).unsqueeze(1)
    if is_shared(b):
        rows = a.transpose(0, 1).reshape(size, n * p, k)
        return torch.bmm(rows, b[0]).reshape(size, n, p, q).transpose(0, 1)
    if is_shared(a):
        return batched(b.mT, a.mT).mT
    return unfold(torch.bmm(fold(a), fold(b)), n)


@rules.register("mm.default")
@rules.register("mv.default")
def mm(s: Expansion, a: Tensor, b: Tensor) -> Tensor:
    """(p, k) times (k, q), or times (k,)."""
    if b.dim() == 1:
        return product(s.of(a), s.of(b).unsqueeze(2)).squeeze(2)
    return product(s.of(a), s.of(b))


@rules.register("bmm.default")
def bmm(s: Expansion, a: Tensor, b: Tensor) -> Tensor:
    """(b, p, k) times (b, k, q)."""
    return batched(s.of(a), s.of(b))


@rules.register("addmm.default")
@rules.register("addmv.default")
@rules.register("baddbmm.default")
def addmm(
    s: Expansion, c: Tensor, a: Tensor, b: Tensor, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Tensor:
    """beta·c + alpha·a b; c broadcasts from the right, after the sample axis."""
    pc, pa, pb = s.of(c), s.of(a), s.of(b)
    if is_shared(pb) and is_shared(pc) and (c.dim(), b.dim()) == (1, 2):
        n, p, k = pa.shape
        rows = torch.addmm(pc[0], pa.reshape(n * p, k), pb[0], beta=beta, alpha=alpha)
        return rows.reshape(n, p, pb.shape[2])
    found: Tensor = bmm(s, a, b) if a.dim() == 3 else mm(s, a, b)
    if alpha != 1:
        found = found * alpha
    if beta == 0:  # torch then ignores NaN in `c`
        return found
    return torch.add(found, pc[(slice(None), *[None] * (found.dim() - pc.dim()))], alpha=beta)


@rules.register("dot.default")
def dot(s: Expansion, a: Tensor, b: Tensor) -> Tensor:
    """Sum of products, (k,) times (k,)."""
    return product(s.of(a).unsqueeze(1), s.of(b).unsqueeze(2)).flatten()


@rules.register("vdot.default")
def vdot(s: Expansion, a: Tensor, b: Tensor) -> Tensor:
    """Sum of products, the first factor conjugated."""
    return product(s.of(a).conj_physical().unsqueeze(1), s.of(b).unsqueeze(2)).flatten()


def as_groups(images: Tensor) -> Tensor:
    """Reshape (n, b, c, ...) to (b, n·c, ...)."""
    return images.transpose(0, 1).flatten(1, 2)


def from_groups(images: Tensor, n: int) -> Tensor:
    """Reshape (b, n·c, ...) to (n, b, c, ...)."""
    b, channels, *spatial = images.shape
    return images.reshape(b, n, channels // n, *spatial).transpose(0, 1)


def _channels(affine: Tensor, like: Tensor) -> Tensor:
    """Align (n, c) with `like` (n, b, c, ...)."""
    return affine[(slice(None), None, slice(None), *[None] * (like.dim() - 3))]


def _trailing(affine: Tensor, like: Tensor) -> Tensor:
    """Align (n, *shape) with `like` (n, ..., *shape)."""
    return affine[(slice(None), *[None] * (like.dim() - affine.dim()))]


def _affine(
    s: Expansion, out: Tensor, weight: Tensor | None, bias: Tensor | None, align: Align
) -> Tensor:
    """Apply the weight and the bias of a layer, each sample with its own."""
    if weight is not None:
        out = out * align(s.of(weight), out)
    return out if bias is None else out + align(s.of(bias), out)


@rules.register("convolution.default")
def convolution(
    s: Expansion, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
) -> Tensor:
    """Convolve, transposed or not; `geometry` ends with the number of groups."""
    px, pw = s.of(x), s.of(weight)
    if is_shared(pw):
        out: Tensor = unfold(aten.convolution(fold(px), pw[0], None, *geometry), s.n)
    else:
        *rest, groups = geometry
        out = aten.convolution(as_groups(px), fold(pw), None, *rest, groups * s.n)
        out = from_groups(out, s.n)
    return _affine(s, out, None, bias, _channels)


@rules.register("convolution_backward.default")
def convolution_backward(
    s: Expansion,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    *geometry: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the requested gradients (by `mask`) of the images, the weight and the bias."""
    *rest, groups, mask = geometry
    pg, px, pw = s.of(grad), s.of(x), s.of(weight)
    to_x = to_weight = to_bias = None
    if mask[0] and is_shared(pw):
        folded = (fold(pg), fold(px), pw[0], None)
        to_x = aten.convolution_backward(*folded, *rest, groups, [True, False, False])[0]
        to_x = unfold(to_x, s.n)
    if mask[1] or (mask[0] and to_x is None):
        wanted = [mask[0] and to_x is None, mask[1], False]
        grouped = (as_groups(pg), as_groups(px), fold(pw), None)
        found = aten.convolution_backward(*grouped, *rest, groups * s.n, wanted)
        to_x = from_groups(found[0], s.n) if wanted[0] else to_x
        to_weight = unfold(found[1], s.n) if mask[1] else None
    if mask[2]:
        to_bias = pg.sum([1, *range(3, pg.dim())])
    return to_x, to_weight, to_bias


@rules.register("native_layer_norm.default")
def layer_norm(
    s: Expansion,
    x: Tensor,
    shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise over the trailing axes `shape`; the affine map is applied separately."""
    out, mean, rstd = aten.native_layer_norm(s.of(x), shape, None, None, eps)
    return _affine(s, out, weight, bias, _trailing), mean, rstd


@rules.register("native_layer_norm_backward.default")
def layer_norm_backward(
    s: Expansion,
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the requested gradients (by `mask`) of the input, the weight and the bias."""
    pg, px, pm, pr = s.of(grad), s.of(x), s.of(mean), s.of(rstd)
    rows = list(range(1, px.dim() - len(shape)))
    to_x = to_weight = to_bias = None
    if mask[0]:
        scaled = _affine(s, pg, weight, None, _trailing)
        inner = (scaled, px, shape, pm, pr, None, None, [True, False, False])
        to_x = aten.native_layer_norm_backward(*inner)[0]
    if mask[1]:
        to_weight = pg * (px - pm) * pr
        to_weight = to_weight.sum(rows) if rows else to_weight
    if mask[2]:
        to_bias = pg.sum(rows) if rows else pg
    return to_x, to_weight, to_bias


@rules.register("native_group_norm.default")
def group_norm(
    s: Expansion,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    b: int,
    c: int,
    spatial: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise groups of channels; samples become rows."""
    folded = fold(s.of(x)).contiguous()
    found = aten.native_group_norm(folded, None, None, s.n * b, c, spatial, groups, eps)
    out, mean, rstd = (unfold(t, s.n) for t in found)
    return _affine(s, out, weight, bias, _channels), mean, rstd


@rules.register("native_group_norm_backward.default")
def group_norm_backward(
    s: Expansion,
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
    """Return the requested gradients (by `mask`) of the input, the weight and the bias."""
    pg, px, pm, pr = s.of(grad), s.of(x), s.of(mean), s.of(rstd)  # pm, pr: (n, b, groups)
    to_x = to_weight = to_bias = None
    if mask[0]:
        scaled = _affine(s, pg, weight, None, _channels)
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


def _flat(s: Expansion, t: Tensor | None) -> Tensor | None:
    """Return (n, c) as (n·c,); a view, because it may be written to."""
    return None if t is None else s.of(t).reshape(-1)


def _saved(s: Expansion, t: Tensor) -> Tensor:
    """Return saved statistics (n·c,), or (0,) in eval mode, as (n, c) or (n, 0)."""
    return t.reshape(s.n, -1) if t.numel() else t.new_empty(s.n, 0)


@rules.register("native_batch_norm.default")
def batch_norm(
    s: Expansion,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each sample's channels, by the sample's or by running statistics."""
    flat = [_flat(s, t) for t in (weight, bias, mean, var)]
    out, *saved = aten.native_batch_norm(as_groups(s.of(x)), *flat, training, *rest)
    return from_groups(out, s.n), _saved(s, saved[0]), _saved(s, saved[1])


@rules.register("native_batch_norm_backward.default")
def batch_norm_backward(
    s: Expansion,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    saved_mean: Tensor | None,
    saved_rstd: Tensor | None,
    *rest: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the requested gradients (by `mask`) of the input, the weight and the bias."""
    flat = [_flat(s, t) for t in (weight, mean, var, saved_mean, saved_rstd)]
    # contiguous: it may misread other layouts
    groups = [as_groups(s.of(t)).contiguous() for t in (grad, x)]
    to_x, *affine = aten.native_batch_norm_backward(*groups, *flat, *rest)
    to_affine = [None if t is None else t.reshape(s.n, -1) for t in affine]
    return (None if to_x is None else from_groups(to_x, s.n)), to_affine[0], to_affine[1]


@each(
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward"
)
def attention(
    func: Any, s: Expansion, *args: Any, attn_mask: Tensor | None = None, **kwargs: Any
) -> Any:
    """Fused attention: samples become rows; a mask is (t, s) or (b or 1, h or 1, t, s)."""
    if attn_mask is not None:
        mask = s.of(attn_mask)
        mask = mask[:, None, None] if attn_mask.dim() == 2 else mask
        attn_mask = fold(mask.expand(s.n, args[0].shape[0], *mask.shape[2:]))
    mine = leaves(lambda t: fold(s.of(t)), args)
    return leaves(lambda t: unfold(t, s.n), func(*mine, attn_mask=attn_mask, **kwargs))
