"""Blocks whose entries went through a function: dense when asked, never before."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.blocks.base import precise, squares
from gradscope.blocks.derived import DerivedBlock
from gradscope.blocks.outer import OuterBlock


@dataclass(frozen=True, eq=False)
class MappedBlock(DerivedBlock):
    """f(gᵢ), entry by entry.

    Attributes:
        base: The block that f is applied to.
        fn: A function of a tensor that acts on each entry alone.
        grows: From a number (0-d) that no ‖gᵢ‖ exceeds to one that no ‖f(gᵢ)‖ does, if known.
    """

    fn: Callable[[Tensor], Tensor]
    grows: Callable[[Tensor], Tensor] | None = None

    def bound(self) -> Tensor:
        """Return what the base's bound grows to."""
        return super().bound() if self.grows is None else self.grows(self.base.bound().double())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of f's result."""
        return self.fn(torch.zeros((), dtype=self.base.dtype, device=self.device)).dtype

    def _values(self, base: Tensor) -> Tensor:
        return self.fn(base)


@dataclass(frozen=True, eq=False)
class SquaredBlock(MappedBlock):
    """|gᵢ|² entry by entry, whose weighted sum the base may know without any dense form."""

    fn: Callable[[Tensor], Tensor] = squares
    grows: Callable[[Tensor], Tensor] | None = torch.square

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ |gᵢ|² (*shape)."""
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

    Attributes:
        base: The block that f is applied to.
        keys: (n,) int64, what each sample draws by.
        fn: From gradients (m, *shape) and keys (m,) to (m, *shape), row by row.
    """

    keys: Tensor
    fn: Callable[[Tensor, Tensor], Tensor]

    def select(self, rows: slice | Tensor) -> "RandomBlock":
        """Return the samples `rows`."""
        keys = self.keys[rows.to(self.keys.device) if isinstance(rows, Tensor) else rows]
        return RandomBlock(self.base.select(rows), keys, self.fn)

    def _values(self, base: Tensor) -> Tensor:
        return self.fn(base, self.keys)
