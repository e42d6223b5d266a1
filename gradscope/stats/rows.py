"""Sums over the stored rows of a file, parameter by parameter, in float64."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradscope.blocks import Block, DenseBlock, joined, wide
from gradscope.blocks.base import as_rows
from gradscope.process.memory import slices
from gradscope.stats.records import Floats, Mask, Positions, number
from gradscope.storage import stored_gradients

SKETCH = 16  # numbers for each sample, to find near duplicates
_PIECE = 2**24  # bytes of rows multiplied at a time
_NOISELESS = 1e-12  # a variance below this share of E[g²] is a rounding error


@dataclass(frozen=True)
class Limits:
    """The bytes of a parameter's rows in memory at a time."""

    tile: int = 2**20  # bytes, small enough for caches
    # rows with more bytes in all are summed in their own precision, in short sums that are added
    # in float64, so that rounding errors average out
    long: int = 2**28
    long_tile: int = 2**25  # bytes of these rows: many rows for each addition in float64

    def as_stored(self, array: Any) -> bool:
        """Whether the rows of an array (N, *shape) are summed in their own precision."""
        real = np.empty(0, array.dtype).real.dtype
        return prod(array.shape) * array.dtype.itemsize > self.long and real.itemsize >= 4


def row_blocks(array: Any, rows: Positions, limits: Limits) -> Iterator[tuple[slice, Block]]:
    """Yield the rows `rows` (n,) of an array (N, *shape) in blocks, with their places in `rows`.

    A complex number becomes two entries: (*shape, 2). A block is in float64, unless the array is so
    large that its rows are summed in their own precision.
    """
    as_stored, at = limits.as_stored(array), 0
    size = limits.long_tile if as_stored else limits.tile
    for _, gradients in stored_gradients({"": array}, rows, size):
        block = gradients[""]
        if block.dtype.is_complex:
            block = DenseBlock(_real(block.dense()))
        yield slice(at, at + block.n), block if as_stored else wide(block)
        at += block.n


def flat(values: NDArray[Any]) -> Floats:
    """Return an array (*shape) as a real row (w,) in float64."""
    row: Floats = _real(torch.as_tensor(values)).double().flatten().numpy()
    return row


def mean_row(array: Any, rows: Positions) -> Floats:
    """Return the mean of some rows (n,) of an array, real (w,) and in float64."""
    sums = (block.weighted_sum().double() for _, block in row_blocks(array, rows, Limits()))
    return flat((sum(sums, torch.zeros(())) / len(rows)).numpy())


@dataclass(frozen=True)
class Entries:
    """Signal and noise of the entries of a parameter."""

    noisy: int  # the number of entries that vary
    noiseless: int  # the number of entries that do not vary
    signal: float  # Σⱼ Gⱼ² / Varⱼ over the entries that vary

    @classmethod
    def of(cls, mean: Floats, second: Floats) -> "Entries":
        """Sum over entries with E[g] `mean` and E[g²] `second`, both of one shape."""
        square = np.square(mean)
        variance = second - square
        noisy = variance > _NOISELESS * second
        signal = float((square[noisy] / variance[noisy]).sum())
        return cls(int(noisy.sum()), int(noisy.size - noisy.sum()), signal)

    @property
    def mean_ratio(self) -> float | None:
        """The mean over the noisy entries of Gⱼ² / (E[gⱼ²] − Gⱼ²)."""
        return number(self.signal / self.noisy) if self.noisy else None


@dataclass(frozen=True)
class Totals:
    """Statistics of one parameter from its rows."""

    mean_square: float  # mean‖gᵢ‖²
    mean_squared: float  # ‖G‖²
    opposing: float  # the share of samples with ⟨gᵢ, G⟩ < 0
    entries: Entries


class RowSums:
    """Sums over parameters for n samples; `add` adds the rows of one parameter.

    Args:
        rows: The samples' rows in the file (n,).
        among: Which of the samples are compared pairwise (n,).
        classes: The class of each sample (n,), for sums by class.
        place: The sample whose products with each sample are computed, if any.
        limits: Memory limits.
    """

    def __init__(
        self,
        rows: Positions,
        among: Mask,
        classes: Positions | None,
        place: int | None,
        limits: Limits,
    ) -> None:
        n, m = len(rows), int(among.sum())
        self._rows, self._limits = rows, limits
        self._among, self._place = torch.from_numpy(among), place
        self._classes = torch.from_numpy(np.zeros(n, np.int64) if classes is None else classes)
        self._count = int(self._classes.max()) + 1  # k
        self.squares = torch.zeros(n, dtype=torch.float64)  # ‖gᵢ‖²
        self.dots = torch.zeros_like(self.squares)  # ⟨gᵢ, G⟩
        self.probed = torch.zeros_like(self.squares)  # ⟨gᵢ, g⟩ with the sample at `place`
        self.gram = torch.zeros(m, m, dtype=torch.float64)  # ⟨gᵢ, gⱼ⟩ of the samples in `among`
        self.group_squares = torch.zeros(self._count, dtype=torch.float64)  # ‖G_c‖² of each class
        self.sketch = torch.zeros(n, SKETCH, dtype=torch.float64)  # a random projection

    def add(self, name: str, array: Any, mean: NDArray[Any] | None) -> Totals:
        """Add the rows (N, *shape) of a parameter. `mean` (*shape) need not be exact."""
        walk = partial(row_blocks, array, limits=self._limits)
        probe = known = None
        if self._place is not None:
            _, block = next(walk(self._rows[self._place : self._place + 1]))
            probe = block.dense()[0]
        if mean is not None and self._limits.as_stored(array):  # its rounding error does not matter
            known = _real(torch.as_tensor(mean))
        sketch, dots = _Sketch(name), torch.zeros_like(self.dots)
        sums: Tensor | None = None
        squares, picked = torch.zeros((), dtype=torch.float64), list[Block]()
        for places, block in walk(self._rows):
            if not block.sums_squares and block.dense_if_formed is None:
                block = DenseBlock(block.dense())  # the squares need dense rows
            if sums is None:
                sums = torch.zeros(self._count, *block.shape, dtype=torch.float64)
            self.squares[places] += block.squared_norms()
            squares = squares + self._add_sums(sums, block, self._classes[places])
            sketch.add(self.sketch[places], block)
            if probe is not None:
                self.probed[places] += block.dot(probe)
            if known is not None:
                dots[places] += block.dot(known.to(block.dtype))
            picked.append(block.select(self._among[places]))
        assert sums is not None  # there is a sample
        average = sums.sum(0) / len(self._rows)
        if known is None:
            for places, block in walk(self._rows):
                dots[places] += block.dot(average.to(block.dtype))
        self.dots += dots
        self.gram += _gram(picked)
        sizes = torch.bincount(self._classes)
        self.group_squares += as_rows(sums).square().sum(1) / sizes.square()
        return Totals(
            mean_square=float(squares.sum()) / len(self._rows),
            mean_squared=float(average.square().sum()),
            opposing=float((dots < 0).double().mean()),
            entries=Entries.of(
                average.flatten().numpy(), (squares / len(self._rows)).flatten().numpy()
            ),
        )

    def _add_sums(self, sums: Tensor, block: Block, classes: Tensor) -> Tensor:
        """Add a block's rows to the sums (k, *shape) of their classes; return Σ g² (*shape)."""
        if self._count == 1:
            total, squares = block.sums()
            sums[0] += total
            return squares
        for one in np.unique(classes.numpy()).tolist():
            sums[one] += block.select(classes == one).weighted_sum()
        return block.squared_sum()


def _gram(blocks: list[Block]) -> Tensor:
    """Return ⟨gᵢ, gⱼ⟩ (m, m) of all samples of some blocks, in float64."""
    if all(block.dense_if_formed is None for block in blocks):
        return joined(blocks, torch.arange(sum(block.n for block in blocks))).gram()
    rows = [as_rows(block.dense()) for block in blocks]
    found: Any = 0.0
    for part in slices(rows[0].shape[1], 8 * sum(map(len, rows)), _PIECE):
        piece = torch.cat([values[:, part].double() for values in rows]).numpy()
        found = found + piece @ piece.T  # NumPy computes one half only
    return torch.as_tensor(found)


class _Sketch:
    """A random projection of rows of one parameter to `SKETCH` numbers.

    Each number is a sum of neighbouring entries with random signs.
    """

    def __init__(self, name: str) -> None:
        self._random = np.random.default_rng(crc32(name.encode("utf-8", "surrogatepass")))
        self._first = int(self._random.integers(SKETCH))
        self._signs = torch.empty(0)

    def add(self, out: Tensor, block: Block) -> None:
        """Add the projections of a block's rows to `out` (n, SKETCH)."""
        width = prod(block.shape)
        if len(self._signs) != width:
            signs = self._random.integers(0, 2, width, dtype=np.int8) * 2 - 1
            self._signs = torch.from_numpy(signs).to(block.dtype)
        step = max(SKETCH, -(-width // SKETCH))
        for samples, entries, values in block.pieces():
            for start in range(entries.start // step * step, entries.stop, step):
                inside = slice(max(start, entries.start), min(start + step, entries.stop))
                part = values[:, inside.start - entries.start : inside.stop - entries.start]
                bucket = (self._first + start // step) % SKETCH
                out[samples, bucket] += part @ self._signs[inside]


def _real(values: Tensor) -> Tensor:
    """Return real numbers, or (..., 2) for complex ones."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
