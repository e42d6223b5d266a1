"""How a convolution walks, and what it sees at each of its positions."""

from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """How a convolution walks; one number for each spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool


def windows_of(
    values: Tensor, positions: tuple[int, ...], kernel: tuple[int, ...], geometry: Geometry
) -> Tensor:
    """Return the window at each position: (N, c·kernel, positions), both flattened.

    Args:
        values: (N, c, *space).
        positions: How many there are along each axis.
        kernel: The sizes of a window.
        geometry: How the convolution walks.
    """
    walk = zip(
        values.shape[2:],
        positions,
        kernel,
        geometry.stride,
        geometry.dilation,
        geometry.padding,
        strict=True,
    )
    pads: list[int] = []
    for length, count, width, step, spread, pad in walk:
        reach = (count - 1) * step + (width - 1) * spread + 1
        pads[:0] = [pad, max(0, reach - length - pad)]
    padded = F.pad(values, pads) if any(pads) else values
    axes = padded.stride()[2:]
    windows = padded.as_strided(
        (*padded.shape[:2], *kernel, *positions),
        (
            *padded.stride()[:2],
            *(a * d for a, d in zip(axes, geometry.dilation, strict=True)),
            *(a * s for a, s in zip(axes, geometry.stride, strict=True)),
        ),
        padded.storage_offset(),
    )
    d = len(kernel)
    return windows.flatten(2 + d).flatten(1, 1 + d)
