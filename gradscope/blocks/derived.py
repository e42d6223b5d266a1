"""Blocks made from another block: scaled, mapped, randomised, averaged, centred, preconditioned."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Self

import torch
from torch import Tensor

from gradscope.blocks.base import TILE_BYTES, Block, precise, squares, times, wide
from gradscope.blocks.outer import OuterBlock
from gradscope.core.precision import doubled

# ‖g − μ‖² = ‖g‖² − 2⟨g, μ⟩ + ‖μ‖² cancels if the result is much smaller than its terms. It is
# computed in float64. Below this share of the terms, the difference itself is squared.
_CANCELS = 1e-3


@dataclass(frozen=True, eq=False)
class DerivedBlock(Block):
    """Common parts of blocks that are made from another block."""

    base: Block  # the original block, of the same n and shape
    each: ClassVar[tuple[str, ...]] = ()  # names of further fields (n, ...), one entry per sample

    @property
    def n(self) -> int:
        return self.base.n

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape), computed tile by tile."""
        if out is None:
            if self.n * prod(self.shape) * self.dtype.itemsize <= TILE_BYTES:
                return self._values(self.base.dense())
            out = torch.empty(self.n, *self.shape, dtype=self.dtype, device=self.device)
        for rows, tile in self.base.tiles():
            out[rows] = self.select(rows)._values(tile)
        return out

    def select(self, rows: slice | Tensor) -> Self:
        def of(values: Tensor) -> Tensor:
            return values[rows.to(values.device) if isinstance(rows, Tensor) else rows]

        own = {name: of(getattr(self, name)) for name in self.each}
        return replace(self, base=self.base.select(rows), **own)

    def scale(self, factors: Tensor) -> Block:
        """Multiply sample i by `factors[i]`, when the gradients are computed."""
        return ScaledBlock(self, factors)

    def to(self, dtype: torch.dtype) -> Self:
        """Cast the base; the rest is computed from it. A complex block stays complex."""
        if self.base.dtype.is_complex and not dtype.is_complex:
            dtype = torch.promote_types(dtype, torch.complex64)
        return replace(self, base=self.base.to(dtype))

    @abstractmethod
    def _values(self, base: Tensor) -> Tensor:
        """Return the dense form, computed from the base's dense form (n, *shape)."""


@dataclass(frozen=True, eq=False)
class ScaledBlock(DerivedBlock):
    """fᵢ gᵢ, for a base without a factor that could absorb fᵢ."""

    by: Tensor  # the factors fᵢ (n,)
    each = ("by",)

    @property
    def dtype(self) -> torch.dtype:
        base = self.base.dtype
        return torch.promote_types(base, self.by.dtype) if self.by.is_complex() else base

    def scale(self, factors: Tensor) -> "ScaledBlock":
        return ScaledBlock(self.base, self.by * factors)

    def norm_bound(self) -> Tensor:
        return self.base.norm_bound() * self.by.abs().amax()

    def squared_norms(self) -> Tensor:
        return times(self.base.squared_norms(), squares(self.by))

    def norms(self, p: float = 2.0) -> Tensor:
        return times(self.base.norms(p), self.by.abs())

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        if self.by.is_complex():  # a real base does not take complex weights
            return super().weighted_sum(weights)
        return self.base.weighted_sum(_product(self.by, weights))

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        return self.base.squared_sum(_product(squares(self.by), weights))

    def sums(
        self, weights: Tensor | None = None, for_squares: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.by.is_complex():
            return super().sums(weights, for_squares)
        return self.base.sums(_product(self.by, weights), _product(squares(self.by), for_squares))

    def dot(self, vector: Tensor) -> Tensor:
        return times(self.base.dot(vector), self.by)

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        for samples, entries, values in self.base.pieces():
            yield samples, entries, times(values, self.by[samples])

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        return times(self.base.two_sided(left, right), self.by)

    def _values(self, base: Tensor) -> Tensor:
        return times(base, self.by)


def _product(factors: Tensor, weights: Tensor | None) -> Tensor:
    return factors if weights is None else factors * weights


@dataclass(frozen=True, eq=False)
class MappedBlock(DerivedBlock):
    """f(gᵢ), entry by entry, computed only when the dense form is needed.

    `fn` acts on each entry separately. `grows`, if given, maps an upper bound (0-d) on all ‖gᵢ‖ to
    an upper bound on all ‖f(gᵢ)‖.
    """

    fn: Callable[[Tensor], Tensor]
    grows: Callable[[Tensor], Tensor] | None = None

    def norm_bound(self) -> Tensor:
        base = self.base.norm_bound
        return super().norm_bound() if self.grows is None else self.grows(doubled(base()))

    @property
    def dtype(self) -> torch.dtype:
        return self.fn(torch.zeros((), dtype=self.base.dtype, device=self.device)).dtype

    def _values(self, base: Tensor) -> Tensor:
        return self.fn(base)


@dataclass(frozen=True, eq=False)
class SquaredBlock(MappedBlock):
    """|gᵢ|² entry by entry; the base may compute its weighted sum without a dense form."""

    fn: Callable[[Tensor], Tensor] = squares
    grows: Callable[[Tensor], Tensor] | None = torch.square

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        return self.base.squared_sum(weights)

    def dot(self, vector: Tensor) -> Tensor:
        """Return Σⱼ vⱼ |gᵢⱼ|² (n,) for a real `vector`; for one outer product it is bᵢ² V aᵢ²."""
        if not isinstance(self.base, OuterBlock) or self.base.sizes[1] > 1:
            return super().dot(vector)
        left, right = (squares(precise(f)) for f in (self.base.left, self.base.right))
        return OuterBlock(left, right, self.shape).dot(vector)


@dataclass(frozen=True, eq=False)
class RandomBlock(DerivedBlock):
    """f(gᵢ, keyᵢ), where f draws random numbers that the key determines.

    A sample's row is always the same, however the tiles are cut.
    """

    keys: Tensor  # (n,) int64, seeds the numbers of each sample
    fn: Callable[[Tensor, Tensor], Tensor]  # from (m, *shape) and keys (m,) to (m, *shape)
    each = ("keys",)

    def _values(self, base: Tensor) -> Tensor:
        return self.fn(base, self.keys)


@dataclass(frozen=True, eq=False)
class ExpectedBlock(DerivedBlock):
    """Σ_c w[i, c] b[i·C + c] for each sample i; linear operations do not form it.

    The base has n·C rows; the C rows of a sample are adjacent.
    """

    weights: Tensor  # (n, C)

    @property
    def n(self) -> int:
        return len(self.weights)

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the expectations (n, *shape), computed for a few samples at a time."""
        if out is None:
            out = torch.empty(self.n, *self.shape, dtype=self.dtype, device=self.device)
        for rows in self._parts(TILE_BYTES):
            part = self.select(rows)
            out[rows] = part._values(part.base.scale(part.weights.flatten()).dense())
        return out

    def select(self, rows: slice | Tensor) -> "ExpectedBlock":
        every = torch.arange(self.base.n, device=self.device).reshape(self.weights.shape)
        return ExpectedBlock(self.base.select(every[rows].flatten()), self.weights[rows])

    def scale(self, factors: Tensor) -> "ExpectedBlock":
        return ExpectedBlock(self.base, times(self.weights, factors))

    def to(self, dtype: torch.dtype) -> "ExpectedBlock":
        return ExpectedBlock(self.base.to(dtype), self.weights)

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        inner = self.weights if weights is None else self.scale(weights).weights
        return self.base.weighted_sum(inner.flatten())

    def dot(self, vector: Tensor) -> Tensor:
        inner = self.base.dot(vector)
        return (inner.reshape(self.weights.shape) * self.weights.to(inner.dtype)).sum(1)

    def _values(self, base: Tensor) -> Tensor:
        """Return the sums (n, *shape) of weighted rows (n·C, *shape)."""
        return base.reshape(self.n, -1, *self.shape).sum(1)

    def _parts(self, size: int) -> Iterator[slice]:
        """Yield samples whose rows of all classes have at most `size` bytes."""
        return super()._parts(size // max(1, self.weights.shape[1]))


@dataclass(frozen=True, eq=False)
class CenteredBlock(DerivedBlock):
    """gᵢ − μ, computed in float64."""

    mean: Tensor  # μ (*shape), float64 or complex128

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        if self.base.dense_if_formed is not None:
            return super().weighted_sum(weights)
        base = wide(self.base).weighted_sum(weights)
        return _rounded(base - self._weight(weights) * self.mean, self)

    def squared_norms(self) -> Tensor:
        if not self.base.has_shortcuts:
            return super().squared_norms()
        base = wide(self.base)
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
        base = wide(self.base)
        terms = base.squared_sum(weights) + self._weight(weights) * squares(self.mean)
        found = terms - 2 * (base.weighted_sum(weights) * self.mean.conj()).real
        if bool((~(found > _CANCELS * terms) & (terms > 0)).any()):
            found = Block.squared_sum(CenteredBlock(base, self.mean), weights)
        return _rounded(found, self)

    def dot(self, vector: Tensor) -> Tensor:
        if not self.base.has_shortcuts:
            return super().dot(vector)
        own = vector.to(self.mean.dtype)
        return _rounded(wide(self.base).dot(own) - (self.mean * own.conj()).sum(), self)

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
    """d ∘ gᵢ: each entry times a fixed number."""

    diagonal: Tensor  # d (*shape), real, float64

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        if self.base.dense_if_formed is not None:
            return super().weighted_sum(weights)
        return _rounded(wide(self.base).weighted_sum(weights) * self.diagonal, self)

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        if not self.base.has_shortcuts:
            return super().squared_sum(weights)
        found = wide(self.base).squared_sum(weights)
        return _rounded(found * squares(self.diagonal), self)

    def squared_norms(self) -> Tensor:
        """Return ‖d ∘ gᵢ‖² (n,); for one outer product it is b² D² a²."""
        if isinstance(self.base, OuterBlock) and self.base.sizes[1] == 1:
            found = SquaredBlock(wide(self.base)).dot(squares(self.diagonal))
            return _rounded(found, self)
        return super().squared_norms()

    def dot(self, vector: Tensor) -> Tensor:
        if not self.base.has_shortcuts:
            return super().dot(vector)
        base = wide(self.base)
        return _rounded(base.dot(vector.to(base.dtype) * self.diagonal), self)

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield the base's pieces times d, in the precision of d."""
        for samples, entries, values in self.base.pieces():
            yield samples, entries, values * self.diagonal.flatten()[entries]

    def _values(self, base: Tensor) -> Tensor:
        # in float64: 1/√v may overflow in g's dtype, although g/√v does not
        return (base * self.diagonal).to(base.dtype)


@dataclass(frozen=True, eq=False)
class KroneckerBlock(DerivedBlock):
    """L Gᵢ Rᵀ, where Gᵢ is the gradient read as k matrices (r, c)."""

    left: Tensor  # L (k, r, r), float64 or complex128
    right: Tensor  # R (k, c, c)

    @classmethod
    def of(cls, base: Block, left: Tensor, right: Tensor) -> Block:
        """Return the block; for outer products of b and a, the outer products of L b and R a."""
        sizes = (left.shape[0], left.shape[-1], right.shape[-1])
        if isinstance(base, OuterBlock) and (base.sizes[0], *base.sizes[2:]) == sizes:
            widened = wide(base)
            assert isinstance(widened, OuterBlock)
            rows = widened.left @ left.mT.to(widened.left.dtype)
            columns = widened.right @ right.mT.to(widened.right.dtype)
            return OuterBlock(rows, columns, base.shape).to(base.dtype)
        return cls(base, left, right)

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        if self.base.dense_if_formed is not None:
            return super().weighted_sum(weights)
        found = wide(self.base).weighted_sum(weights)
        return _rounded(self._values(found.unsqueeze(0))[0], self)

    def _values(self, base: Tensor) -> Tensor:
        sizes = (self.left.shape[0], self.left.shape[-1], self.right.shape[-1])
        dtype = torch.promote_types(base.dtype, self.left.dtype)
        matrices = base.reshape(len(base), *sizes).to(dtype)
        found = self.left.to(dtype) @ matrices @ self.right.mT.to(dtype)
        return found.reshape(base.shape).to(base.dtype)


def _rounded(values: Tensor, block: Block) -> Tensor:
    """Cast float64 values to the block's precision, float32 or wider."""
    dtype = torch.promote_types(block.dtype.to_real(), torch.float32)
    return values.to(dtype.to_complex() if values.is_complex() else dtype)
