"""The bytes of a file's data sets, compared with their checksums before anybody uses them.

A chunk is compared once, when it is first read. Chunks that are not compressed are read past HDF5,
whose Fletcher-32 takes longer than everything else, and misses a chunk that has become zeros.
Files of the first version have no other checksum: they are read by HDF5.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import h5py
import numpy as np
import torch
from crc32c import crc32c

from gradscope.core.shortage import require_memory
from gradscope.errors import ResultFileError
from gradscope.storage.format.files import read_into
from gradscope.storage.format.layout import RECORD, ChunkOffsets, datasets
from gradscope.storage.format.numbers import as_numpy, format_of, h5_type, read_rows

REMEDY = "Take another copy of the file, or compute it again."

_SEALED = -1  # in place of a checksum: the seal itself, or HDF5, covers the chunk


@dataclass(frozen=True)
class Known:
    """What is known of one data set."""

    chunks: ChunkOffsets  # where its bytes lie
    sums: np.ndarray  # (m,) int64, the checksum of each chunk
    seen: np.ndarray  # (m,) bool, the chunks that need not be compared any more
    direct: bool  # whether its bytes are read without HDF5


class Checks:
    """The data of an open file and their checksums.

    Args:
        descriptor: Returns the file's descriptor; raises where it is closed.
        table: (m, 3) int64: offset, size and CRC-32C of each chunk, by offset; or (m, 2) without
            the last, for a file whose chunks have Fletcher-32 only.
    """

    def __init__(self, descriptor: Callable[[], int], table: np.ndarray) -> None:
        self._descriptor, self._strong = descriptor, table.shape[1] == RECORD
        self._ends = np.append(0, table[:, :2].sum(1))  # of what is before each chunk
        last = [np.iinfo(np.int64).max, 0, _SEALED][: table.shape[1]]
        self._table = np.append(table, [last], 0)
        self._known: dict[str, Known] = {}

    def rows(self, dataset: h5py.Dataset, start: int, stop: int) -> np.ndarray:
        """Return rows start:stop (n, *shape); bfloat16 as float32."""
        known, shape = self._known_of(dataset), (stop - start, *dataset.shape[1:])
        row = prod(shape[1:]) * dataset.id.get_type().get_size()
        if not known.direct:
            self._look(dataset, known, start * row, stop * row)
            require_memory()
            return read_rows(dataset, start, stop)
        halves = format_of(dataset) == torch.bfloat16
        made = np.empty(shape, np.int16 if halves else dataset.dtype)
        self._fill(dataset, known, start * row, made.reshape(-1).view(np.uint8))
        return as_numpy(torch.from_numpy(made).view(torch.bfloat16)) if halves else made

    def whole(self, dataset: h5py.Dataset) -> np.ndarray:
        """Return all numbers, also of a data set without axes."""
        if dataset.shape:
            return self.rows(dataset, 0, dataset.shape[0])
        self._look(dataset, self._known_of(dataset), 0, 1)
        return np.asarray(dataset[()])

    def _known_of(self, dataset: h5py.Dataset) -> Known:
        """Return where a data set lies, and its checksums."""
        name = str(dataset.name)
        if name not in self._known:
            chunks = ChunkOffsets.of(dataset)
            sums = self._sums(chunks, name)
            direct = self._strong and _is_plain(dataset, chunks)
            self._known[name] = Known(chunks, sums, sums == _SEALED, direct)
        return self._known[name]

    def _sums(self, chunks: ChunkOffsets, name: str) -> np.ndarray:
        """Return the checksum of each chunk (m,)."""
        if not self._strong:
            return np.full(len(chunks.offsets), _SEALED, np.int64)
        at = np.searchsorted(self._table[:-1, 0], chunks.offsets)
        offsets, sizes, sums = self._table[at].T
        exact = (offsets == chunks.offsets) & (sizes == chunks.sizes)
        apart = (self._ends[at] <= chunks.offsets) & (chunks.offsets + chunks.sizes <= offsets)
        if not (exact | apart).all():
            raise ResultFileError(f"the checksums are of other bytes than those of {name}")
        return np.where(exact, sums, _SEALED)

    def _look(self, dataset: h5py.Dataset, known: Known, start: int, stop: int) -> None:
        """Compare the chunks that hold bytes start:stop of a data set."""
        last = min(known.chunks.number(stop - 1) + 1, len(known.seen)) if stop > start else 0
        for number in range(known.chunks.number(start), last):
            if not known.seen[number]:
                self._stored(dataset, known, number)

    def _stored(self, dataset: h5py.Dataset, known: Known, number: int) -> np.ndarray:
        """Return a chunk (m,) uint8 as it lies in the file, compared."""
        found = np.empty(int(known.chunks.sizes[number]), np.uint8)
        self._read(int(known.chunks.offsets[number]), found)
        self._compare(dataset, known, number, crc32c(found.data))
        return found

    def _fill(self, dataset: h5py.Dataset, known: Known, position: int, out: np.ndarray) -> None:
        """Read the bytes of a data set from `position` on into `out` (m,) uint8."""
        chunks = known.chunks
        while len(out):
            number = chunks.number(position)
            start, offset = chunks.start(number), int(chunks.offsets[number])
            data = chunks.room(start)
            part, out = np.split(out, [start + data - position])
            if known.seen[number]:
                self._read(offset + position - start, part)
            elif len(part) == data:  # all of it: without a copy
                rest = np.empty(int(chunks.sizes[number]) - data, np.uint8)
                self._read(offset, part)
                self._read(offset + data, rest)
                self._compare(dataset, known, number, crc32c(rest.data, crc32c(part.data)))
            else:
                part[:] = self._stored(dataset, known, number)[position - start :][: len(part)]
            position += len(part)

    def _read(self, offset: int, out: np.ndarray) -> None:
        """Fill `out` with the bytes from `offset` on."""
        if read_into(self._descriptor(), out.data, offset) < len(out):
            raise ResultFileError("the file is cut short", remedy=REMEDY)

    def _compare(self, dataset: h5py.Dataset, known: Known, number: int, found: int) -> None:
        if found != known.sums[number]:
            where = _rows_text(dataset, known.chunks, number)
            raise ResultFileError(
                f"its data are damaged (the checksum of {where} is wrong)", remedy=REMEDY
            )
        known.seen[number] = True


def damage_text(file: h5py.File, offsets: np.ndarray) -> str:
    """Return what begins at these places of a file: rows and data sets."""
    found = []
    for path, dataset in datasets(file):
        chunks = ChunkOffsets.of(dataset)
        for number in np.flatnonzero(np.isin(chunks.offsets, offsets)).tolist():
            found.append(f"{_rows_text(dataset, chunks, number)} of {path}")
    more = f", and {len(found) - 3:,} more places" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more


def _rows_text(dataset: h5py.Dataset, chunks: ChunkOffsets, number: int) -> str:
    """Return which rows lie in a chunk."""
    if not dataset.shape:
        return "the number"
    row = max(1, chunks.size // dataset.shape[0])
    start = chunks.start(number)
    first, last = start // row, (start + chunks.room(start) - 1) // row
    return f"row {first:,}" if first == last else f"rows {first:,} to {last:,}"


def _is_plain(dataset: h5py.Dataset, chunks: ChunkOffsets) -> bool:
    """Whether the bytes in the file are the numbers as they are in memory."""
    try:
        kind = h5_type(format_of(dataset))
    except (TypeError, ValueError):  # none of our formats
        return False
    here = chunks.size == 0 or len(chunks.offsets) > 0
    return here and not chunks.packed and bool(dataset.id.get_type().equal(kind))
