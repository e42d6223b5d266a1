"""Gradients of which few entries are not zero, at places of each sample's own."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gradscope.blocks.base import Block, over_samples, precise, squares


@dataclass(frozen=True, eq=False)
class SparseBlock(Block):
    """gᵢ has values[i, s] at the places index[i, s], and zeros elsewhere.

    Attributes:
        index: (n, s) int64 into the flattened parameter; no place twice in a sample, but for
            padding, whose value is 0.
        values: (n, s).
        parameter_shape: The parameter's shape.
    """

    index: Tensor
    values: Tensor
    parameter_shape: tuple[int, ...]

    @property
    def n(self) -> int:
        """The number of samples."""
        return int(self.index.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.parameter_shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.values.device

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape)."""
        table = self.values.new_zeros(self.n, prod(self.shape))
        dense = table.scatter_add_(1, self.index, self.values).view(self.n, *self.shape)
        return dense if out is None else out.copy_(dense)

    def select(self, rows: slice | Tensor) -> "SparseBlock":
        """Return the samples `rows`."""
        return SparseBlock(self.index[rows], self.values[rows], self.shape)

    def scale(self, factors: Tensor) -> "SparseBlock":
        """Multiply sample i by `factors[i]`."""
        return SparseBlock(self.index, self.values * over_samples(factors, self.values), self.shape)

    def to(self, dtype: torch.dtype) -> "SparseBlock":
        """Cast the values."""
        return SparseBlock(self.index, self.values.to(dtype), self.shape)

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,)."""
        return squares(precise(self.values)).sum(1)

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ gᵢ (*shape)."""
        return self._added(precise(self.values), weights)

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ |gᵢ|² (*shape)."""
        return self._added(squares(precise(self.values)), weights)

    def dot(self, vector: Tensor) -> Tensor:
        """Return ⟨gᵢ, v⟩ (n,)."""
        return (precise(self.values) * precise(vector.conj()).flatten()[self.index]).sum(1)

    def _added(self, values: Tensor, weights: Tensor | None) -> Tensor:
        if weights is not None:
            values = values * over_samples(weights, values)
        table = values.new_zeros(prod(self.shape))
        return table.index_add_(0, self.index.flatten(), values.flatten()).view(self.shape)
