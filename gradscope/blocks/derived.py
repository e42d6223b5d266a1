"""Blocks made from another block, and the simplest: one factor a sample."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from gradscope.blocks.base import TILE_BYTES, Block, over_samples, squares


@dataclass(frozen=True, eq=False)
class DerivedBlock(Block):
    """What blocks that are made from another one have in common.

    Attributes:
        base: The block it is made from, of the same n and shape.
    """

    base: Block

    @property
    def n(self) -> int:
        """The number of samples."""
        return self.base.n

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        """The base's dtype."""
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return self.base.device

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape), written into `out` if one is given.

        What is needed on the way is made a tile at a time.
        """
        size = self.n * prod(self.shape)
        if out is None and size * self.dtype.itemsize <= TILE_BYTES:
            return self._values(self.base.dense())
        if out is None:
            out = torch.empty(self.n, *self.shape, dtype=self.dtype, device=self.device)
        for rows, tile in self.base.tiles():
            out[rows] = self.select(rows)._values(tile)
        return out

    def select(self, rows: slice | Tensor) -> Self:
        """Return the samples `rows`."""
        return replace(self, base=self.base.select(rows))

    def scale(self, factors: Tensor) -> Block:
        """Multiply sample i by `factors[i]`, when the gradients are asked for."""
        return ScaledBlock(self, factors)

    def to(self, dtype: torch.dtype) -> Self:
        """Cast the base, from which the rest is then computed; complex stays complex."""
        if self.base.dtype.is_complex and not dtype.is_complex:
            dtype = torch.promote_types(dtype, torch.complex64)
        return replace(self, base=self.base.to(dtype))

    @abstractmethod
    def _values(self, base: Tensor) -> Tensor:
        """Return the dense form from the base's (n, *shape)."""


@dataclass(frozen=True, eq=False)
class ScaledBlock(DerivedBlock):
    """fᵢ gᵢ, for a base that has no factor to put fᵢ into.

    Attributes:
        base: The gradients gᵢ.
        factors: (n,).
    """

    factors: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The base's dtype, made complex by complex factors."""
        base = self.base.dtype
        return torch.promote_types(base, self.factors.dtype) if self.factors.is_complex() else base

    def select(self, rows: slice | Tensor) -> "ScaledBlock":
        """Return the samples `rows`."""
        return ScaledBlock(self.base.select(rows), self.factors[rows])

    def scale(self, factors: Tensor) -> "ScaledBlock":
        """Multiply sample i by `factors[i]`."""
        return ScaledBlock(self.base, self.factors * factors)

    def bound(self) -> Tensor:
        """Return the base's bound times the largest factor."""
        return self.base.bound() * self.factors.abs().amax()

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,)."""
        return self._times(squares(self.factors), self.base.squared_norms())

    def norms(self, p: float = 2.0) -> Tensor:
        """Return ‖gᵢ‖ₚ (n,)."""
        return self._times(self.factors.abs(), self.base.norms(p))

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ fᵢ gᵢ (*shape)."""
        if self.factors.is_complex():  # a real base takes no complex weights
            return super().weighted_sum(weights)
        factors = self.factors if weights is None else self.factors * weights
        return self.base.weighted_sum(factors)

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ |fᵢ gᵢ|² (*shape)."""
        factors = squares(self.factors)
        return self.base.squared_sum(factors if weights is None else factors * weights)

    def sums(
        self, weights: Tensor | None = None, for_squares: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return Σᵢ wᵢ fᵢ gᵢ and Σᵢ uᵢ |fᵢ gᵢ|², both (*shape)."""
        if self.factors.is_complex():
            return super().sums(weights, for_squares)
        once, twice = self.factors, squares(self.factors)
        return self.base.sums(
            once if weights is None else once * weights,
            twice if for_squares is None else twice * for_squares,
        )

    def dot(self, vector: Tensor) -> Tensor:
        """Return ⟨fᵢ gᵢ, v⟩ (n,)."""
        return self._times(self.factors, self.base.dot(vector))

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield the base's pieces, scaled."""
        for samples, entries, values in self.base.pieces():
            yield samples, entries, self._times(self.factors[samples], values)

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · fᵢ Gᵢ · rightᵀ (n, a, b)."""
        return self._times(self.factors, self.base.two_sided(left, right))

    def _values(self, base: Tensor) -> Tensor:
        return self._times(self.factors, base)

    @staticmethod
    def _times(factors: Tensor, values: Tensor) -> Tensor:
        return values * over_samples(factors, values)
