"""Sums of blocks, for weights that a model uses several times or that layers share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations

import torch
from torch import Tensor

from gradscope.blocks.base import Block, DenseBlock
from gradscope.blocks.outer import OuterBlock
from gradscope.blocks.scatter import ScatterBlock
from gradscope.blocks.segments import SegmentBlock, segmented


def total(blocks: Sequence[Block]) -> Block:
    """Return one block for the sum of `blocks` (at least one, all of one shape).

    Blocks of one kind are merged: outer products and scatters are concatenated along their
    positions, dense blocks are added. Blocks of different kinds form a `TotalBlock`.
    """
    if len(blocks) == 1:
        return blocks[0]
    rows = [b for b in blocks if isinstance(b, SegmentBlock)]
    outer = [b for b in blocks if isinstance(b, OuterBlock)]
    scatter = [b for b in blocks if isinstance(b, ScatterBlock)]
    rest = [b for b in blocks if not isinstance(b, SegmentBlock | OuterBlock | ScatterBlock)]
    parts: list[Block] = []
    while rows:
        sizes = rows[0].rows_by_columns
        alike = [b for b in outer if (b.sizes[0], *b.sizes[2:]) == sizes]
        outer = [b for b in outer if b not in alike]
        found = [b for b in rows if b.rows_by_columns == sizes]
        rows = [b for b in rows if b not in found]
        every = [*found, *map(SegmentBlock.of, alike)]
        fields = ("left", "right", "sample", "group", "right_is_gradient")
        *joined, sides = (_joined([getattr(b, name) for b in every], 0) for name in fields)
        parts.append(segmented(joined, every[0].sizes, every[0].shape, sides))
    while outer:
        k, _, r, c = outer[0].sizes
        same = [b for b in outer if b.sizes[0::2] == (k, r) and b.sizes[3] == c]
        outer = [b for b in outer if b not in same]
        left, right = _joined([b.left for b in same], 2), _joined([b.right for b in same], 2)
        parts.append(OuterBlock(left, right, same[0].shape, _gradient_sides(same)))
    if scatter:
        index, values = (_joined([getattr(b, k) for b in scatter], 1) for k in ("index", "rows"))
        parts.append(ScatterBlock(index, values, scatter[0].size))
    if rest:
        parts.append(reduce(lambda a, b: DenseBlock(a.dense() + b.dense()), rest))
    return parts[0] if len(parts) == 1 else TotalBlock(tuple(parts))


def _gradient_sides(blocks: list[OuterBlock]) -> bool | Tensor:
    """Return `right_is_gradient` for the positions of all blocks together."""
    sides = [block.right_is_gradient for block in blocks]
    first, *others = sides
    if isinstance(first, bool) and all(other is first for other in others):
        return first
    each = zip(sides, blocks, strict=True)
    return torch.cat([torch.as_tensor(k, device=b.device).expand(b.sizes[1]) for k, b in each])


def _joined(factors: list[Tensor], axis: int) -> Tensor:
    return torch.cat(factors, axis) if len(factors) > 1 else factors[0]


@dataclass(frozen=True, eq=False)
class TotalBlock(Block):
    """A sum of blocks of different kinds."""

    parts: tuple[Block, ...]  # two blocks or more, of one n and one shape
    has_shortcuts = True

    @property
    def n(self) -> int:
        return self.parts[0].n

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, (p.dtype for p in self.parts))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def terms(self) -> tuple[Block, ...]:
        return self.parts

    def dense(self, out: Tensor | None = None) -> Tensor:
        first, *others = sorted(self.parts, key=lambda part: part.kind == "scatter")
        result = first.to(self.dtype).dense(out)
        if out is None and first.kind != "outer":
            result = result.clone()  # it may share the block's memory
        for part in others:
            part.add_to(result)
        return result

    def select(self, rows: slice | Tensor) -> "TotalBlock":
        return TotalBlock(tuple(p.select(rows) for p in self.parts))

    def scale(self, factors: Tensor) -> "TotalBlock":
        return TotalBlock(tuple(p.scale(factors) for p in self.parts))

    def to(self, dtype: torch.dtype) -> "TotalBlock":
        return TotalBlock(tuple(p.to(dtype) for p in self.parts))

    def transpose(self, axis0: int, axis1: int) -> Block:
        return total([p.transpose(axis0, axis1) for p in self.parts])

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        first, *others = (p.weighted_sum(weights) for p in self.parts)
        return sum(others, first)

    def dot(self, vector: Tensor) -> Tensor:
        first, *others = (p.dot(vector) for p in self.parts)
        return sum(others, first)

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield the pieces of each part; pieces of different parts add up."""
        for part in self.parts:
            yield from part.pieces()

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        first, *others = (p.two_sided(left, right) for p in self.parts)
        return sum(others, first)

    def norm_bound(self) -> Tensor:
        return torch.stack([p.norm_bound() for p in self.parts]).sum()

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,), with the cross terms between the parts."""
        found = []
        for a, b in combinations(self.parts, 2):
            cross = a.cross(b)
            cross = b.cross(a) if cross is None else cross
            if cross is None:
                return super().squared_norms()
            found.append(2 * cross)
        first, *others = (p.squared_norms() for p in self.parts)
        return sum([*others, *found], first).clamp_min(0.0)
