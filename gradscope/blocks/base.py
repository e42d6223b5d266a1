"""What every block can do, and how it does it from dense tiles when it knows no better way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import inf, prod

import torch
from torch import Tensor

TILE_BYTES = 32 * 2**20  # a tile that stays near the caches, yet keeps the matrix kernels busy


def precise(t: Tensor) -> Tensor:
    """Widen half precision to float32, so that squares neither overflow nor round away."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def squares(t: Tensor) -> Tensor:
    """Return |t|² elementwise, real also for complex `t`."""
    return (t * t.conj()).real if t.is_complex() else t * t


def as_rows(t: Tensor) -> Tensor:
    """Return (n, ...) as a matrix (n, entries), also where a sample is a single number."""
    return t.reshape(t.shape[0], prod(t.shape[1:]))


def over_samples(factors: Tensor, like: Tensor) -> Tensor:
    """Return `factors` (n,) with trailing axes and of a dtype to multiply `like` (n, ...) by."""
    dtype = (
        like.dtype if not factors.is_complex() else torch.promote_types(like.dtype, factors.dtype)
    )
    return factors.to(dtype).reshape(-1, *[1] * (like.dim() - 1))


def p_norms(rows: Tensor, p: float) -> Tensor:
    """Return ‖rowᵢ‖ₚ (n,) of a matrix (n, entries); large entries do not overflow on the way."""
    sizes = rows.abs()
    if sizes.shape[1] == 0:
        return sizes.sum(1)
    top = sizes.amax(1)
    if p == inf:
        return top
    by = torch.where((top > 0) & top.isfinite(), top, 1.0)
    return by * (sizes / by.unsqueeze(1)).pow(p).sum(1).pow(1 / p)


class Block(ABC):
    """The per-sample gradients (n, *shape) of one parameter.

    Blocks are immutable: every operation returns a new block or a tensor.

    Attributes:
        representation: The word the result file uses for this structure.
    """

    representation = "dense"

    @property
    @abstractmethod
    def n(self) -> int:
        """The number of samples."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the dense form."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the block's tensors are."""

    @abstractmethod
    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape), written into `out` if one is given."""

    @abstractmethod
    def select(self, rows: slice | Tensor) -> "Block":
        """Return the samples `rows`: a slice, positions, or a mask (n,)."""

    @abstractmethod
    def scale(self, factors: Tensor) -> "Block":
        """Multiply sample i by `factors[i]`, (n,)."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> "Block":
        """Cast the block's own tensors."""

    def reshape(self, shape: tuple[int, ...]) -> "Block":
        """Return the same numbers in the same order, for a parameter of another shape."""
        from gradscope.blocks.dense import DenseBlock

        return DenseBlock(self.dense().reshape(self.n, *shape))

    def transpose(self, axis0: int, axis1: int) -> "Block":
        """Swap two axes of the parameter, counted without the sample axis."""
        from gradscope.blocks.dense import DenseBlock

        moved = [axis % max(len(self.shape), 1) + 1 for axis in (axis0, axis1)]
        return DenseBlock(self.dense().transpose(*moved))

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, dense gradients of these rows), a bounded number of bytes at a time."""
        row = max(1, prod(self.shape) * self.dtype.itemsize)
        step = max(1, min(self.n, TILE_BYTES // row))
        for start in range(0, self.n, step):
            part = slice(start, min(start + step, self.n))
            yield part, self.select(part).dense()

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,)."""
        return torch.cat([as_rows(squares(precise(t))).sum(1) for _, t in self.tiles()])

    def norms(self, p: float = 2.0) -> Tensor:
        """Return ‖gᵢ‖ₚ (n,), p > 0; the largest magnitude for p = inf."""
        if p == 2:
            return self.squared_norms().sqrt()
        return torch.cat([p_norms(as_rows(precise(t)), p) for _, t in self.tiles()])

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ gᵢ (*shape); all weights (n,) are 1 when none are given."""
        return self._reduced(precise, weights)

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ |gᵢ|² elementwise (*shape)."""
        return self._reduced(lambda t: squares(precise(t)), weights)

    def dot(self, vector: Tensor) -> Tensor:
        """Return ⟨gᵢ, v⟩ (n,) for `vector` (*shape); conjugates the vector when complex."""
        flat = precise(vector.conj()).flatten()
        return torch.cat([as_rows(precise(t)) @ flat for _, t in self.tiles()])

    def dots(self, vectors: Tensor) -> Tensor:
        """Return ⟨gᵢ, vⱼ⟩ (n, d) for real `vectors` (d, *shape), in at least their dtype."""
        dtype = torch.promote_types(self.dtype, vectors.dtype)
        columns = as_rows(vectors).to(dtype).mT
        return torch.cat([as_rows(t).to(dtype) @ columns for _, t in self.tiles()])

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · Gᵢ · rightᵀ (n, a, b), with Gᵢ (r, c) the gradient as a matrix.

        Args:
            left: (a, r), real; r is the parameter's first axis.
            right: (b, c), real; c is all its other axes together.
        """
        dtype = torch.promote_types(self.dtype, left.dtype)
        rows, columns = left.to(dtype), right.to(dtype).mT
        size = (rows.shape[1], columns.shape[0])
        return torch.cat(
            [rows @ t.reshape(len(t), *size).to(dtype) @ columns for _, t in self.tiles()]
        )

    def gram(self) -> Tensor:
        """Return ⟨gᵢ, gⱼ⟩ (n, n), the second factor conjugated when complex."""
        return torch.cat(
            [
                torch.cat(
                    [as_rows(precise(a)) @ as_rows(precise(b)).mH for _, b in self.tiles()], 1
                )
                for _, a in self.tiles()
            ]
        )

    def finite(self) -> Tensor:
        """Return (n,), True where every entry of the sample's gradient is finite."""
        return torch.cat([as_rows(t).isfinite().all(1) for _, t in self.tiles()])

    def _reduced(self, fn: Callable[[Tensor], Tensor], weights: Tensor | None) -> Tensor:
        result: Tensor | None = None
        for part, tile in self.tiles():
            values = fn(tile)
            if weights is not None:
                values = values * over_samples(weights[part], values)
            result = values.sum(0) if result is None else result.add_(values.sum(0))
        assert result is not None  # a block holds at least one sample
        return result
