"""Sums of blocks: weights that a model uses more than once, or ties between layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations

import torch
from torch import Tensor

from gradscope.blocks.base import Block, precise
from gradscope.blocks.dense import DenseBlock
from gradscope.blocks.outer import OuterBlock
from gradscope.blocks.scatter import ScatterBlock


def total(blocks: Sequence[Block]) -> Block:
    """Return one block that stands for the sum of `blocks` (at least one, all of one shape).

    Blocks of one kind melt together: outer products and scatters are joined along their
    positions, dense blocks are added. What is left of different kinds stays a `TotalBlock`.
    """
    outer = [b for b in blocks if isinstance(b, OuterBlock)]
    scatter = [b for b in blocks if isinstance(b, ScatterBlock)]
    rest = [b for b in blocks if not isinstance(b, OuterBlock | ScatterBlock)]
    parts: list[Block] = []
    while outer:
        k, _, r, c = outer[0].sizes
        same = [b for b in outer if b.sizes[0::2] == (k, r) and b.sizes[3] == c]
        outer = [b for b in outer if b not in same]
        parts.append(_joined(same))
    if scatter:
        index = _along_positions([b.index for b in scatter], 1)
        rows = _along_positions([b.rows for b in scatter], 1)
        parts.append(ScatterBlock(index, rows, scatter[0].size))
    if rest:
        parts.append(reduce(lambda a, b: DenseBlock(a.dense() + b.dense()), rest))
    return parts[0] if len(parts) == 1 else TotalBlock(tuple(parts))


def _joined(blocks: Sequence[OuterBlock]) -> OuterBlock:
    left, right = (_along_positions([getattr(b, f) for b in blocks], 2) for f in ("left", "right"))
    return OuterBlock(left, right, blocks[0].shape)


def _along_positions(factors: Sequence[Tensor], axis: int) -> Tensor:
    return torch.cat(list(factors), axis) if len(factors) > 1 else factors[0]


@dataclass(frozen=True, eq=False)
class TotalBlock(Block):
    """A sum of blocks of different kinds.

    Attributes:
        parts: Two blocks or more, of one n and one shape.
    """

    parts: tuple[Block, ...]

    @property
    def n(self) -> int:
        """The number of samples."""
        return self.parts[0].n

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.parts[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sum."""
        return reduce(torch.promote_types, (p.dtype for p in self.parts))

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return self.parts[0].device

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape)."""
        first, *others = sorted(self.parts, key=lambda part: isinstance(part, ScatterBlock))
        result = first.to(self.dtype).dense(out)
        if out is None and not isinstance(first, OuterBlock):
            result = result.clone()  # it may be the block's own
        for part in others:
            part.add_to(result)
        return result

    def select(self, rows: slice | Tensor) -> "TotalBlock":
        """Return the samples `rows`."""
        return TotalBlock(tuple(p.select(rows) for p in self.parts))

    def scale(self, factors: Tensor) -> "TotalBlock":
        """Multiply sample i by `factors[i]`."""
        return TotalBlock(tuple(p.scale(factors) for p in self.parts))

    def to(self, dtype: torch.dtype) -> "TotalBlock":
        """Cast every part."""
        return TotalBlock(tuple(p.to(dtype) for p in self.parts))

    def transpose(self, axis0: int, axis1: int) -> Block:
        """Swap two axes of every part."""
        return total([p.transpose(axis0, axis1) for p in self.parts])

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ gᵢ (*shape)."""
        return sum(
            (p.weighted_sum(weights) for p in self.parts[1:]), self.parts[0].weighted_sum(weights)
        )

    def dot(self, vector: Tensor) -> Tensor:
        """Return ⟨gᵢ, v⟩ (n,)."""
        return sum((p.dot(vector) for p in self.parts[1:]), self.parts[0].dot(vector))

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield each part's pieces; they are to be added."""
        for part in self.parts:
            yield from part.pieces()

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · Gᵢ · rightᵀ (n, a, b)."""
        first, *others = (p.two_sided(left, right) for p in self.parts)
        return sum(others, first)

    def bound(self) -> Tensor:
        """Return the sum of the parts' bounds."""
        return torch.stack([p.bound() for p in self.parts]).sum()

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,), with the cross terms between the parts."""
        crosses = [_cross(a, b) for a, b in combinations(self.parts, 2)]
        if any(c is None for c in crosses):
            return super().squared_norms()
        norms = sum(p.squared_norms() for p in self.parts[1:]) + self.parts[0].squared_norms()
        for cross in crosses:
            assert cross is not None
            norms = norms + 2 * cross
        return norms.clamp_min(0.0)


def _cross(a: Block, b: Block) -> Tensor | None:
    """Return Re⟨aᵢ, bᵢ⟩ (n,) where it has a shortcut, else None.

    A tied embedding is a scatter plus an outer product: the scatter's row x meets the outer
    product's entry left[x] · right, so nothing of the table's size is formed.
    """
    if isinstance(a, ScatterBlock):
        a, b = b, a
    if not (isinstance(a, OuterBlock) and isinstance(b, ScatterBlock)) or a.sizes[0] != 1:
        return None
    if a.shape != (a.sizes[2], a.sizes[3]):
        return None
    left, right = precise(a.left)[:, 0], precise(a.right)[:, 0]  # (n, t, v), (n, t, d)
    index = b.index.unsqueeze(1).expand(-1, left.shape[1], -1)  # (n, t, s)
    met = torch.gather(left, 2, index)  # left's entry at each scattered row
    return (met * (right @ precise(b.rows).mH)).sum((1, 2)).real
