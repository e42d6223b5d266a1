"""Convolutions: shared weights take the samples as images, others take them as groups.

Shapes: n sample, b image, c channel, then the spatial axes.
"""

from typing import Any

from torch import Tensor

from gradscope.backends.expand.facts import aten
from gradscope.backends.expand.rules import rules
from gradscope.backends.expand.tensor import Samples, fold, is_shared, unfold


def as_groups(images: Tensor) -> Tensor:
    """Reshape (n, b, c, ...) to (b, n·c, ...)."""
    return images.transpose(0, 1).flatten(1, 2)


def from_groups(images: Tensor, n: int) -> Tensor:
    """Reshape (b, n·c, ...) to (n, b, c, ...)."""
    b, channels, *spatial = images.shape
    return images.reshape(b, n, channels // n, *spatial).transpose(0, 1)


@rules.register("convolution.default")
def convolution(
    s: Samples, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
) -> Tensor:
    """Convolve, transposed or not; geometry ends with the number of groups."""
    px, pw = s.of(x), s.of(weight)
    if is_shared(pw):
        out: Tensor = unfold(aten.convolution(fold(px), pw[0], None, *geometry), s.n)
    else:
        *rest, groups = geometry
        out = aten.convolution(as_groups(px), fold(pw), None, *rest, groups * s.n)
        out = from_groups(out, s.n)
    if bias is None:
        return out
    return out + s.of(bias)[(slice(None), None, slice(None), *[None] * (out.dim() - 3))]


@rules.register("convolution_backward.default")
def convolution_backward(
    s: Samples,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    *geometry: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the images, the weight and the bias, those the mask asks for."""
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
