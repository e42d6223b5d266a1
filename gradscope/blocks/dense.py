"""A block without structure: the gradients themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gradscope.blocks.base import Block, as_rows, over_samples, precise, size, squares


@dataclass(frozen=True, eq=False)
class DenseBlock(Block):
    """Gradients held as they are.

    Attributes:
        values: (n, *shape).
    """

    values: Tensor

    @property
    def n(self) -> int:
        """The number of samples."""
        return int(self.values.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return tuple(self.values.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.values.device

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape), copied into `out` if one is given."""
        return self.values if out is None else out.copy_(self.values)

    def select(self, rows: slice | Tensor) -> "DenseBlock":
        """Return the samples `rows`."""
        return DenseBlock(self.values[rows])

    def scale(self, factors: Tensor) -> "DenseBlock":
        """Multiply sample i by `factors[i]`."""
        return DenseBlock(self.values * over_samples(factors, self.values))

    def to(self, dtype: torch.dtype) -> "DenseBlock":
        """Cast."""
        return DenseBlock(self.values.to(dtype))

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield all at once: it is in memory."""
        yield slice(0, self.n), slice(0, prod(self.shape)), as_rows(self.values)

    def bound(self) -> Tensor:
        """Return the norm of all samples together."""
        return size(self.values)

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,)."""
        return as_rows(squares(precise(self.values))).sum(1)

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ gᵢ (*shape)."""
        values = precise(self.values)
        if weights is None:
            return values.sum(0)
        return (weights.to(values.dtype) @ as_rows(values)).reshape(self.shape)
