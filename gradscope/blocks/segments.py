"""Sums of outer products over rows with labels: experts, packed graphs, ragged rows.

Row m belongs to sample sₘ and to group eₘ (an expert), in any order and number:

    gᵢ[e, r, c] = Σₘ [sₘ = i, eₘ = e] left[m, r] · right[m, c].

The rows of one sample and group form a segment. Segments are not padded to the longest segment.
Gram matrices are computed within segments. A weighted sum takes one product per group, over all its
rows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from gradscope.blocks.base import TILE_BYTES, Block, Factors, TensorBlock, precise, size, times
from gradscope.blocks.outer import OuterBlock, contracted, nonzero_gradients
from gradscope.process.memory import slices


@dataclass(frozen=True, eq=False)
class SegmentBlock(TensorBlock):
    """A sum of outer products over rows, each of one sample and one group."""

    left: Tensor  # (m, r)
    right: Tensor  # (m, c)
    sample: Tensor  # (m,) int64, from 0 to n - 1
    group: Tensor  # (m,) int64, from 0 to k - 1
    sizes: tuple[int, int]  # (n, k)
    parameter_shape: tuple[int, ...]  # any shape with k·r·c entries
    right_is_gradient: (
        Tensor  # (m,) bool, whether right is the row's output gradient, instead of left
    )
    numbers, places = ("left", "right"), ("sample", "group", "right_is_gradient")
    has_shortcuts = True

    @staticmethod
    def of(block: OuterBlock) -> "SegmentBlock":
        """Return the same gradients, row by row."""
        n, k, t, _ = block.left.shape
        rows = block.left.flatten(0, 2), block.right.flatten(0, 2)
        place = torch.arange(n * k, device=block.device).repeat_interleave(t)
        right_is_gradient = block.right_is_gradient
        if isinstance(right_is_gradient, Tensor):  # (t,)
            right_is_gradient = right_is_gradient.repeat(n * k)
        return segmented((*rows, place // k, place % k), (n, k), block.shape, right_is_gradient)

    @property
    def n(self) -> int:
        return self.sizes[0]

    @property
    def rows_by_columns(self) -> tuple[int, int, int]:
        """The sizes (k, r, c)."""
        return self.sizes[1], int(self.left.shape[1]), int(self.right.shape[1])

    def as_stack_entry(self, group: int, groups: int) -> "SegmentBlock":
        """Return the gradients of a stack (groups, *shape), with this block as entry `group`."""
        place = torch.full_like(self.group, group)
        rows = self.left, self.right, self.sample, place
        return segmented(rows, (self.n, groups), (groups, *self.shape), self.right_is_gradient)

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape), one matrix product per segment."""
        k, r, c = self.rows_by_columns
        direct = out is not None and out.is_contiguous() and out.dtype == self.dtype
        found = out if direct else self.left.new_empty(self.n, *self.shape, dtype=self.dtype)
        assert found is not None
        keys, counts, _ = self._segments
        target, block = found.view(self.n * k, r, c), self.ordered
        if len(keys) < len(target):
            target.zero_()
        left, right = (f.to(self.dtype) for f in (block.left, block.right))
        start = 0
        for key, count in zip(keys.tolist(), counts, strict=True):
            own = slice(start, start := start + count)
            torch.mm(left[own].mT, right[own], out=target[key % self.n * k + key // self.n])
        return found if out is None or direct else out.copy_(found)

    def select(self, rows: slice | Tensor) -> Self:
        """Return the samples `rows`; a sample may be selected twice."""
        order, counts, starts = self._by_sample
        wanted, lengths = starts[rows], counts[rows]
        samples = torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)
        first = (wanted - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
        own = order[first + torch.arange(len(first), device=self.device)]
        return replace(super().select(own), sample=samples, sizes=(len(lengths), self.sizes[1]))

    def scale(self, factors: Tensor) -> Self:
        """Multiply sample i by `factors[i]`; only the smaller factor changes."""
        by = factors[self.sample]
        if self.left.shape[1] <= self.right.shape[1]:
            return replace(self, left=times(self.left, by))
        return replace(self, right=times(self.right, by))

    def reshape(self, shape: tuple[int, ...]) -> Self:
        return replace(self, parameter_shape=shape)

    def transpose(self, axis0: int, axis1: int) -> Block:
        """Swap two axes; for the matrix of each group, swap the factors."""
        k, r, c = self.rows_by_columns
        rank = len(self.shape)
        matrix = self.shape == (k, r, c) or (k == 1 and self.shape == (r, c))
        if matrix and {axis0 % rank, axis1 % rank} == {rank - 2, rank - 1}:
            shape = (*self.shape[:-2], c, r)
            rows = replace(
                self, left=self.right, right=self.left, right_is_gradient=~self.right_is_gradient
            )
            return rows.reshape(shape)
        return super().transpose(axis0, axis1)

    def nonzero_positions(self) -> Tensor:
        """Return (m,) bool: whether a row's output gradient has a nonzero entry."""
        return nonzero_gradients(self.left, self.right, self.right_is_gradient)

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,), summed over segments."""
        left = precise(self.left[:0])
        found = torch.zeros(self.n, dtype=left.dtype.to_real(), device=self.device)
        for keys, *factors in self._padded():
            found.index_add_(0, keys % self.n, OuterBlock.matrix(*factors).squared_norms())
        return found

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ gᵢ (*shape), one long sum per group, at the cost of a batch gradient."""
        block = self if weights is None else self.scale(weights)
        k, r, c = self.rows_by_columns
        if k == 1:
            factors = (precise(f)[None, None] for f in (block.left, block.right))
            return contracted(*factors).reshape(self.shape)
        dtype = precise(torch.empty(0, dtype=block.dtype)).dtype
        found = torch.empty(k, r, c, dtype=dtype, device=self.device)
        for place, (_, part) in zip(found, block._groups(), strict=True):
            torch.mm(part.left.mT.to(dtype), part.right.to(dtype), out=place)
        return found.view(self.shape)

    def norm_bound(self) -> Tensor:
        """Return the product of the factors' norms (Cauchy–Schwarz)."""
        return size(self.left) * size(self.right)

    def dot(self, vector: Tensor) -> Tensor:
        matrices = precise(vector.conj()).reshape(self.rows_by_columns)
        met = [
            ((precise(part.left) @ matrix) * precise(part.right)).sum(1)
            for matrix, (_, part) in zip(matrices, self._groups(), strict=True)
        ]
        rows = torch.cat(met)
        return rows.new_zeros(self.n).index_add_(0, self.ordered.sample, rows)

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield some rows of the parameter at a time, for all samples."""
        _, r, c = self.rows_by_columns
        for group, part in self._groups():
            for rows in slices(r, self.n * c * self.dtype.itemsize, TILE_BYTES):
                entries = slice((group * r + rows.start) * c, (group * r + rows.stop) * c)
                factors = part.left[:, rows], part.right
                yield slice(0, self.n), entries, self._matrix(*factors, part.sample).flatten(1)

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · Gᵢ · rightᵀ = Σₘ (left bₘ) ⊗ (right aₘ) (n, a, b), without any Gᵢ."""
        k, r, c = self.rows_by_columns
        if left.shape[1] != k * r or right.shape[1] != c:
            return super().two_sided(left, right)
        dtype = torch.promote_types(self.dtype, left.dtype)
        by_group = left.to(dtype).view(-1, k, r).transpose(0, 1)  # (k, a, r)
        parts = zip(by_group, self._groups(), strict=True)
        rows = torch.cat([part.left.to(dtype) @ matrix.mT for matrix, (_, part) in parts])
        columns = self.ordered.right.to(dtype) @ right.to(dtype).mT
        return self._matrix(rows, columns, self.ordered.sample)

    @cached_property
    def ordered(self) -> Self:
        """The same rows, sorted by group and then by sample."""
        key = self._key
        in_order = bool((key[1:] >= key[:-1]).all())
        return self if in_order else super().select(key.argsort(stable=True))

    @property
    def _key(self) -> Tensor:
        """The segment (m,) of each row: group · n + sample."""
        return self.group * self.n + self.sample

    @cached_property
    def _segments(self) -> tuple[Tensor, list[int], Tensor]:
        """The nonempty segments of the sorted rows: key (s,), number of rows, first row (s,)."""
        keys, counts = torch.unique_consecutive(self.ordered._key, return_counts=True)
        return keys, counts.tolist(), counts.cumsum(0) - counts

    @cached_property
    def _by_sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """The order of the rows by sample (m,); each sample's number of rows and first row (n,)."""
        counts = torch.bincount(self.sample, minlength=self.n)
        return self.sample.argsort(stable=True), counts, counts.cumsum(0) - counts

    def _padded(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield segments of similar lengths t: their keys (s,), left (s, t, r), right (s, t, c).

        The padding repeats the segment's first row, with zeros in left. So values that are not
        finite stay with their sample.
        """
        keys, counts, starts = self._segments
        block, lengths = self.ordered, [rounded(count) for count in counts]
        for t in sorted(set(lengths)):
            which = [s for s, length in enumerate(lengths) if length == t]
            own = torch.tensor(which, device=self.device)
            count = torch.tensor([[counts[s]] for s in which], device=self.device)
            at = torch.arange(t, device=self.device)
            outside = at >= count  # (s, t)
            place = starts[own].unsqueeze(1) + torch.where(outside, 0, at)
            left = block.left[place].masked_fill_(outside.unsqueeze(-1), 0)
            yield keys[own], left, block.right[place]

    def _groups(self) -> Iterator[tuple[int, Self]]:
        """Yield each group's number and its sorted rows."""
        k, block = self.sizes[1], self.ordered
        counts = torch.bincount(block.group, minlength=k)
        bounds = [0, *counts.cumsum(0).tolist()]
        for group, (start, stop) in enumerate(pairwise(bounds)):
            yield group, TensorBlock.select(block, slice(start, stop))

    def _matrix(self, left: Tensor, right: Tensor, sample: Tensor) -> Tensor:
        """Return Σₘ left[m, :] ⊗ right[m, :] (n, r, c), summed over the rows of each sample."""
        shape, group = (left.shape[1], right.shape[1]), torch.zeros_like(sample)
        return segmented((left, right, sample, group), (self.n, 1), shape).dense()


@dataclass(frozen=True, eq=False)
class RaggedBlock(SegmentBlock):
    """Rows of a single group; its stored factors are padded to the longest sample."""

    kind = "outer"

    @property
    def factored_size(self) -> int:
        return self._longest * (self.left.shape[1] + self.right.shape[1])

    def factors(self) -> Factors:
        order, counts, starts = self._by_sample
        at = torch.arange(self._longest, device=self.device)
        inside = at < counts.unsqueeze(1)  # (n, t)
        rows = order[(starts.unsqueeze(1) + at)[inside]]
        found = {}
        for name, values in (("left", self.left), ("right", self.right)):
            padded = values.new_zeros(*inside.shape, values.shape[1])
            padded[inside] = values[rows]
            found[name] = padded.unsqueeze(1)
        return Factors("outer", found, self.shape)

    @cached_property
    def _longest(self) -> int:
        return max(1, int(self._by_sample[1].max()))


def segmented(
    rows: Iterable[Tensor],
    sizes: tuple[int, int],
    shape: tuple[int, ...],
    right_is_gradient: bool | Tensor = False,
) -> SegmentBlock:
    """Return the block of the rows left, right, sample, group; other arguments as in the class.

    `right_is_gradient` has a bool per row (m,), or is a single bool for all rows.
    """
    kind = RaggedBlock if sizes[1] == 1 else SegmentBlock
    left, right, sample, group = rows
    if not isinstance(right_is_gradient, Tensor):
        right_is_gradient = torch.full((len(left),), right_is_gradient, device=left.device)
    return kind(left, right, sample, group, sizes, shape, right_is_gradient)


def rounded(count: int) -> int:
    """Round up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few lengths, little padding."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power > 3 and count <= power * 3 // 4 else power
