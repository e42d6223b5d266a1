"""Columns: one parameter's rows in one chain, dense or as factors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import h5py
import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Block, DenseBlock
from gradscope.config import Compression
from gradscope.storage.factors import KINDS, factor_dtype, factors_of, is_smaller
from gradscope.storage.formats import name_of, stored_dtype
from gradscope.storage.layout import Array, Shape, create, put_attribute, row_chunks
from gradscope.storage.names import escape
from gradscope.storage.plan import FilePlan, Layout
from gradscope.storage.scratch import Scratch
from gradscope.storage.stream import Stream

PART_BYTES = 2**23  # of dense rows made at a time: they are written while they are in the caches
_TEXT = h5py.string_dtype()
_HALVES = (torch.float16, torch.bfloat16)


class Column(Protocol):
    """A place for one parameter's rows."""

    def fits(self, block: Block) -> bool:
        """Whether the column can hold this block's rows."""

    def parts(self, block: Block) -> Iterator[tuple[Stream, Tensor]]:
        """Yield the block's rows and where they go, in order and in the stored format.

        Each part stays as it is until the next but one is asked for.
        """


@dataclass(frozen=True)
class DenseColumn:
    """Rows as they are: a data set (N, *shape)."""

    stream: Stream
    scratch: Scratch

    def fits(self, block: Block) -> bool:
        """Whether the shapes agree."""
        return block.shape == self.stream.shape[1:]

    def parts(self, block: Block) -> Iterator[tuple[Stream, Tensor]]:
        """Yield tile after tile; a dense block of the right format goes in one piece."""
        if isinstance(block, DenseBlock) and block.dtype == self.stream.dtype:
            yield self.stream, block.values
            return
        if block.dtype in _HALVES and not isinstance(block, DenseBlock):
            block = block.to(torch.float32)  # rounded once, and what overflows is counted
        together = self.stream.together
        row = max(1, prod(block.shape) * block.dtype.itemsize)
        step = max(1, PART_BYTES // row // together) * together
        for at in range(0, block.n, step):
            tile = self._dense(block.select(slice(at, at + step)))
            yield self.stream, _stored(tile, self.stream, self.scratch)

    def _dense(self, block: Block) -> Tensor:
        if isinstance(block, DenseBlock):
            return block.values
        return block.dense(self.scratch.take((block.n, *block.shape), block.dtype, block.device))


@dataclass(frozen=True)
class FactoredColumn:
    """Rows as factors: two data sets."""

    kind: str
    shape: Shape
    streams: Mapping[str, Stream]
    scratch: Scratch

    def fits(self, block: Block) -> bool:
        """Whether the block has factors of the same kind, sizes and nature (real, complex)."""
        found = factors_of(block)
        if found is None or found[0] != self.kind or block.shape != self.shape:
            return False
        return all(
            tuple(factor.shape[1:]) == self.streams[name].shape[1:]
            and factor.is_complex() == self.streams[name].dtype.is_complex
            for name, factor in found[1].items()
        )

    def parts(self, block: Block) -> Iterator[tuple[Stream, Tensor]]:
        """Yield the factors."""
        found = factors_of(block)
        assert found is not None  # it fits
        for name, factor in found[1].items():
            yield self.streams[name], _stored(factor, self.streams[name], self.scratch)


def arrays_of(
    block: Block,
    n: int,
    wanted: torch.dtype,
    layout: Layout,
    compression: Compression | None = None,
) -> tuple[str | None, dict[str, Array]]:
    """Return how a parameter's rows (N, ...) will be stored, by the first batch's block.

    Returns:
        The kind of factors and their arrays by name; or None, and the dense array under "".
    """
    dtype = stored_dtype(block.dtype, wanted)
    found = None if layout == "dense" else factors_of(block)  # patches need not be made
    if found is None or (layout == "auto" and not _saves(block, wanted)):
        return None, {"": rows_array((n, *block.shape), dtype, block.n, compression)}
    kind, factors = found
    return kind, {
        part: rows_array((n, *factor.shape[1:]), factor_dtype(factor, wanted), block.n, compression)
        for part, factor in factors.items()
    }


def create_column(chain: h5py.Group, name: str, block: Block, plan: FilePlan) -> None:
    """Create the place for a parameter's rows (N, ...), by the first batch's block."""
    kind, arrays = arrays_of(block, plan.n, plan.dtype, plan.layout, plan.compression)
    if kind is None:
        create_dense(chain, name, arrays[""])
    else:
        dtype = stored_dtype(block.dtype, plan.dtype)
        create_factors(chain, name, kind, block.shape, dtype, arrays)


def create_factors(
    chain: h5py.Group,
    name: str,
    kind: str,
    shape: Shape,
    dtype: torch.dtype,
    arrays: Mapping[str, Array],
) -> None:
    """Create the places for a parameter's factors; shape and dtype are those of the dense rows."""
    group = factors_group(chain, name, kind, shape, dtype)
    for part, array in arrays.items():
        create(group, part, array)


def factors_group(
    chain: h5py.Group, name: str, kind: str, shape: Shape, dtype: torch.dtype
) -> h5py.Group:
    """Create the group for a parameter's factors."""
    group = chain.create_group(escape(name))
    describe(group, name, "factored")
    group.attrs["kind"] = kind
    group.attrs["shape"] = np.array(shape, np.int64)
    group.attrs["dtype"] = name_of(dtype)
    return group


def create_dense(chain: h5py.Group, name: str, array: Array) -> h5py.Dataset:
    """Create the place for dense rows (N, *shape)."""
    dataset = create(chain, escape(name), array)
    describe(dataset, name, "dense")
    return dataset


def rows_array(
    shape: Shape, dtype: torch.dtype, batch: int, compression: Compression | None = None
) -> Array:
    """Return the array of rows (N, ...) that come `batch` at a time."""
    chunks = row_chunks(shape[0], batch, shape[1:], dtype.itemsize)
    return Array(shape, dtype, chunks, compression=compression)


def describe(item: h5py.HLObject, name: str, representation: str) -> None:
    """Record the parameter's own name, unless HDF5 text cannot hold it, and the structure."""
    if "\0" not in name and not any("\ud800" <= c <= "\udfff" for c in name):
        put_attribute(item, "name", np.array(name, object), _TEXT)
    put_attribute(item, "representation", np.array(representation, object), _TEXT)


def bind_column(
    file: h5py.File, path: str, streams: Mapping[str, Stream], scratch: Scratch
) -> Column:
    """Return the column at `path`, by the streams of its data sets."""
    if path in streams:
        return DenseColumn(streams[path], scratch)
    attributes = file[path].attrs
    kind, shape = str(attributes["kind"]), tuple(int(s) for s in attributes["shape"])
    own = {part: streams[f"{path}/{part}"] for part in KINDS[kind]}
    return FactoredColumn(kind, shape, own, scratch)


def _stored(values: Tensor, stream: Stream, scratch: Scratch) -> Tensor:
    """Return `values` in the stored format, having counted what it is too small for."""
    if values.dtype == stream.dtype:
        return values
    made = scratch.take(tuple(values.shape), stream.dtype, values.device).copy_(values)
    lost = int((made.isinf() & values.isfinite()).sum())
    stream.mark = replace(stream.mark, overflowed=stream.mark.overflowed + lost)
    return made


def _saves(block: Block, wanted: torch.dtype) -> bool:
    found = factors_of(block)
    return found is not None and is_smaller(block, found[1], wanted)
