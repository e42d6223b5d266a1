"""Blocks whose entries went through a function: dense when asked, never before."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.blocks.base import Block, over_samples, squares
from gradscope.blocks.dense import DenseBlock


@dataclass(frozen=True, eq=False)
class MappedBlock(Block):
    """f(gᵢ), entry by entry.

    Attributes:
        base: The block that f is applied to.
        fn: A function of a tensor that acts on each entry alone.
    """

    base: Block
    fn: Callable[[Tensor], Tensor]

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
        """The dtype of f's result."""
        return self.fn(torch.zeros((), dtype=self.base.dtype, device=self.device)).dtype

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return self.base.device

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return f(gᵢ) (n, *shape)."""
        values = self.fn(self.base.dense())
        return values if out is None else out.copy_(values)

    def select(self, rows: slice | Tensor) -> Block:
        """Return the samples `rows`."""
        return type(self)(self.base.select(rows), self.fn)

    def scale(self, factors: Tensor) -> Block:
        """Multiply sample i by `factors[i]`."""
        return DenseBlock(self.dense() * over_samples(factors, self.dense()))

    def to(self, dtype: torch.dtype) -> Block:
        """Cast before f, which then computes in the new dtype; a complex base stays complex."""
        if self.base.dtype.is_complex and not dtype.is_complex:
            dtype = torch.promote_types(dtype, torch.complex64)
        return type(self)(self.base.to(dtype), self.fn)


@dataclass(frozen=True, eq=False)
class SquaredBlock(MappedBlock):
    """|gᵢ|² entry by entry, whose weighted sum the base may know without any dense form."""

    fn: Callable[[Tensor], Tensor] = squares

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ |gᵢ|² (*shape)."""
        return self.base.squared_sum(weights)
