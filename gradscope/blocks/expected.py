"""Rows that are expectations of other rows: the sum over a sample's classes, weighted."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.blocks.base import TILE_BYTES, Block, over_samples


@dataclass(frozen=True, eq=False)
class ExpectedBlock(Block):
    """Σ_c w[i, c] b[i·C + c] for each sample i; what is linear in it never forms it.

    Attributes:
        base: n·C rows, the C of one sample next to each other.
        weights: (n, C).
    """

    base: Block
    weights: Tensor

    @property
    def n(self) -> int:
        """The number of samples."""
        return int(self.weights.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the base."""
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return self.base.device

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the expectations (n, *shape), a few samples and all their classes at a time."""
        if out is None:
            out = torch.empty(self.n, *self.shape, dtype=self.dtype, device=self.device)
        for rows in self._parts(TILE_BYTES):
            part = self.select(rows)
            values = part.base.scale(part.weights.flatten()).dense()
            out[rows] = values.reshape(part.n, -1, *self.shape).sum(1)
        return out

    def select(self, rows: slice | Tensor) -> "ExpectedBlock":
        """Return the samples `rows`."""
        every = torch.arange(self.base.n, device=self.device).reshape(self.weights.shape)
        return ExpectedBlock(self.base.select(every[rows].flatten()), self.weights[rows])

    def scale(self, factors: Tensor) -> "ExpectedBlock":
        """Multiply sample i by `factors[i]`."""
        return ExpectedBlock(self.base, self.weights * over_samples(factors, self.weights))

    def to(self, dtype: torch.dtype) -> "ExpectedBlock":
        """Cast the base."""
        return ExpectedBlock(self.base.to(dtype), self.weights)

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ Σ_c w[i, c] b[i·C + c] (*shape)."""
        inner = self.weights if weights is None else self.scale(weights).weights
        return self.base.weighted_sum(inner.flatten())

    def dot(self, vector: Tensor) -> Tensor:
        """Return ⟨gᵢ, v⟩ (n,)."""
        inner = self.base.dot(vector)
        return (inner.reshape(self.weights.shape) * self.weights.to(inner.dtype)).sum(1)

    def _parts(self, size: int) -> Iterator[slice]:
        """Yield samples of which all classes fit."""
        return super()._parts(size // max(1, self.weights.shape[1]))
