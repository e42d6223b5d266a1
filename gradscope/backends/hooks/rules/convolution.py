"""Convolutions as products with patches, for any number of spatial axes, groups and dilation.

The gradient of a kernel is Σ over output positions of (output gradient) ⊗ (input patch), within
each group. In a transposed convolution input and output change roles.
"""

from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.backends.hooks.rules.base import Site, node_rules
from gradscope.blocks import Block, OuterBlock


@node_rules.register("ConvolutionBackward0")
def convolution(site: Site) -> Block | None:
    """Kernel and bias of a (transposed) convolution; the samples lie along axis 0."""
    gradient = site.gradient
    if site.axis.axis != 0 or gradient.dim() == 2:
        return None
    if site.slot == 2:
        return site.reduced(gradient, (*site.shape, *[1] * (gradient.dim() - 2)))
    if site.slot != 1:
        return None
    values = site.saved("input").conj()
    small, large = (values, gradient) if site.saved("transposed") else (gradient, values)
    groups = site.saved("groups")
    windows = _patches(site, large, tuple(small.shape[2:]))
    left = _positions(site, small.flatten(2), groups)
    return OuterBlock(left, _positions(site, windows, groups), site.shape)


def _patches(site: Site, values: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Return the window of `values` (N, c, ...) at each position: (N, c·kernel, positions).

    A view of the padded values; nothing is copied before the channels are put in place.
    """
    kernel = tuple(site.shape[2:])
    padding, stride, dilation = (_pairs(site, k) for k in ("padding", "stride", "dilation"))
    sizes = zip(values.shape[2:], positions, kernel, stride, dilation, padding, strict=True)
    pads: list[int] = []
    for size, count, width, step, spread, pad in sizes:
        reach = (count - 1) * step + (width - 1) * spread + 1
        pads[:0] = [pad, max(0, reach - size - pad)]
    padded = F.pad(values, pads) if any(pads) else values
    axes = padded.stride()[2:]
    windows = padded.as_strided(
        (*padded.shape[:2], *kernel, *positions),
        (
            *padded.stride()[:2],
            *(a * d for a, d in zip(axes, dilation, strict=True)),
            *(a * s for a, s in zip(axes, stride, strict=True)),
        ),
        padded.storage_offset(),
    )
    d = len(kernel)
    return windows.flatten(2 + d).flatten(1, 1 + d)


def _positions(site: Site, values: Tensor, groups: int) -> Tensor:
    """Move (N, groups·c, positions) to (n, groups, t, c), frames of one sample along t."""
    grouped = site.first(
        values.reshape(len(values), groups, -1, values.shape[-1])
    )  # (n, frames, groups, c, positions)
    return grouped.permute(0, 2, 1, 4, 3).flatten(2, 3)


def _pairs(site: Site, name: str) -> tuple[int, ...]:
    value: Any = site.saved(name)
    spatial = len(site.shape) - 2
    values = tuple(int(v) for v in value)
    return values * spatial if len(values) == 1 else values
