"""What every block can do: from dense tiles where it knows no better way; and the dense block."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from math import inf, prod
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gradscope.core.precision import wider

# A tile stays near the caches, yet keeps the matrix kernels busy; glibc hands blocks of 32 MiB and
# more out as fresh pages every time, which cost five times as much. Sizes are fixed, not measured:
# sums are split by them, and the same run is to give the same last digits anywhere.
TILE_BYTES = 4 * 2**20
_LONG_ROW = 2**18  # bytes
_RUN = 1024  # numbers that are summed one after the other
_LONG_RUN = 2**13  # in products of matrices, which have many sums at a time
PIECE_BYTES = 8 * TILE_BYTES  # what meets a piece (a random matrix) is made anew for each


def precise(t: Tensor) -> Tensor:
    """Widen half precision to float32, so that squares neither overflow nor round away."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def squares(t: Tensor) -> Tensor:
    """Return |t|² elementwise, real also for complex `t`."""
    return (t * t.conj()).real if t.is_complex() else t * t


def as_rows(t: Tensor) -> Tensor:
    """Return (n, ...) as a matrix (n, entries), also where a sample is a single number."""
    return t.reshape(t.shape[0], prod(t.shape[1:]))


def squared_sizes(rows: Tensor) -> Tensor:
    """Return Σⱼ |rowsᵢⱼ|² (n,) of a matrix (n, entries), which is read once and not copied."""
    n, entries = rows.shape
    if entries < 2 * _RUN:
        whole: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return whole.square()
    count = entries // _RUN  # sums of many numbers one after the other lose digits
    runs, rest = rows[:, : count * _RUN].reshape(n, count, _RUN), rows[:, count * _RUN :]
    of_runs: Tensor = torch.linalg.vector_norm(runs, dim=2)
    return of_runs.square().sum(1) + squared_sizes(rest)


def inner(rows: Tensor, vector: Tensor) -> Tensor:
    """Return Σⱼ rowsᵢⱼ vⱼ (n,) of a matrix (n, entries) and a vector (entries,), in runs.

    One product of all would add number after number: of 10⁸ in float32, percents are lost.
    """
    n, entries = rows.shape
    count, at = entries // _LONG_RUN, entries // _LONG_RUN * _LONG_RUN
    if count < 16:  # it is exact enough, and faster
        return rows @ vector
    runs = rows[:, :at].reshape(n, count, _LONG_RUN).transpose(0, 1)
    of_runs = runs @ vector[:at].view(count, _LONG_RUN, 1)  # (count, n, 1)
    return of_runs.sum((0, 2)) + rows[:, at:] @ vector[at:]


def size(t: Tensor) -> Tensor:
    """Return the L2 norm of all entries together (0-d), in float32 at least."""
    return squared_sizes(precise(t).reshape(1, -1))[0].sqrt()


def over_samples(factors: Tensor, like: Tensor) -> Tensor:
    """Return `factors` (n,) with trailing axes and of a dtype to multiply `like` (n, ...) by."""
    both = torch.promote_types(like.dtype, factors.dtype)
    return factors.to(both if factors.is_complex() else like.dtype).reshape(
        -1, *[1] * (like.dim() - 1)
    )


def times(values: Tensor, factors: Tensor | None) -> Tensor:
    """Return `values` (n, ...) times a factor (n,) for each sample, if there are any."""
    return values if factors is None else values * over_samples(factors, values)


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


class Factors(NamedTuple):
    """What a block can be put together from again, by `from_factors`."""

    # "outer": left (n, k, t, r) and right (n, k, t, c); "scatter": index (n, t) int64 and rows
    # (n, t, d)
    kind: str
    tensors: dict[str, Tensor]  # by name, in this order
    shape: tuple[int, ...]  # the parameter's


class Block(ABC):
    """The per-sample gradients (n, *shape) of one parameter.

    Blocks are immutable: every operation returns a new block or a tensor. What an operation means
    is said here; a kind of block overrides those that its structure makes cheaper.

    Attributes:
        kind: Of its `factors`, or None where it has none.
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
        """Where the block's tensors are."""

    @property
    def dense_if_formed(self) -> Tensor | None:
        """The dense form (n, *shape) where it is in memory already; else None."""
        return None

    @property
    def sums_squares(self) -> bool:
        """Whether `squared_sum` forms no dense gradient."""
        return False

    @property
    def factored_size(self) -> int | None:
        """The entries of a sample's factors, found without making them; None if there are none."""
        return None

    def factors(self) -> Factors | None:
        """Return the factors of a block that has some, else None."""
        return None

    def terms(self) -> "tuple[Block, ...]":
        """Return the blocks that the block is the sum of: itself, unless it is a sum."""
        return (self,)

    def cross(self, other: "Block") -> Tensor | None:
        """Return Re⟨gᵢ, hᵢ⟩ (n,) with another block's rows where there is a shortcut, else None."""
        return None

    @abstractmethod
    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape), written into `out` if one is given."""

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
        """Yield (rows, dense gradients of these rows), a bounded number of bytes at a time."""
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
        """Return Σᵢ wᵢ gᵢ (*shape); all weights (n,) are 1 when none are given."""
        parts = ((precise(tile), rows) for rows, tile in self.tiles())
        return reduce(torch.Tensor.add_, (summed(*part, weights) for part in parts))

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ |gᵢ|² elementwise (*shape)."""
        parts = ((squares(precise(tile)), rows) for rows, tile in self.tiles())
        return reduce(torch.Tensor.add_, (summed(*part, weights) for part in parts))

    def sums(
        self, weights: Tensor | None = None, for_squares: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return Σᵢ wᵢ gᵢ and Σᵢ uᵢ |gᵢ|², both (*shape), for what one of them costs.

        Args:
            weights: w (n,), all 1 when none are given.
            for_squares: u (n,), likewise.
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
            ones = [1.0] * len(values)  # long rows, one by one: each is read once
            w, u = (ones if f is None else f[part].tolist() for f in (weights, for_squares))
            for row, a, b in zip(values, w, u, strict=True):
                first.add_(row, alpha=a)
                second.addcmul_(row, row, value=b)
        return first, second

    def dot(self, vector: Tensor) -> Tensor:
        """Return ⟨gᵢ, v⟩ (n,) for `vector` (*shape); conjugates the vector when complex."""
        flat = precise(vector.conj()).flatten()
        return torch.cat([flat[:0], *(inner(as_rows(precise(t)), flat) for _, t in self.tiles())])

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (samples, entries, values (m, w)): what is linear goes through all of them once.

        Laid into zeros (n, P) and added where they meet, they are the gradients, flattened. Each
        has a bounded number of bytes, and is valid until the next is asked for; all samples come
        together where the structure allows it.
        """
        for part in self._parts(PIECE_BYTES):
            yield part, slice(0, prod(self.shape)), as_rows(self.select(part).dense())

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · Gᵢ · rightᵀ (n, a, b), with Gᵢ (r, c) the gradient as a matrix.

        Args:
            left: (a, r), real; r is the parameter's first axes together.
            right: (b, c), real; c is all its other axes together.
        """
        dtype = torch.promote_types(self.dtype, left.dtype)
        rows, columns = left.to(dtype), right.to(dtype).mT
        (a, r), (c, b) = rows.shape, columns.shape
        from_left = a * c * (r + b) <= r * b * (c + a)  # multiplications

        def both(tile: Tensor) -> Tensor:
            if c == 1:  # one product for all samples, and no kernel for each of them
                return (tile.reshape(len(tile), r) @ rows.mT).unsqueeze(2) * columns
            matrices = tile.reshape(len(tile), r, c)
            return rows @ matrices @ columns if from_left else rows @ (matrices @ columns)

        return torch.cat([both(tile.to(dtype)) for _, tile in self.tiles()])

    def gram(self) -> Tensor:
        """Return ⟨gᵢ, gⱼ⟩ (n, n), the second factor conjugated when complex."""
        rows = []
        for _, a in self.tiles():
            left = as_rows(precise(a))
            rows.append(torch.cat([left @ as_rows(precise(b)).mH for _, b in self.tiles()], 1))
        return torch.cat(rows)

    def norm_bound(self) -> Tensor:
        """Return a number (0-d) that no ‖gᵢ‖ exceeds, found cheaply; infinite if there is none."""
        return torch.tensor(inf, device=self.device)

    def densify(self, always: bool = False) -> "Block":
        """Return the same gradients, dense where norms and then a weighted sum cost less so.

        Args:
            always: The dense gradients are needed besides, so that they cost nothing.
        """
        return self

    def _parts(self, size: int) -> Iterator[slice]:
        """Yield samples whose dense form has at most `size` bytes, or one sample."""
        row = max(1, prod(self.shape) * self.dtype.itemsize)
        # parts of nearly one size, all alike to plan; one of no sample where there is none
        count = max(1, -(-self.n // max(1, size // row)))
        for k in range(count):
            yield slice(self.n * k // count, self.n * (k + 1) // count)


def summed(values: Tensor, part: slice, weights: Tensor | None) -> Tensor:
    """Return Σᵢ wᵢ vᵢ (*shape) of the samples `part`; all weights are 1 when none are given."""
    return times(values, None if weights is None else weights[part]).sum(0)


def wide(block: Block) -> Block:
    """Cast a block to float64 or complex128, where its sums are then taken."""
    return block.to(wider(block.dtype, block.device))


@dataclass(frozen=True, eq=False)
class TensorBlock(Block):
    """A block of tensors (n, ...), which are its first fields."""

    numbers: ClassVar[tuple[str, ...]]  # names of the fields whose product is the gradient
    places: ClassVar[tuple[str, ...]] = ()  # names of those that say where it goes

    @property
    def shape(self) -> tuple[int, ...]:
        found: tuple[int, ...] = vars(self)["parameter_shape"]  # a field, or the tensors tell it
        return found

    @property
    def n(self) -> int:
        return len(getattr(self, self.numbers[0]))

    @property
    def dtype(self) -> torch.dtype:
        dtypes: Iterator[torch.dtype] = (getattr(self, name).dtype for name in self.numbers)
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
    """Gradients without structure, held as they are."""

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
