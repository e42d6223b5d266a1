"""Gradients of convolution kernels, kept as the input and the output gradient.

Summed over samples they are what the ordinary backward kernel computes, so a weighted sum is one
call of it. Sample by sample there are two exact ways: the patches of the input as the factor of an
outer product (small maps), or the backward kernel for each sample (large maps).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.blocks.base import Block, over_samples, precise
from gradscope.blocks.outer import OuterBlock

# The patches of a sample are copied at some GB/s, a kernel costs some ten microseconds to start:
# beyond this many bytes of patches a sample, one kernel a sample is the faster way.
_PATCH_BYTES = 2**17


@dataclass(frozen=True)
class Geometry:
    """How a convolution walks; one number for each spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool


@dataclass(frozen=True, eq=False)
class ConvolutionBlock(Block):
    """The kernel's gradient of a (transposed) convolution.

    Attributes:
        inputs: (n, f, c, *space), f frames a sample.
        gradients: (n, f, o, *out space), of the output.
        parameter_shape: The kernel's shape.
        geometry: How the convolution walks.
    """

    inputs: Tensor
    gradients: Tensor
    parameter_shape: tuple[int, ...]
    geometry: Geometry

    @property
    def n(self) -> int:
        """The number of samples."""
        return int(self.inputs.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return self.parameter_shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the product."""
        return torch.promote_types(self.inputs.dtype, self.gradients.dtype)

    @property
    def device(self) -> torch.device:
        """Where the factors are."""
        return self.inputs.device

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape)."""
        if self._by_patches:
            return self.outer.dense(out)
        if out is None:
            out = self.inputs.new_empty(self.n, *self.shape, dtype=self.dtype)
        for i in range(self.n):
            out[i] = self._kernel(self.gradients[i], self.inputs[i])
        return out

    def select(self, rows: slice | Tensor) -> "ConvolutionBlock":
        """Return the samples `rows`."""
        return replace(self, inputs=self.inputs[rows], gradients=self.gradients[rows])

    def scale(self, factors: Tensor) -> "ConvolutionBlock":
        """Multiply sample i by `factors[i]`."""
        return replace(self, gradients=self.gradients * over_samples(factors, self.gradients))

    def to(self, dtype: torch.dtype) -> "ConvolutionBlock":
        """Cast the factors."""
        return replace(self, inputs=self.inputs.to(dtype), gradients=self.gradients.to(dtype))

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,)."""
        _, t, r, c = self.sizes
        if self._by_patches or t * (r + c) < r * c:
            return self.outer.squared_norms()
        return super().squared_norms()

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ gᵢ (*shape): one backward kernel for all samples."""
        block = self if weights is None else self.scale(weights)
        gradients, inputs = (
            precise(t).to(precise_dtype(self.dtype)).flatten(0, 1)
            for t in (block.gradients, block.inputs)
        )
        return self._kernel(gradients, inputs)

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ |gᵢ|² (*shape): the sum over positions comes before the square."""
        return self.outer.squared_sum(weights) if self._by_patches else super().squared_sum(weights)

    def norms(self, p: float = 2.0) -> Tensor:
        """Return ‖gᵢ‖ₚ (n,)."""
        return self.outer.norms(p) if p != 2 and self._by_patches else super().norms(p)

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · Gᵢ · rightᵀ (n, a, b), from patches where these are small."""
        if self._by_patches:
            return self.outer.two_sided(left, right)
        return super().two_sided(left, right)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes (groups, t, r, c) of the block as an outer product."""
        rows, columns, *kernel = self.shape
        small = self.inputs if self.geometry.transposed else self.gradients
        groups = self.geometry.groups
        return (
            groups,
            prod(small.shape[3:]) * small.shape[1],
            rows // groups,
            columns * prod(kernel),
        )

    @cached_property
    def outer(self) -> OuterBlock:
        """The block as outer products of output gradients and input patches."""
        pair = (self.gradients, self.inputs)
        small, large = reversed(pair) if self.geometry.transposed else pair
        windows = self._patches(large.flatten(0, 1), tuple(small.shape[3:]))
        left = self._positions(small.flatten(3))
        right = self._positions(windows.unflatten(0, large.shape[:2]))  # type: ignore[no-untyped-call]
        return OuterBlock(left, right, self.shape)

    @property
    def _by_patches(self) -> bool:
        groups, t, _, c = self.sizes
        return groups * t * c * self.dtype.itemsize <= _PATCH_BYTES

    def _kernel(self, gradients: Tensor, inputs: Tensor) -> Tensor:
        """Return the kernel's gradient summed over a batch (N, ...)."""
        g = self.geometry
        weight = inputs.new_empty(()).expand(self.shape)  # only its shape matters
        _, found, _ = torch.ops.aten.convolution_backward(
            gradients,
            inputs,
            weight,
            None,
            g.stride,
            g.padding,
            g.dilation,
            g.transposed,
            g.output_padding,
            g.groups,
            (False, True, False),
        )
        return found  # type: ignore[no-any-return]

    def _patches(self, values: Tensor, positions: tuple[int, ...]) -> Tensor:
        """Return the window of `values` (N, c, ...) at each position: (N, c·kernel, positions)."""
        g, kernel = self.geometry, self.shape[2:]
        walk = zip(
            values.shape[2:], positions, kernel, g.stride, g.dilation, g.padding, strict=True
        )
        pads: list[int] = []
        for size, count, width, step, spread, pad in walk:
            reach = (count - 1) * step + (width - 1) * spread + 1
            pads[:0] = [pad, max(0, reach - size - pad)]
        padded = F.pad(values, pads) if any(pads) else values
        axes = padded.stride()[2:]
        windows = padded.as_strided(
            (*padded.shape[:2], *kernel, *positions),
            (
                *padded.stride()[:2],
                *(a * d for a, d in zip(axes, g.dilation, strict=True)),
                *(a * s for a, s in zip(axes, g.stride, strict=True)),
            ),
            padded.storage_offset(),
        )
        d = len(kernel)
        return windows.flatten(2 + d).flatten(1, 1 + d)

    def _positions(self, values: Tensor) -> Tensor:
        """Move (n, f, groups·c, positions) to (n, groups, t, c), the frames along t."""
        n, frames, _, positions = values.shape
        grouped = values.reshape(n, frames, self.geometry.groups, -1, positions)
        if frames == 1:
            return grouped.squeeze(1).mT  # a view: positions stay together in memory
        return grouped.permute(0, 2, 1, 4, 3).flatten(2, 3)


def precise_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums of `dtype` are taken in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
