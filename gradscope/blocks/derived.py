"""Blocks made from another block: scaled, mapped entry by entry, randomised, averaged."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from gradscope.blocks.base import TILE_BYTES, Block, over_samples, precise, squares
from gradscope.blocks.outer import OuterBlock


@dataclass(frozen=True, eq=False)
class DerivedBlock(Block):
    """What blocks that are made from another one have in common."""

    base: Block  # the block it is made from, of the same n and shape

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
        """Return the gradients (n, *shape); what is needed on the way is made a tile at a time."""
        size = self.n * prod(self.shape)
        if out is None and size * self.dtype.itemsize <= TILE_BYTES:
            return self._values(self.base.dense())
        if out is None:
            out = torch.empty(self.n, *self.shape, dtype=self.dtype, device=self.device)
        for rows, tile in self.base.tiles():
            out[rows] = self.select(rows)._values(tile)
        return out

    def select(self, rows: slice | Tensor) -> Self:
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
    """fᵢ gᵢ, for a base that has no factor to put fᵢ into."""

    by: Tensor  # the factors fᵢ (n,)

    @property
    def dtype(self) -> torch.dtype:
        base = self.base.dtype
        return torch.promote_types(base, self.by.dtype) if self.by.is_complex() else base

    def select(self, rows: slice | Tensor) -> "ScaledBlock":
        return ScaledBlock(self.base.select(rows), self.by[rows])

    def scale(self, factors: Tensor) -> "ScaledBlock":
        return ScaledBlock(self.base, self.by * factors)

    def bound(self) -> Tensor:
        return self.base.bound() * self.by.abs().amax()

    def squared_norms(self) -> Tensor:
        return self._times(squares(self.by), self.base.squared_norms())

    def norms(self, p: float = 2.0) -> Tensor:
        return self._times(self.by.abs(), self.base.norms(p))

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        if self.by.is_complex():  # a real base takes no complex weights
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
        return self._times(self.by, self.base.dot(vector))

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        for samples, entries, values in self.base.pieces():
            yield samples, entries, self._times(self.by[samples], values)

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        return self._times(self.by, self.base.two_sided(left, right))

    def _values(self, base: Tensor) -> Tensor:
        return self._times(self.by, base)

    @staticmethod
    def _times(factors: Tensor, values: Tensor) -> Tensor:
        return values * over_samples(factors, values)


def _product(factors: Tensor, weights: Tensor | None) -> Tensor:
    return factors if weights is None else factors * weights


@dataclass(frozen=True, eq=False)
class MappedBlock(DerivedBlock):
    """f(gᵢ), entry by entry: dense when asked, never before.

    `fn` acts on each entry of a tensor alone; `grows`, if known, takes a number (0-d) that no ‖gᵢ‖
    exceeds to one that no ‖f(gᵢ)‖ does.
    """

    fn: Callable[[Tensor], Tensor]
    grows: Callable[[Tensor], Tensor] | None = None

    def bound(self) -> Tensor:
        return super().bound() if self.grows is None else self.grows(self.base.bound().double())

    @property
    def dtype(self) -> torch.dtype:
        return self.fn(torch.zeros((), dtype=self.base.dtype, device=self.device)).dtype

    def _values(self, base: Tensor) -> Tensor:
        return self.fn(base)


@dataclass(frozen=True, eq=False)
class SquaredBlock(MappedBlock):
    """|gᵢ|² entry by entry, whose weighted sum the base may know without any dense form."""

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
    """f(gᵢ, keyᵢ), where f draws the random numbers that belong to the key.

    However often and in whatever tiles it is made dense, a sample's row is the same.
    """

    keys: Tensor  # (n,) int64, what each sample draws by
    fn: Callable[[Tensor, Tensor], Tensor]  # from (m, *shape) and keys (m,) to (m, *shape)

    def select(self, rows: slice | Tensor) -> "RandomBlock":
        keys = self.keys[rows.to(self.keys.device) if isinstance(rows, Tensor) else rows]
        return RandomBlock(self.base.select(rows), keys, self.fn)

    def _values(self, base: Tensor) -> Tensor:
        return self.fn(base, self.keys)


@dataclass(frozen=True, eq=False)
class ExpectedBlock(DerivedBlock):
    """Σ_c w[i, c] b[i·C + c] for each sample i; what is linear in it never forms it.

    The base has n·C rows, the C of one sample next to each other.
    """

    weights: Tensor  # (n, C)

    @property
    def n(self) -> int:
        return len(self.weights)

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the expectations (n, *shape), a few samples and all their classes at a time."""
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
        return ExpectedBlock(self.base, self.weights * over_samples(factors, self.weights))

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
        """Yield samples of which all classes fit."""
        return super()._parts(size // max(1, self.weights.shape[1]))
