"""Regions write the rows of a data set batch by batch and split them into its chunks.

On the disk, a chunk is either missing or whole. Rows that do not fill a chunk yet stay in memory
and are saved with the journal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import h5py
import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from gradscope.blocks import Block
from gradscope.blocks.base import TILE_BYTES
from gradscope.errors import OutputError
from gradscope.storage.format.files import reading, write, writing
from gradscope.storage.format.layout import (
    DENSE,
    KINDS,
    RECORD,
    TABLES,
    ChunkOffsets,
    Shape,
    datasets,
)
from gradscope.storage.format.numbers import as_bytes, escape, format_of, unescape
from gradscope.storage.format.seal import NO_RECORDS, Checks
from gradscope.storage.plan import FinishedBatch
from gradscope.storage.write.target import Target

PART_BYTES = 2**23  # size of the dense rows formed at a time; they should fit into the CPU caches
ASIDE = "replaced"  # the group for factors replaced by dense rows, until the file is complete

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Mark:
    """The progress of a region."""

    position: int = 0  # the bytes added so far
    # (m,) uint8, the last added bytes, which do not fill a chunk yet
    tail: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    overflowed: int = 0  # the count of finite numbers that are too large for the stored format
    sum: int = 0  # the CRC-32C of the added bytes, if storage is contiguous


class Region:
    """One data set (N, *shape), written sequentially."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self.path = str(dataset.name)
        self.shape: Shape = tuple(int(s) for s in dataset.shape)
        self.dtype: torch.dtype = format_of(dataset)
        self.chunks = ChunkOffsets.of(dataset)
        self.mark = Mark()  # the progress; set an earlier mark to go back
        self.table = np.zeros((self.chunks.count, RECORD), np.int64)  # offset, size, CRC-32C
        self.table[: len(self.chunks.offsets), :2] = self.chunks.extents
        self.row = self.chunks.size // self.shape[0] if self.shape and self.shape[0] else 0  # bytes

    def step(self, size: int, row: int = 0) -> int:
        """Return the number of rows of `row` bytes in about `size` bytes, in whole chunks."""
        together = max(1, self.chunks.chunk // max(1, self.row))
        return max(1, size // max(1, row or self.row) // together) * together

    @property
    def extents(self) -> np.ndarray:
        """Offset and size of all allocated chunks, (m, 2) int64."""
        return self.table[self.table[:, 1] > 0, :2]

    def add(self, values: Tensor, target: Target) -> None:
        """Add the next rows (n, *shape) in the stored format, and write the chunks they fill."""
        data, mark = as_bytes(values), self.mark
        if not (self.chunks.checked or self.chunks.packed):
            sum_ = crc32c(data.data, mark.sum)
            if len(data):
                place = int(self.chunks.offsets[0]) + mark.position
                write(target.descriptor, data.data, place)
            self.mark = replace(mark, position=mark.position + len(data), sum=sum_)
            return
        position, tail = mark.position, mark.tail
        whole: list[tuple[int, np.ndarray]] = []
        while len(data):
            room = self.chunks.room(position)
            part, data = data[:room], data[room:]
            joined = np.concatenate([tail, part]) if len(tail) else part
            if len(part) == room:
                whole.append((position - len(tail), joined))
                tail = joined[:0]
            else:
                tail = joined.copy()
            position += len(part)
        self._write(whole, target)
        self.mark = replace(mark, position=position, tail=tail)

    def write_tail(self, target: Target) -> None:
        """Write the tail, which does not fill a chunk yet, so that it can be read."""
        if len(self.mark.tail):
            start = self.mark.position - len(self.mark.tail)
            self._write([(start, self.mark.tail)], target)

    def records(self, mark: Mark, *, tail: bool = False) -> np.ndarray:
        """Return offset, size and CRC-32C of the complete chunks at a mark, (k, 3) int64."""
        if not mark.position:
            return NO_RECORDS
        if not (self.chunks.checked or self.chunks.packed):
            return np.array([[self.chunks.offsets[0], mark.position, mark.sum]], np.int64)
        count = self.chunks.number(mark.position - len(mark.tail))
        return self.table[: count + (tail and len(mark.tail) > 0)]

    def start_at(self, mark: Mark, records: np.ndarray) -> None:
        """Continue from a mark; `records` (m, 3) has the complete chunks, sorted by offset."""
        known = np.append(records, [[np.iinfo(np.int64).max, 0, 0]], 0)
        found = known[np.searchsorted(records[:, 0], self.table[:, 0])]
        self.table[:, 2] = np.where(found[:, 0] == self.table[:, 0], found[:, 2], 0)
        whole = int(self.table[0, 2]) if len(self.table) == 1 else 0
        self.mark = replace(mark, sum=whole)

    def _write(self, chunks: Sequence[tuple[int, np.ndarray]], target: Target) -> None:
        """Write chunks, given as (first byte in the data set, data)."""
        numbers = [self.chunks.number(start) for start, _ in chunks]
        if self.chunks.packed:
            for number, (start, data) in zip(numbers, chunks, strict=True):
                self.table[number] = target.pack_chunk(self.path, start, data)
        elif chunks:
            places = self.table[numbers, :2]
            self.table[numbers, 2] = target.write_chunks(places, [data for _, data in chunks])


def copy_rows(
    item: h5py.HLObject, checks: Checks, region: Region, n: int, target: Target, path: Path
) -> None:
    """Copy n rows of a data set, or of factors as dense rows, into a region of the file `path`."""
    step = region.step(TILE_BYTES)
    for start in range(0, n, step):
        stop = min(start + step, n)
        with reading(f"{item.file.filename}: {item.name}"):
            rows = checks.block(item, start, stop).dense()
        with writing(path):
            region.add(rows.to(region.dtype), target)


class Scratch:
    """Reusable memory for each dtype: new pages take five times as long."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory; the next call returns the same memory."""
        buffer, size = self._held.get((dtype, device)), prod(shape)
        if buffer is None or buffer.numel() < size:
            buffer = self._held[dtype, device] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size].view(shape)


@dataclass(frozen=True)
class ParameterRegions:
    """The regions of one parameter's rows: one region if dense, else one for each factor."""

    kind: str | None
    shape: Shape
    regions: Mapping[str, Region]
    scratch: Scratch

    def fits(self, block: Block) -> bool:
        """Whether the block has the shape of the regions, and factors of their kind and sizes."""
        found = block.factors() if self.kind and block.kind == self.kind else None
        factors = {} if found is None else found.tensors
        if block.shape != self.shape or (self.kind and found is None):
            return False
        return all(
            tuple(factor.shape[1:]) == self.regions[name].shape[1:]
            and factor.is_complex() == self.regions[name].dtype.is_complex
            for name, factor in factors.items()
        )

    def add(self, block: Block, target: Target) -> None:
        """Write a block's rows: its factors, or dense rows, formed in tiles if necessary."""
        if self.kind is not None:
            found = block.factors()
            assert found is not None  # checked by fits()
            for name, factor in found.tensors.items():
                self._add(self.regions[name], factor, target)
            return
        region = self.regions[DENSE]
        if block.dense_if_formed is not None and block.dtype == region.dtype:
            region.add(block.dense_if_formed, target)
            return
        if block.dtype in _HALVES and block.dense_if_formed is None:
            block = block.to(torch.float32)  # rounds once, and overflow is counted
        row = prod(block.shape) * block.dtype.itemsize
        step = region.step(PART_BYTES, row)
        for at in range(0, block.n, step):
            tile = block.select(slice(at, at + step))
            rows = tile.dense_if_formed
            if rows is None:
                out = self.scratch.take((tile.n, *tile.shape), tile.dtype, tile.device)
                rows = tile.dense(out)
            self._add(region, rows, target)

    def _add(self, region: Region, values: Tensor, target: Target) -> None:
        """Write `values` in the stored format, and count finite numbers that overflow."""
        if values.dtype != region.dtype:
            made = self.scratch.take(tuple(values.shape), region.dtype, values.device)
            made.copy_(values)
            lost = int((made.isinf() & values.isfinite()).sum())
            region.mark = replace(region.mark, overflowed=region.mark.overflowed + lost)
            values = made
        region.add(values, target)


@dataclass(frozen=True)
class Regions:
    """All regions of a file."""

    by_path: dict[str, Region]  # every data set that is written
    tables: tuple[dict[str, Region], ...]  # the columns of /samples and of /norms
    # {parameter: ParameterRegions} for each chain; empty for a reduced chain
    chains: tuple[dict[str, ParameterRegions], ...]

    @classmethod
    def of(cls, file: h5py.File) -> "Regions":
        """Return the regions of a laid-out file."""
        found = {path: Region(dataset) for path, dataset in datasets(file)}
        scratch, chains = Scratch(), file["chains"]

        def column(path: str) -> ParameterRegions:
            if path in found:
                return ParameterRegions(None, found[path].shape[1:], {DENSE: found[path]}, scratch)
            kind = str(file[path].attrs["kind"])
            shape = tuple(int(s) for s in file[path].attrs["shape"])
            return ParameterRegions(
                kind, shape, {k: found[f"{path}/{k}"] for k in KINDS[kind]}, scratch
            )

        return cls(
            found,
            tuple({unescape(k): found[f"/{table}/{k}"] for k in file[table]} for table in TABLES),
            tuple(
                {unescape(name): column(f"/chains/{k}/{name}") for name in chains[str(k)]}
                for k in range(len(chains))
            ),
        )

    @property
    def packed(self) -> bool:
        """Whether some rows are compressed."""
        return any(region.chunks.packed for region in self.by_path.values())

    @property
    def without_aside(self) -> "Regions":
        """The regions without factors that were replaced by dense rows."""
        own = {k: r for k, r in self.by_path.items() if not k.startswith(f"/{ASIDE}/")}
        return replace(self, by_path=own)

    @property
    def marks(self) -> dict[str, Mark]:
        """{path: mark of the region}."""
        return {path: region.mark for path, region in self.by_path.items()}

    def return_to(self, marks: Mapping[str, Mark]) -> None:
        """Set regions back to earlier marks."""
        for path, mark in marks.items():
            self.by_path[path].mark = mark

    def take_over(self, others: "Regions") -> None:
        """Copy marks and tables from `others` for the paths that both have."""
        for path in self.by_path.keys() & others.by_path.keys():
            own, other = self.by_path[path], others.by_path[path]
            own.mark, own.table = other.mark, other.table

    def records(self, marks: Mapping[str, Mark], *, tails: bool = False) -> np.ndarray:
        """Return offset, size and CRC-32C of the complete chunks at `marks`, sorted, (m, 3)."""
        found = (r.records(marks[path], tail=tails) for path, r in self.by_path.items())
        table = np.concatenate([NO_RECORDS, *found])
        return table[np.argsort(table[:, 0])]

    def misfits(self, rows: FinishedBatch) -> list[str]:
        """Return the paths of columns whose form does not fit their blocks."""
        return [
            f"/chains/{k}/{escape(name)}"
            for k, gradients in enumerate(rows.chains)
            for name, block in (gradients or {}).items()
            if not self.chains[k][name].fits(block)
        ]

    def add(self, rows: FinishedBatch, target: Target) -> None:
        """Write one batch and flush it."""
        for table, columns in zip(self.tables, (rows.samples, rows.norms), strict=True):
            if set(table) != set(columns):
                raise OutputError(
                    f"this batch has the columns {sorted(columns)}, but the first batch had "
                    f"{sorted(table)}"
                )
            for name, values in columns.items():
                table[name].add(values.to(table[name].dtype), target)
        for chain, gradients in zip(self.chains, rows.chains, strict=True):
            for name, block in (gradients or {}).items():
                chain[name].add(block, target)
        target.flush()
