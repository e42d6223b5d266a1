"""Blocks that are a fixed affine map of another: less a mean, or preconditioned."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.blocks.base import Block, squares
from gradscope.blocks.derived import DerivedBlock, SquaredBlock
from gradscope.blocks.outer import OuterBlock

# ‖g − μ‖² = ‖g‖² − 2⟨g, μ⟩ + ‖μ‖² loses what the result is smaller than its terms. It is taken in
# float64; below this share of the terms the difference itself is squared instead.
_CANCELS = 1e-3


@dataclass(frozen=True, eq=False)
class CenteredBlock(DerivedBlock):
    """gᵢ − μ, the difference taken in float64."""

    mean: Tensor  # μ (*shape), float64 or complex128

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        if self.base.held is not None:
            return super().weighted_sum(weights)
        base = _widest(self.base).weighted_sum(weights)
        return _rounded(base - self._weight(weights) * self.mean, self)

    def squared_norms(self) -> Tensor:
        if not self.base.has_shortcuts:
            return super().squared_norms()
        base = _widest(self.base)
        terms = base.squared_norms() + squares(self.mean).sum()
        found = terms - 2 * base.dot(self.mean).real
        doubtful = ~(found > _CANCELS * terms) & (terms > 0)
        if bool(doubtful.any()):
            part = CenteredBlock(base.select(doubtful), self.mean)
            found[doubtful] = Block.squared_norms(part)
        return _rounded(found, self)

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        positive = weights is None or bool((weights >= 0).all())
        if not (self.base.has_shortcuts and positive):
            return super().squared_sum(weights)
        base = _widest(self.base)
        terms = base.squared_sum(weights) + self._weight(weights) * squares(self.mean)
        found = terms - 2 * (base.weighted_sum(weights) * self.mean.conj()).real
        if bool((~(found > _CANCELS * terms) & (terms > 0)).any()):
            found = Block.squared_sum(CenteredBlock(base, self.mean), weights)
        return _rounded(found, self)

    def dot(self, vector: Tensor) -> Tensor:
        if not self.base.has_shortcuts:
            return super().dot(vector)
        wide = vector.to(self.mean.dtype)
        return _rounded(_widest(self.base).dot(wide) - (self.mean * wide.conj()).sum(), self)

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        mean = self.mean.reshape(left.shape[1], right.shape[1])
        taken = left.to(mean.dtype) @ mean @ right.to(mean.dtype).mT
        return self.base.two_sided(left, right) - taken

    def _values(self, base: Tensor) -> Tensor:
        return (base.to(self.mean.dtype) - self.mean).to(base.dtype)

    def _weight(self, weights: Tensor | None) -> Tensor | float:
        return float(self.n) if weights is None else weights.to(self.mean.real.dtype).sum()


@dataclass(frozen=True, eq=False)
class PreconditionedBlock(DerivedBlock):
    """d ∘ gᵢ: every entry times a fixed number."""

    diagonal: Tensor  # d (*shape), real, float64

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        if self.base.held is not None:
            return super().weighted_sum(weights)
        return _rounded(_widest(self.base).weighted_sum(weights) * self.diagonal, self)

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        if not self.base.has_shortcuts:
            return super().squared_sum(weights)
        found = _widest(self.base).squared_sum(weights)
        return _rounded(found * squares(self.diagonal), self)

    def squared_norms(self) -> Tensor:
        """Return ‖d ∘ gᵢ‖² (n,); of one outer product it is b² D² a²."""
        if isinstance(self.base, OuterBlock) and self.base.sizes[1] == 1:
            found = SquaredBlock(_widest(self.base)).dot(squares(self.diagonal))
            return _rounded(found, self)
        return super().squared_norms()

    def dot(self, vector: Tensor) -> Tensor:
        if not self.base.has_shortcuts:
            return super().dot(vector)
        base = _widest(self.base)
        return _rounded(base.dot(vector.to(base.dtype) * self.diagonal), self)

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield the base's pieces times d, in d's precision."""
        for samples, entries, values in self.base.pieces():
            yield samples, entries, values * self.diagonal.flatten()[entries]

    def _values(self, base: Tensor) -> Tensor:
        # in float64: 1/√v may be beyond what g's dtype holds, although g/√v is not
        return (base * self.diagonal).to(base.dtype)


@dataclass(frozen=True, eq=False)
class KroneckerBlock(DerivedBlock):
    """L Gᵢ Rᵀ, with the gradient of k·r·c entries read as k matrices Gᵢ (r, c)."""

    left: Tensor  # L (k, r, r), float64 or complex128
    right: Tensor  # R (k, c, c)

    @classmethod
    def of(cls, base: Block, left: Tensor, right: Tensor) -> Block:
        """Return the block; of outer products it is the outer products of L b and R a."""
        sizes = (left.shape[0], left.shape[-1], right.shape[-1])
        if isinstance(base, OuterBlock) and (base.sizes[0], *base.sizes[2:]) == sizes:
            wide = _widest(base)
            assert isinstance(wide, OuterBlock)
            rows = wide.left @ left.mT.to(wide.left.dtype)
            columns = wide.right @ right.mT.to(wide.right.dtype)
            return OuterBlock(rows, columns, base.shape).to(base.dtype)
        return cls(base, left, right)

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        if self.base.held is not None:
            return super().weighted_sum(weights)
        found = _widest(self.base).weighted_sum(weights)
        return _rounded(self._values(found.unsqueeze(0))[0], self)

    def _values(self, base: Tensor) -> Tensor:
        sizes = (self.left.shape[0], self.left.shape[-1], self.right.shape[-1])
        dtype = torch.promote_types(base.dtype, self.left.dtype)
        matrices = base.reshape(len(base), *sizes).to(dtype)
        found = self.left.to(dtype) @ matrices @ self.right.mT.to(dtype)
        return found.reshape(base.shape).to(base.dtype)


def _rounded(values: Tensor, block: Block) -> Tensor:
    """Return what was taken in float64 in the block's own precision."""
    dtype = torch.promote_types(block.dtype.to_real(), torch.float32)
    return values.to(dtype.to_complex() if values.is_complex() else dtype)


def _widest(block: Block) -> Block:
    """Return the block in float64 or complex128."""
    return block.to(torch.promote_types(block.dtype, torch.float64))
