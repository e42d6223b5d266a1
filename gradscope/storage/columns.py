"""Writing blocks: a column is one parameter's rows in one chain, dense or as factors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Protocol

import h5py
import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Block, DenseBlock
from gradscope.blocks.base import TILE_BYTES
from gradscope.storage.factors import KINDS, factor_dtype, factors_of, is_smaller
from gradscope.storage.layout import (
    Shape,
    as_numpy,
    create,
    row_chunks,
    stored_dtype,
    write_rows,
)
from gradscope.storage.names import escape
from gradscope.storage.plan import Layout

Prepare = Callable[[h5py.Dataset, int, int], None]


class Column(Protocol):
    """A place for one parameter's rows."""

    def fits(self, block: Block) -> bool:
        """Whether the column can hold this block's rows."""

    def write(self, start: int, block: Block, prepare: Prepare) -> None:
        """Write the block's rows from row `start` on."""


@dataclass(frozen=True)
class DenseColumn:
    """Rows as they are: a data set (N, *shape)."""

    dataset: h5py.Dataset
    scratch: dict[torch.dtype, Tensor]

    def fits(self, block: Block) -> bool:
        """Whether the shapes agree."""
        return bool(block.shape == self.dataset.shape[1:])

    def write(self, start: int, block: Block, prepare: Prepare) -> None:
        """Write the rows tile by tile; a dense block of the right dtype goes in one piece."""
        prepare(self.dataset, start, start + block.n)
        for rows, tile in self._tiles(block):
            write_rows(self.dataset, start + rows.start, as_numpy(tile, self.dataset.dtype))

    def _tiles(self, block: Block) -> Iterator[tuple[slice, Tensor]]:
        if isinstance(block, DenseBlock) and as_numpy(block.values[:0]).dtype == self.dataset.dtype:
            yield slice(0, block.n), block.values
            return
        together = self.dataset.chunks[0] if self.dataset.chunks else 1
        row = max(1, prod(block.shape) * block.dtype.itemsize)
        step = max(1, TILE_BYTES // row // together) * together
        for at in range(0, block.n, step):
            part = block.select(slice(at, at + step))
            yield slice(at, at + part.n), part.dense(self._buffer(part))

    def _buffer(self, block: Block) -> Tensor | None:
        """Return memory (n, *shape) that is used again: fresh pages cost five times as much."""
        if isinstance(block, DenseBlock):
            return None
        size = block.n * prod(block.shape)
        held = self.scratch.get(block.dtype)
        if held is None or held.numel() < size or held.device != block.device:
            held = torch.empty(size, dtype=block.dtype, device=block.device)
            self.scratch[block.dtype] = held
        return held[:size].view(block.n, *block.shape)


@dataclass(frozen=True)
class FactoredColumn:
    """Rows as factors: a group of two data sets."""

    group: h5py.Group
    kind: str
    shape: Shape
    datasets: dict[str, h5py.Dataset]

    def fits(self, block: Block) -> bool:
        """Whether the block has factors of the same kind, sizes and nature (real, complex)."""
        found = factors_of(block)
        if found is None or found[0] != self.kind or block.shape != self.shape:
            return False
        return all(
            tuple(factor.shape[1:]) == self.datasets[name].shape[1:]
            and factor.is_complex() == (self.datasets[name].dtype.kind == "c")
            for name, factor in found[1].items()
        )

    def write(self, start: int, block: Block, prepare: Prepare) -> None:
        """Write the factors."""
        found = factors_of(block)
        assert found is not None  # it fits
        for name, factor in found[1].items():
            dataset = self.datasets[name]
            prepare(dataset, start, start + block.n)
            write_rows(dataset, start, as_numpy(factor, dataset.dtype))


def create_column(
    chain: h5py.Group, name: str, block: Block, n: int, wanted: np.dtype, layout: Layout
) -> None:
    """Create the place for a parameter's rows (N, ...), by the first batch's block."""
    dtype = stored_dtype(block.dtype, wanted)
    found = factors_of(block)
    if found is None or layout == "dense" or (layout == "auto" and not _saves(block, wanted)):
        create_dense(chain, name, (n, *block.shape), dtype, block.n)
        return
    kind, factors = found
    group = chain.create_group(escape(name))
    describe(group, name, "factored")
    group.attrs["kind"] = kind
    group.attrs["shape"] = np.array(block.shape, np.int64)
    group.attrs["dtype"] = dtype.name
    for part, factor in factors.items():
        row, format_ = tuple(factor.shape[1:]), factor_dtype(factor, wanted)
        create(group, part, (n, *row), format_, row_chunks(n, block.n, row, format_.itemsize))


def create_dense(
    chain: h5py.Group, name: str, shape: Shape, dtype: np.dtype, batch: int
) -> h5py.Dataset:
    """Create a data set (N, *shape) for rows that come `batch` at a time."""
    chunks = row_chunks(shape[0], batch, shape[1:], dtype.itemsize)
    dataset = create(chain, escape(name), shape, dtype, chunks)
    describe(dataset, name, "dense")
    return dataset


def describe(item: h5py.HLObject, name: str, representation: str) -> None:
    """Record the parameter's own name, unless HDF5 text cannot hold it, and the structure."""
    if "\0" not in name and not any("\ud800" <= c <= "\udfff" for c in name):
        item.attrs["name"] = name
    item.attrs["representation"] = representation


def bind_column(item: h5py.HLObject, scratch: dict[torch.dtype, Tensor]) -> Column:
    """Return the column that is there."""
    if isinstance(item, h5py.Dataset):
        return DenseColumn(item, scratch)
    kind = str(item.attrs["kind"])
    shape = tuple(int(s) for s in item.attrs["shape"])
    return FactoredColumn(item, kind, shape, {name: item[name] for name in KINDS[kind]})


def unwritten_chunks(dataset: h5py.Dataset, start: int, stop: int) -> Iterator[Shape]:
    """Yield the offsets of chunks that rows start:stop are the first to touch, but do not fill."""
    shape, chunks = (stop, *dataset.shape[1:]), dataset.chunks
    first = -(-start // chunks[0]) * chunks[0]
    axes = [range(0, s, c) for s, c in zip(shape[1:], chunks[1:], strict=True)]
    for offset in product(range(first, stop, chunks[0]), *axes):
        if any(o + c > s for o, c, s in zip(offset, chunks, shape, strict=True)):
            yield offset


def _saves(block: Block, wanted: np.dtype) -> bool:
    found = factors_of(block)
    return found is not None and is_smaller(block, found[1], wanted)
