"""The operations of every block, by default from dense tiles; and the dense block."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from math import inf, prod
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gradscope.core.precision import wider

# A tile fits into or near the caches, yet keeps the matrix kernels busy. glibc returns blocks of
# 32 MiB and more as fresh pages each time, which take five times as long. The sizes are fixed, not
# measured: they decide how sums are split, and a run must give the same last digits everywhere.
TILE_BYTES = 4 * 2**20
_LONG_ROW = 2**18  # bytes
_RUN = 1024  # numbers that are summed one after another
_NARROW = 16  # entries of rows for which a product with ones is two to three times faster
_LONG_RUN = 2**13  # in matrix products, which compute many sums at once
PIECE_BYTES = 8 * TILE_BYTES  # a random matrix that multiplies pieces is drawn again for each piece


def precise(t: Tensor) -> Tensor:
    """Cast half precision to float32, so that squares neither overflow nor underflow."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def squares(t: Tensor) -> Tensor:
    """Return |t|² elementwise, real also for complex `t`."""
    return (t * t.conj()).real if t.is_complex() else t * t


def as_rows(t: Tensor) -> Tensor:
    """Return (n, ...) as a matrix (n, entries); a single number per sample gives one entry."""
    return t.reshape(t.shape[0], prod(t.shape[1:]))


def squared_sizes(rows: Tensor) -> Tensor:
    """Return Σⱼ |rowsᵢⱼ|² (n,) of a matrix (n, entries), in one read and without a copy."""
    n, entries = rows.shape
    if 1 < entries <= _NARROW and rows.device.type == "cpu":
        found = squares(rows)
        return found @ found.new_ones(entries)
    if entries < 2 * _RUN:
        whole: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return whole.square()
    count = entries // _RUN  # a long sequential sum loses digits
    runs, rest = rows[:, : count * _RUN].reshape(n, count, _RUN), rows[:, count * _RUN :]
    of_runs: Tensor = torch.linalg.vector_norm(runs, dim=2)
    return of_runs.square().sum(1) + squared_sizes(rest)


def inner(rows: Tensor, vector: Tensor) -> Tensor:
    """Return Σⱼ rowsᵢⱼ vⱼ (n,) of a matrix (n, entries) and a vector (entries,), in runs.

    A single product would add all numbers in sequence. For 10⁸ numbers in float32, its error is
    several percent.
    """
    n, entries = rows.shape
    count, at = entries // _LONG_RUN, entries // _LONG_RUN * _LONG_RUN
    if count < 16:  # exact enough, and faster
        return rows @ vector
    runs = rows[:, :at].reshape(n, count, _LONG_RUN).transpose(0, 1)
    of_runs = runs @ vector[:at].view(count, _LONG_RUN, 1)  # (count, n, 1)
    return of_runs.sum((0, 2)) + rows[:, at:] @ vector[at:]


def size(t: Tensor) -> Tensor:
    """Return the L2 norm of all entries (0-d), computed in float32 or wider."""
    return squared_sizes(precise(t).reshape(1, -1))[0].sqrt()


def over_samples(factors: Tensor, like: Tensor) -> Tensor:
    """Return `factors` (n,) with trailing axes and a dtype for the product with `like` (n, ...)."""
    both = torch.promote_types(like.dtype, factors.dtype)
    return factors.to(both if factors.is_complex() else like.dtype).reshape(
        -1, *[1] * (like.dim() - 1)
    )


def times(values: Tensor, factors: Tensor | None) -> Tensor:
    """Return `values` (n, ...) times a factor (n,) for each sample; unchanged without factors."""
    return values if factors is None else values * over_samples(factors, values)


def p_norms(rows: Tensor, p: float) -> Tensor:
    """Return ‖rowᵢ‖ₚ (n,) of a matrix (n, entries), without overflow of large entries."""
    sizes = rows.abs()
    if sizes.shape[1] == 0:
        return sizes.sum(1)
    top = sizes.amax(1)
    if p == inf:
        return top
    by = torch.where((top > 0) & top.isfinite(), top, 1.0)
    return by * (sizes / by.unsqueeze(1)).pow(p).sum(1).pow(1 / p)


class Factors(NamedTuple):
    """The tensors from which `from_factors` can rebuild a block."""

    # "outer": left (n, k, t, r) and right (n, k, t, c); "scatter": index (n, t) int64 and rows
    # (n, t, d)
    kind: str
    tensors: dict[str, Tensor]  # by name, in this order
    shape: tuple[int, ...]  # the parameter's


class Block(ABC):
    """The per-sample gradients (n, *shape) of one parameter.

    Blocks are immutable: every operation returns a new block or a tensor. This class documents the
    operations. A subclass overrides operations that its structure makes cheaper.

    Attributes:
        kind: The kind of its `factors`, or None.
        has_shortcuts: Whether norms and sums are cheaper than the dense form.
    """

    kind: ClassVar[str | None] = None
    has_shortcuts: ClassVar[bool] = False

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
        """The device of the block's tensors."""

    @property
    def dense_if_formed(self) -> Tensor | None:
        """The dense form (n, *shape) if it is already in memory, else None."""
        return None

    @property
    def sums_squares(self) -> bool:
        """Whether `squared_sum` works without dense gradients."""
        return False

    @property
    def factored_size(self) -> int | None:
        """The number of entries of a sample's factors, computed without them, or None."""
        return None

    def factors(self) -> Factors | None:
        """Return the factors of the block, or None."""
        return None

    def terms(self) -> "tuple[Block, ...]":
        """Return the summands if the block is a sum, else the block alone."""
        return (self,)

    def cross(self, other: "Block") -> Tensor | None:
        """Return Re⟨gᵢ, hᵢ⟩ (n,) with the rows of another block, or None without a shortcut."""
        return None

    @abstractmethod
    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape), written into `out` if given."""

    def add_to(self, out: Tensor) -> None:
        """Add the gradients to `out` (n, *shape)."""
        out.add_(self.dense())

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
        return DenseBlock(self.dense().reshape(self.n, *shape))

    def transpose(self, axis0: int, axis1: int) -> "Block":
        """Swap two axes of the parameter, counted without the sample axis."""
        if not self.shape:
            return self
        moved = [axis % len(self.shape) + 1 for axis in (axis0, axis1)]
        return DenseBlock(self.dense().transpose(*moved))

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, dense gradients of these rows); the size of a tile is bounded."""
        for part in self._parts(TILE_BYTES):
            yield part, self.select(part).dense()

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,)."""
        return torch.cat([squared_sizes(as_rows(precise(t))) for _, t in self.tiles()])

    def norms(self, p: float = 2.0) -> Tensor:
        """Return ‖gᵢ‖ₚ (n,), p > 0; the largest magnitude for p = inf."""
        if p == 2:
            return self.squared_norms().sqrt()
        return torch.cat([p_norms(as_rows(precise(t)), p) for _, t in self.tiles()])

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ gᵢ (*shape); all weights (n,) are 1 if not given."""
        parts = ((precise(tile), rows) for rows, tile in self.tiles())
        return reduce(torch.Tensor.add_, (summed(*part, weights) for part in parts))

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ |gᵢ|² elementwise (*shape)."""
        found: Tensor | None = None
        for rows, tile in self.tiles():
            own = squares(precise(tile))
            del tile  # one sample of a large parameter takes much memory
            one = len(own) == 1 and weights is None
            part = own[0] if one else summed(own, rows, weights)
            found = part if found is None else found.add_(part)
        assert found is not None  # there is at least one tile
        return found

    def sums(
        self, weights: Tensor | None = None, for_squares: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return Σᵢ wᵢ gᵢ and Σᵢ uᵢ |gᵢ|², both (*shape), in one pass.

        Args:
            weights: w (n,), all 1 if not given.
            for_squares: u (n,), all 1 if not given.
        """
        if self.sums_squares:
            return self.weighted_sum(weights), self.squared_sum(for_squares)
        dtype = precise(torch.empty(0, dtype=self.dtype)).dtype
        first = torch.zeros(self.shape, dtype=dtype, device=self.device)
        second = torch.zeros_like(first.real if dtype.is_complex else first)
        for part, tile in self.tiles():
            values = precise(tile)
            length = values[:1].numel() * values.element_size()
            if values.device.type != "cpu" or values.is_complex() or length < _LONG_ROW:
                first += summed(values, part, weights)
                second += summed(squares(values), part, for_squares)
                continue
            ones = [1.0] * len(values)  # long rows: one by one, so that each is read once
            w, u = (ones if f is None else f[part].tolist() for f in (weights, for_squares))
            for row, a, b in zip(values, w, u, strict=True):
                first.add_(row, alpha=a)
                second.addcmul_(row, row, value=b)
        return first, second

    def dot(self, vector: Tensor) -> Tensor:
        """Return ⟨gᵢ, v⟩ (n,) for `vector` (*shape); a complex vector is conjugated."""
        flat = precise(vector.conj()).flatten()
        return torch.cat([flat[:0], *(inner(as_rows(precise(t)), flat) for _, t in self.tiles())])

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (samples, entries, values (m, w)): pieces of the gradients, for linear operations.

        Added into zeros (n, P), the pieces give the flattened gradients. A piece has a bounded size
        and is valid until the next is requested. It has all samples if the structure allows it.
        """
        for part in self._parts(PIECE_BYTES):
            yield part, slice(0, prod(self.shape)), as_rows(self.select(part).dense())

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · Gᵢ · rightᵀ (n, a, b), with Gᵢ (r, c) the gradient as a matrix.

        Args:
            left: (a, r), real; r is the parameter's first axes together.
            right: (b, c), real; c is all other axes of the parameter together.
        """
        dtype = torch.promote_types(self.dtype, left.dtype)
        rows, columns = left.to(dtype), right.to(dtype).mT
        (a, r), (c, b) = rows.shape, columns.shape
        from_left = a * c * (r + b) <= r * b * (c + a)  # multiplications

        def both(tile: Tensor) -> Tensor:
            if c == 1:  # one product for all samples, instead of one kernel each
                return (tile.reshape(len(tile), r) @ rows.mT).unsqueeze(2) * columns
            matrices = tile.reshape(len(tile), r, c)
            return rows @ matrices @ columns if from_left else rows @ (matrices @ columns)

        return torch.cat([both(tile.to(dtype)) for _, tile in self.tiles()])

    def gram(self) -> Tensor:
        """Return ⟨gᵢ, gⱼ⟩ (n, n); the second factor is conjugated if complex."""
        rows = []
        for _, a in self.tiles():
            left = as_rows(precise(a))
            rows.append(torch.cat([left @ as_rows(precise(b)).mH for _, b in self.tiles()], 1))
        return torch.cat(rows)

    def norm_bound(self) -> Tensor:
        """Return a cheap upper bound (0-d) on all ‖gᵢ‖; infinite if unknown."""
        return torch.tensor(inf, device=self.device)

    def densify(self, always: bool = False) -> "Block":
        """Return the same gradients, as a dense block if that makes norms plus a sum cheaper.

        Args:
            always: The dense gradients are needed in any case, so they cost nothing extra.
        """
        return self

    def _parts(self, size: int) -> Iterator[slice]:
        """Yield samples whose dense form has at most `size` bytes; at least one sample each."""
        row = max(1, prod(self.shape) * self.dtype.itemsize)
        # equal parts, so that they share one plan; one empty part if there are no samples
        count = max(1, -(-self.n // max(1, size // row)))
        for k in range(count):
            yield slice(self.n * k // count, self.n * (k + 1) // count)


def summed(values: Tensor, part: slice, weights: Tensor | None) -> Tensor:
    """Return Σᵢ wᵢ vᵢ (*shape) of the samples `part`; all weights are 1 if not given."""
    return times(values, None if weights is None else weights[part]).sum(0)


def wide(block: Block) -> Block:
    """Cast a block to float64 or complex128, for precise sums."""
    return block.to(wider(block.dtype, block.device))


@dataclass(frozen=True, eq=False)
class TensorBlock(Block):
    """A block whose first fields are tensors (n, ...)."""

    numbers: ClassVar[tuple[str, ...]]  # names of the fields whose product is the gradient
    places: ClassVar[tuple[str, ...]] = ()  # names of the fields that say where it goes

    @property
    def shape(self) -> tuple[int, ...]:
        # a field; other subclasses derive the shape
        found: tuple[int, ...] = vars(self)["parameter_shape"]
        return found

    @property
    def n(self) -> int:
        return len(getattr(self, self.numbers[0]))

    @property
    def dtype(self) -> torch.dtype:
        dtypes: set[torch.dtype] = {getattr(self, name).dtype for name in self.numbers}
        return reduce(torch.promote_types, dtypes)

    @property
    def device(self) -> torch.device:
        found: torch.device = getattr(self, self.numbers[0]).device
        return found

    def select(self, rows: slice | Tensor) -> Self:
        own = (*self.numbers, *self.places)
        return replace(self, **{name: getattr(self, name)[rows] for name in own})

    def to(self, dtype: torch.dtype) -> Self:
        return replace(self, **{name: getattr(self, name).to(dtype) for name in self.numbers})

    def scale(self, factors: Tensor) -> Self:
        last = self.numbers[-1]
        return replace(self, **{last: times(getattr(self, last), factors)})


@dataclass(frozen=True, eq=False)
class DenseBlock(TensorBlock):
    """Gradients without structure, stored densely."""

    values: Tensor  # (n, *shape)
    numbers = ("values",)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    @property
    def dense_if_formed(self) -> Tensor:
        return self.values

    def dense(self, out: Tensor | None = None) -> Tensor:
        return self.values if out is None else out.copy_(self.values)

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        yield slice(0, self.n), slice(0, prod(self.shape)), as_rows(self.values)

    def norm_bound(self) -> Tensor:
        return size(self.values)

    def squared_norms(self) -> Tensor:
        return squared_sizes(as_rows(precise(self.values)))

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        values = precise(self.values)
        if weights is None:
            return values[0] if self.n == 1 else values.sum(0)
        return (weights.to(values.dtype) @ as_rows(values)).reshape(self.shape)
