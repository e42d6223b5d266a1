"""Gradients of convolution kernels, stored as the input and the output gradient.

The ordinary backward kernel computes a sum over samples in one call. Gradients of single samples
are computed in one of three exact ways:

- outer products with patches of the input,
- the backward kernel for each sample,
- the backward kernel once, with samples as groups of channels.

The fastest way depends on the sizes and the machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import inf, prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.blocks.base import (
    PIECE_BYTES,
    TILE_BYTES,
    Block,
    DenseBlock,
    Factors,
    TensorBlock,
    precise,
    size,
)
from gradscope.blocks.outer import KEPT, OuterBlock
from gradscope.blocks.variants import Variant, fastest, seconds

PATCH_BYTES = 2**24  # patches per step when the result goes to a buffer and is not read again


@dataclass(frozen=True)
class Geometry:
    """The geometry of a convolution; one number for each spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool

    def windows(
        self, values: Tensor, positions: tuple[int, ...], kernel: tuple[int, ...]
    ) -> Tensor:
        """Return the window at each position (N, c·kernel, positions) of (N, c, *space)."""
        padded = self.pad(values, positions, kernel)
        lead, axes = padded.stride()[:2], padded.stride()[2:]
        inside = (a * d for a, d in zip(axes, self.dilation, strict=True))
        across = (a * s for a, s in zip(axes, self.stride, strict=True))
        windows = padded.as_strided(
            (*padded.shape[:2], *kernel, *positions),
            (*lead, *inside, *across),
            padded.storage_offset(),
        )
        d = len(kernel)
        return windows.flatten(2 + d).flatten(1, 1 + d)

    def pad(self, values: Tensor, positions: tuple[int, ...], kernel: tuple[int, ...]) -> Tensor:
        """Return (N, c, *space), padded with the zeros that windows at the positions need."""
        pads: list[int] = []
        spans = zip(values.shape[2:], self.reach(positions, kernel), self.padding, strict=True)
        for length, reach, pad in spans:
            pads[:0] = [pad, max(0, reach - length - pad)]
        return F.pad(values, pads) if any(pads) else values

    def reach(self, positions: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of pixels that the windows at all positions span, along each axis."""
        walk = zip(positions, kernel, self.stride, self.dilation, strict=True)
        return tuple((t - 1) * step + (k - 1) * spread + 1 for t, k, step, spread in walk)

    def window_products(
        self, values: Tensor, positions: tuple[int, ...], kernel: tuple[int, ...]
    ) -> Tensor:
        """Return the inner products of all pairs of windows (N, positions, positions).

        `values` is (N, c, *space). The result adds up the Gram matrix of the pixels at the offsets
        of the kernel, one axis after another. There are far fewer pixels than window entries.
        """
        padded = self.pad(values, positions, kernel)
        space, pixels = padded.shape[2:], padded.flatten(2)
        found = torch.bmm(pixels.mT, pixels.conj()).view(-1, *space, *space)
        walk = zip(positions, kernel, self.stride, self.dilation, strict=True)
        for axis, (count, width, step, spread) in enumerate(walk):
            one, other = (slice(None),) * (1 + axis), (slice(None),) * (len(kernel) - 1)
            cuts = [
                slice(k * spread, k * spread + (count - 1) * step + 1, step) for k in range(width)
            ]
            first, *others = (found[(*one, cut, *other, cut)] for cut in cuts)
            found = reduce(torch.Tensor.add_, others, first.clone())
        return found.flatten(1 + len(kernel)).flatten(1, -2)


@dataclass(frozen=True, eq=False)
class ConvolutionBlock(TensorBlock):
    """The gradient of the kernel of a (transposed) convolution."""

    inputs: Tensor  # (n, f, c, *space), f frames per sample
    gradients: Tensor  # output gradients (n, f, o, *out space)
    parameter_shape: tuple[int, ...]  # the kernel's shape
    geometry: Geometry  # stride, padding and so on
    numbers = ("inputs", "gradients")
    kind = "outer"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes (groups, t, r, c) of the block as an outer product."""
        rows, columns, *kernel = self.shape
        small, groups = self._small_and_large[0], self.geometry.groups
        t = prod(small.shape[3:]) * small.shape[1]
        return groups, t, rows // groups, columns * prod(kernel)

    @property
    def factored_size(self) -> int:
        k, t, r, c = self.sizes
        return k * t * (r + c)

    def factors(self) -> Factors:
        return self.outer.factors()

    def dense(self, out: Tensor | None = None) -> Tensor:
        k, t, r, c = self.sizes
        item = self.dtype.itemsize
        flops, patches = 2.0 * self.n * k * t * r * c, 2.0 * self.n * k * t * c * item
        each = seconds(flops, 0, 2.0 * self.n)
        variants = {
            "patches": Variant(seconds(flops, patches), lambda: self._from_patches(out)),
            "a kernel a sample": Variant(each, lambda: self._each(out)),
        }
        if self.inputs.shape[1] == 1:  # slow on small maps and with few channels
            grouped = Variant(seconds(flops, 0, 2), lambda: self._grouped(out), optional=True)
            variants["grouped kernel"] = grouped
        shape = "x".join(map(str, self.shape))
        sizes = {"t": t, "n": self.n}
        return fastest(f"gradients of a kernel {shape}", sizes, self.inputs, variants)

    def _from_patches(self, out: Tensor | None) -> Tensor:
        """Compute one matrix product per sample, of output gradients and input windows."""
        # tiles are used while they are in the cache
        size = TILE_BYTES if out is None else PATCH_BYTES
        if self._patches_at_once(size) >= self.n:
            return self.outer.dense(out)
        if out is None:
            out = self.inputs.new_empty(self.n, *self.shape, dtype=self.dtype)
        for start, some in self._with_patches(size):
            some.dense(out[start : start + some.n])
        return out

    def _each(self, out: Tensor | None) -> Tensor:
        """Call the backward kernel once for each sample."""
        if out is None:
            out = self.inputs.new_empty(self.n, *self.shape, dtype=self.dtype)
        for i in range(self.n):
            out[i] = self._kernel(self.gradients[i], self.inputs[i], self.geometry, self.shape)
        return out

    def _grouped(self, out: Tensor | None) -> Tensor:
        """Call the backward kernel once, with samples as groups of channels."""
        n = self.n
        together = replace(self.geometry, groups=n * self.geometry.groups)
        gradients, inputs = (
            t.reshape(1, n * t.shape[2], *t.shape[3:]) for t in (self.gradients, self.inputs)
        )
        stacked = (n * self.shape[0], *self.shape[1:])
        found = self._kernel(gradients, inputs, together, stacked).view(n, *self.shape)
        return found if out is None else out.copy_(found)

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, dense gradients of these rows), many rows at once if patches are small."""
        _, t, r, _ = self.sizes
        if t >= r:
            yield from super().tiles()
            return
        for start, some in self._with_patches(TILE_BYTES):
            for part, tile in some.tiles():
                yield slice(start + part.start, start + part.stop), tile

    def sums(
        self, weights: Tensor | None = None, for_squares: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        _, t, r, _ = self.sizes
        if t >= r:
            return super().sums(weights, for_squares)
        found = []
        for start, some in self._with_patches(TILE_BYTES):
            part = slice(start, start + some.n)
            own = (None if f is None else f[part] for f in (weights, for_squares))
            found.append(some.sums(*own))
        first, second = (reduce(torch.Tensor.add_, sums) for sums in zip(*found, strict=True))
        return first, second

    def _with_patches(self, size: int) -> Iterator[tuple[int, OuterBlock]]:
        """Yield (first sample, outer products) for parts with at most `size` bytes of patches.

        Each part has at least one sample.
        """
        step = self._patches_at_once(size)
        for start in range(0, self.n, step):
            yield start, self.select(slice(start, start + step)).outer

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield all samples at once, or all samples of some channels if patches are small."""
        k, t, r, c = self.sizes
        large = self.n * k * r * c * self.dtype.itemsize > PIECE_BYTES
        yield from self.outer.pieces() if large and t <= r else super().pieces()

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,), from Gram matrices of patches if these are smaller."""
        k, t, r, c = self.sizes
        item, work = self.dtype.itemsize, 2.0 * self.n * k * t
        tiles = seconds(work * r * c, 4.0 * self.n * k * r * c)
        variants = {"dense": Variant(tiles, super().squared_norms)}
        if t * t < r * c:  # otherwise the Gram matrices are larger than the gradients
            patches = 2.0 * self.n * k * t * c * item
            ghost = seconds(0.6 * work * t * (r + c), patches / 2, 6)
            variants["gram of patches"] = Variant(ghost, lambda: self.outer.ghost_norms())
        if self._pixels**2 < r * c:
            variants["gram of pixels"] = Variant(self._pixel_seconds, self._pixel_norms)
        shape = "x".join(map(str, self.shape))
        return fastest(f"norms of a kernel {shape}", {"t": t, "n": self.n}, self.inputs, variants)

    def _pixel_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,), from the Gram matrices over positions and over input pixels."""
        k, small, large = self.geometry.groups, *map(precise, self._small_and_large)
        rows, values = (f.reshape(self.n * k, -1, *f.shape[3:]) for f in (small, large))
        windows = self.geometry.window_products(values, tuple(rows.shape[2:]), self.shape[2:])
        rows = rows.flatten(2)
        met = (windows * torch.bmm(rows.mT, rows.conj())).sum((1, 2)).real
        return met.view(self.n, k).sum(1).clamp_min(0.0)

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ gᵢ (*shape): one backward kernel for all samples."""
        block = self if weights is None else self.scale(weights)
        gradients, inputs = (
            precise(t.to(self.dtype)).flatten(0, 1) for t in (block.gradients, block.inputs)
        )
        return self._kernel(gradients, inputs, self.geometry, self.shape)

    def norm_bound(self) -> Tensor:
        """Return ‖inputs‖·‖gradients‖ times the kernel size: each entry is in that many windows."""
        return size(self.inputs) * size(self.gradients) * prod(self.shape[2:])

    def densify(self, always: bool = False) -> Block:
        """Return the dense block if it fits near the caches and is cheaper than two kernels.

        The cost model decides between norms plus the backward kernel, and the dense gradients.
        """
        k, t, r, c = self.sizes
        entries, work = self.n * k * r * c, 2.0 * self.n * k * t
        if entries * self.dtype.itemsize > KEPT or precise(self.inputs) is not self.inputs:
            return self
        dense = seconds(work * r * c / 2)
        gram = seconds(0.6 * work * t * (r + c), 4.0 * work * c)
        twice = min(dense, gram, self._pixel_seconds) + seconds(work * r * c / 4)
        once = dense + seconds(0, 8.0 * entries)
        return DenseBlock(self.dense()) if always or once < twice else self

    def norms(self, p: float = 2.0) -> Tensor:
        return self.outer.norms(p) if p != 2 and self.sizes[1] == 1 else super().norms(p)

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · Gᵢ · rightᵀ (n, a, b), by a convolution with `right` or from all Gᵢ."""
        (k, t, r, c), n = self.sizes, self.n
        if left.shape[1] != k * r:  # read as a matrix of another shape
            return super().two_sided(left, right)
        a, b, windows = len(left), len(right), self.dtype.itemsize * n * k * t
        through = n * k * t * (r * a + c * b + a * b)
        formed = n * (k * r * c * (t + a) + a * c * b)
        variants = {
            "projected windows": Variant(
                seconds(2.0 * through, windows * (c / prod(self.shape[2:]) + r + b)),
                lambda: self._on_sides(left, right),
            ),
            "dense": Variant(
                seconds(2.0 * formed, windows * (c + r)), lambda: Block.two_sided(self, left, right)
            ),
        }
        shape = "x".join(map(str, self.shape))
        sizes = {"t": t, "n": n}
        return fastest(f"kernel {shape} from both sides, {a}x{b}", sizes, self.inputs, variants)

    def _on_sides(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · Gᵢ · rightᵀ (n, a, b); a convolution multiplies each window by `right`."""
        dtype = torch.promote_types(self.dtype, left.dtype)
        walk, groups = self.geometry, self.geometry.groups
        small, large = self._small_and_large
        kernels = torch.cat([right.to(dtype).reshape(-1, *self.shape[1:])] * groups)
        still = (0,) * len(walk.stride)
        how = (walk.stride, walk.padding, walk.dilation, False, still, groups)
        convolved = torch.convolution(large.flatten(0, 1).to(dtype), kernels, None, *how)
        columns = self._positions(convolved.flatten(2).unflatten(0, large.shape[:2]))  # type: ignore[no-untyped-call]
        return OuterBlock(self._positions(small.flatten(3)), columns, self.shape).left_sided(left)

    @cached_property
    def outer(self) -> OuterBlock:
        """The block as outer products of output gradients and input patches."""
        small, large = self._small_and_large
        positions, kernel = tuple(small.shape[3:]), self.shape[2:]
        windows = self.geometry.windows(large.flatten(0, 1), positions, kernel)
        left = self._positions(small.flatten(3))
        right = self._positions(windows.unflatten(0, large.shape[:2]))  # type: ignore[no-untyped-call]
        return OuterBlock(left, right, self.shape, self.geometry.transposed)

    @property
    def _small_and_large(self) -> tuple[Tensor, Tensor]:
        """The tensor with one entry per position, and the tensor that windows are cut from."""
        pair = self.gradients, self.inputs
        return pair[::-1] if self.geometry.transposed else pair

    @property
    def _pixels(self) -> float:
        """The number of pixels that the windows of a sample span; infinite for several frames."""
        small, _ = self._small_and_large
        reach = self.geometry.reach(tuple(small.shape[3:]), self.shape[2:])
        return prod(reach) if small.shape[1] == 1 else inf

    @property
    def _pixel_seconds(self) -> float:
        """The seconds that the cost model predicts for `_pixel_norms`."""
        k, t, r, c = self.sizes
        n, space, kernel = self.n * k, self._pixels, self.shape[2:]
        flops = 2.0 * n * (space**2 * c / prod(kernel) + t * t * r)
        return seconds(flops, 4.0 * n * self.dtype.itemsize * space**2, 8 + 2.0 * sum(kernel))

    def _patches_at_once(self, size: int) -> int:
        """Return how many samples have patches of at most `size` bytes together; at least 1."""
        groups, t, _, c = self.sizes
        return max(1, size // max(1, groups * t * c * self.dtype.itemsize))

    @staticmethod
    def _kernel(gradients: Tensor, inputs: Tensor, g: Geometry, shape: tuple[int, ...]) -> Tensor:
        """Return the gradient of a kernel of `shape`, summed over a batch (N, ...)."""
        weight = inputs.new_empty(()).expand(shape)  # only its shape is used
        how = (g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups)
        wanted = (False, True, False)  # gradients with respect to inputs, weight, bias
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gradients, inputs, weight, None, *how, wanted
        )
        return found[1]

    def _positions(self, values: Tensor) -> Tensor:
        """Move (n, f, groups·c, positions) to (n, groups, t, c), the frames along t."""
        n, frames, _, positions = values.shape
        grouped = values.reshape(n, frames, self.geometry.groups, -1, positions)
        if frames == 1:
            return grouped.squeeze(1).mT  # a view: positions stay together in memory
        return grouped.permute(0, 2, 1, 4, 3).flatten(2, 3)
