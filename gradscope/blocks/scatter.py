"""Gradients with few nonzero entries: rows of a table (embeddings), or single entries."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from gradscope.blocks.base import (
    TILE_BYTES,
    Block,
    Factors,
    TensorBlock,
    p_norms,
    precise,
    size,
    squares,
    times,
)
from gradscope.process.memory import slices


@dataclass(frozen=True, eq=False)
class ScatterBlock(TensorBlock):
    """Rows added to a table (v, d): gᵢ[v, :] = Σₜ [index[i, t] = v] · rows[i, t, :]."""

    index: Tensor  # (n, t) int64, the row of the table
    rows: Tensor  # (n, t, d), the values added to it
    size: int  # v, the number of rows of the table
    numbers, places = ("rows",), ("index",)
    kind = "scatter"
    has_shortcuts = True
    sums_squares = True

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size, int(self.rows.shape[-1]))

    @property
    def factored_size(self) -> int:
        return prod(self.index.shape[1:]) + prod(self.rows.shape[1:])

    def factors(self) -> Factors:
        return Factors("scatter", {"index": self.index, "rows": self.rows}, self.shape)

    def cross(self, other: Block) -> Tensor | None:
        """Return Re⟨gᵢ, hᵢ⟩ (n,) with one group of outer products of the table's shape.

        The gradient of a tied embedding is a scatter plus an outer product. Row x of the scatter
        needs only the entry left[x] of the outer product, so no table is formed.
        """
        factors = other.factors() if other.kind == "outer" else None
        if factors is None:
            return None
        left, right = (precise(f) for f in factors.tensors.values())  # (n, k, t, v), (n, k, t, d)
        if left.shape[1] != 1 or (left.shape[3], right.shape[3]) != self.shape:
            return None
        index = self.index.unsqueeze(1).expand(-1, left.shape[2], -1)  # (n, t, s)
        met = torch.gather(left[:, 0], 2, index)  # the entry of left for each scattered row
        return (met * (right[:, 0] @ precise(self.rows).mH)).sum((1, 2)).real

    def dense(self, out: Tensor | None = None) -> Tensor:
        if out is not None and out.is_contiguous() and out.dtype == self.dtype:
            self.add_to(out.zero_())
            return out
        table = self.rows.new_zeros(self.n, *self.shape)
        self.add_to(table)
        return table if out is None else out.copy_(table)

    def add_to(self, out: Tensor) -> None:
        """Add the rows to the table `out` (n, v, d)."""
        if out.is_contiguous() and out.dtype == self.dtype:
            out.view(self.n * self.size, self.shape[1]).index_add_(
                0, self._flat, self.rows.flatten(0, 1)
            )
        else:
            super().add_to(out)

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,); rows with the same index are added before squaring."""
        samples, _, merged = self.merged
        norms = torch.zeros(self.n, dtype=squares(merged[:0]).dtype, device=self.device)
        return norms.index_add_(0, samples, squares(merged).sum(1))

    def norms(self, p: float = 2.0) -> Tensor:
        """Return ‖gᵢ‖ₚ (n,), from the touched rows only."""
        if p == 2:
            return super().norms(p)
        samples, _, merged = self.merged
        each = p_norms(merged, p)  # norms of rows (m,), arranged in one table row per sample:
        first = torch.searchsorted(samples, samples)
        place = torch.arange(len(samples), device=self.device) - first
        width = int(place.max()) + 1 if len(place) else 0
        table = torch.zeros(self.n, width, dtype=each.dtype, device=self.device)
        return p_norms(table.index_put_((samples, place), each), p)

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        rows = times(precise(self.rows), weights)
        return _added(self.size, self.index.flatten(), rows.flatten(0, 1))

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        samples, index, merged = self.merged
        own = None if weights is None else weights[samples]
        return _added(self.size, index, times(squares(merged), own))

    def norm_bound(self) -> Tensor:
        """Return √t times the norm of all rows: at most t rows have the same index."""
        most: float = max(1, self.rows.shape[1]) ** 0.5
        return size(self.rows) * most

    def dot(self, vector: Tensor) -> Tensor:
        return (precise(vector.conj())[self.index] * precise(self.rows)).sum((1, 2))

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield some rows of the table at a time, for all samples; untouched rows are skipped."""
        width = self.shape[1]
        samples = torch.arange(self.n, device=self.device).unsqueeze(1).expand_as(self.index)
        for touched in slices(self.size, self.n * width * self.dtype.itemsize, TILE_BYTES):
            first, last = touched.start, touched.stop
            inside = (self.index >= first) & (self.index < last)
            if not bool(inside.any()):
                continue
            place = samples[inside] * (last - first) + self.index[inside] - first
            band = _added(self.n * (last - first), place, self.rows[inside])
            yield slice(0, self.n), slice(first * width, last * width), band.view(self.n, -1)

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · Gᵢ · rightᵀ (n, a, b) without the table."""
        dtype = torch.promote_types(self.dtype, left.dtype)
        rows = left.to(dtype).mT[self.index]  # (n, t, a)
        return rows.mT @ (self.rows.to(dtype) @ right.to(dtype).mT)

    @cached_property
    def merged(self) -> tuple[Tensor, Tensor, Tensor]:
        """The touched rows, each once: sample (m,), table row (m,), summed gradient (m, d)."""
        keys, place = torch.unique(self._flat, return_inverse=True)
        rows = _added(len(keys), place, precise(self.rows).flatten(0, 1))
        return keys // self.size, keys % self.size, rows

    @property
    def _flat(self) -> Tensor:
        """The position (n·t,) of each row in the concatenated tables of all samples."""
        offset = torch.arange(self.n, device=self.device).unsqueeze(1) * self.size
        return (offset + self.index).flatten()


def _added(size: int, index: Tensor, rows: Tensor) -> Tensor:
    """Return a table (size, d) of zeros with `rows` (m, d) added at `index` (m,)."""
    table = torch.zeros(size, rows.shape[-1], dtype=rows.dtype, device=rows.device)
    return table.index_add_(0, index, rows)


@dataclass(frozen=True, eq=False)
class SparseBlock(TensorBlock):
    """gᵢ has values[i, s] at the positions index[i, s], and zeros elsewhere."""

    # (n, s) int64, positions in the flattened parameter; unique within a sample, except for
    # padding, whose value is 0
    index: Tensor
    values: Tensor  # (n, s)
    parameter_shape: tuple[int, ...]  # the parameter's shape
    numbers, places = ("values",), ("index",)

    def dense(self, out: Tensor | None = None) -> Tensor:
        table = self.values.new_zeros(self.n, prod(self.shape))
        dense = table.scatter_add_(1, self.index, self.values).view(self.n, *self.shape)
        return dense if out is None else out.copy_(dense)

    def squared_norms(self) -> Tensor:
        return squares(precise(self.values)).sum(1)

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        return self._added(precise(self.values), weights)

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        return self._added(squares(precise(self.values)), weights)

    def dot(self, vector: Tensor) -> Tensor:
        return (precise(self.values) * precise(vector.conj()).flatten()[self.index]).sum(1)

    def _added(self, values: Tensor, weights: Tensor | None) -> Tensor:
        """Return Σᵢ wᵢ of the values (n, s), placed at their positions (*shape)."""
        table, values = values.new_zeros(prod(self.shape)), times(values, weights)
        return table.index_add_(0, self.index.flatten(), values.flatten()).view(self.shape)
