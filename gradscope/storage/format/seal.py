"""The seal of a result file: checksums that cover all of its bytes.

Rows, aggregates, states and tables are in chunks, each with a checksum. The remaining bytes
(structure, names, attributes) are few, but HDF5 does not verify them. The seal follows the end of
the HDF5 data and is checked before HDF5 opens the file, so every changed byte is detected.

    seal = table (m, 3) int64 · m int64 · SHA-256 (32 bytes) · "gradcrcs"      little-endian

A record of the table has the offset, the size and the CRC-32C of a chunk. The SHA-256 covers the
table, followed by all bytes before the seal that are in no chunk of the table.

`Checks` compares each chunk with its checksum when the chunk is first read. Uncompressed chunks are
read without HDF5: its Fletcher-32 check is slow, and does not detect a chunk that became zeros.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import h5py
import numpy as np
import torch
from crc32c import crc32c

from gradscope.blocks import Block, DenseBlock, from_factors
from gradscope.errors import ResultFileError
from gradscope.process.shortage import require_memory, thread_pool
from gradscope.storage.format.files import read, read_into, write
from gradscope.storage.format.layout import KINDS, RECORD, ChunkOffsets, datasets
from gradscope.storage.format.numbers import as_numpy, dtype_named, format_of, h5_type, read_rows

NO_RECORDS = np.empty((0, RECORD), np.int64)

REMEDY = "Take another copy of the file, or compute it again."

_PIECE = 2**22
# bytes read at a time; the number of threads; bytes per task of a thread
_STEP, _THREADS, _RUN = 2**20, 2, 2**24
_MAGIC = b"gradcrcs"
_TAIL = struct.Struct("<q32s8s")
_SEALED = -1  # stored instead of a checksum if the SHA-256 of the seal covers the chunk


def joined(extents: Sequence[np.ndarray]) -> np.ndarray:
    """Return all `extents` (k, 2), offset and size, with adjacent ones joined: (m, 2) int64."""
    together = np.concatenate([np.empty((0, 2), np.int64), *extents])
    together = together[np.argsort(together[:, 0])]
    ends = together.sum(1)
    first = np.flatnonzero(np.r_[True, together[1:, 0] != ends[:-1]][: len(together)])
    last = np.r_[first[1:] - 1, len(together) - 1][: len(first)]
    return np.stack([together[first, 0], ends[last] - together[first, 0]], 1)


def gaps(taken: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the bytes outside the sorted extents (m, 2 or 3) in a file."""
    position = 0
    for start, length in taken[:, :2].tolist():
        if start > position:
            yield position, start
        position = max(position, start + length)
    if size > position:
        yield position, size


@dataclass(frozen=True)
class Seal:
    """The seal read from a file."""

    table: np.ndarray  # (m, 3) int64: offset, size, CRC-32C
    digest: bytes  # the SHA-256, which identifies the file
    intact: bool  # whether the SHA-256 matches the file's bytes


def write_seal(descriptor: int, table: np.ndarray) -> None:
    """Append the seal to a file; `table` (m, 3) has its chunks, sorted by offset."""
    size = os.fstat(descriptor).st_size
    stored = np.ascontiguousarray(table, "<i8")
    tail = _TAIL.pack(len(stored), _digest(descriptor, stored, size), _MAGIC)
    write(descriptor, stored.tobytes() + tail, size)


def seal_of(path: Path) -> Seal | None:
    """Read a file's seal and compare the file with it; return None if it has no seal."""
    with path.open("rb") as file:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        tail = read(descriptor, _TAIL.size, max(0, size - _TAIL.size)).tobytes()
        if len(tail) < _TAIL.size or not tail.endswith(_MAGIC):
            return None
        count, digest, _ = _TAIL.unpack(tail)
        end = size - _TAIL.size - 8 * RECORD * count
        if count < 0 or end < 0:
            return Seal(NO_RECORDS, digest, intact=False)
        table = read(descriptor, 8 * RECORD * count, end).view("<i8").reshape(-1, RECORD)
        intact = _is_sound(table, end) and _digest(descriptor, table, end) == digest
        return Seal(table, digest, intact)


def damaged(descriptor: int, table: np.ndarray) -> np.ndarray:
    """Return the offsets (k,) of the chunks in `table` (m, 3) whose bytes have changed."""
    cuts = np.flatnonzero(np.diff(np.cumsum(table[:, 1]) // _RUN)) + 1
    runs = np.split(table, cuts)
    if len(runs) < 2:
        return _damaged(descriptor, table)
    with thread_pool(_THREADS, "gradscope-check") as pool:
        return np.concatenate(list(pool.map(lambda run: _damaged(descriptor, run), runs)))


def _damaged(descriptor: int, table: np.ndarray) -> np.ndarray:
    buffer, wrong = np.empty(_STEP, np.uint8), []
    for offset, size, wanted in table.tolist():
        found = 0
        for at in range(0, size, _STEP):
            part = buffer[: min(_STEP, size - at)]
            part = part[: read_into(descriptor, part.data, offset + at)]
            found = crc32c(part.data, found)
        if found != wanted:
            wrong.append(offset)
    return np.array(wrong, np.int64)


def _is_sound(table: np.ndarray, size: int) -> bool:
    """Whether the chunks are sorted, do not overlap and end before `size`."""
    starts, lengths = table[:, 0], table[:, 1]
    if not ((starts >= 0) & (lengths >= 0) & (starts <= size) & (lengths <= size)).all():
        return False
    return bool((starts + lengths <= np.append(starts[1:], size)).all())


def _digest(descriptor: int, table: np.ndarray, size: int) -> bytes:
    digest = hashlib.sha256(table.tobytes())
    for start, stop in gaps(table, size):
        for at in range(start, stop, _PIECE):
            digest.update(read(descriptor, min(_PIECE, stop - at), at).data)
    return digest.digest()


@dataclass(frozen=True)
class DatasetChecks:
    """The checksums of one data set."""

    chunks: ChunkOffsets  # the positions of its chunks
    sums: np.ndarray  # (m,) int64, the checksum of each chunk
    compared: np.ndarray  # (m,) bool, whether the chunk was already compared
    direct: bool  # whether its bytes are read without HDF5


class Checks:
    """Reads data of an open file and compares them with their checksums.

    Args:
        descriptor: Returns the file's descriptor; raises if the file is closed.
        table: (m, 3) int64: offset, size and CRC-32C of each chunk, sorted by offset.
    """

    def __init__(self, descriptor: Callable[[], int], table: np.ndarray) -> None:
        self._descriptor = descriptor
        self._ends = np.append(0, table[:, :2].sum(1))  # end of the chunk before each chunk
        self._table = np.append(table, [[np.iinfo(np.int64).max, 0, _SEALED]], 0)
        self._datasets: dict[str, DatasetChecks] = {}

    def rows(self, dataset: h5py.Dataset, start: int, stop: int) -> np.ndarray:
        """Return rows start:stop, (n, *shape); bfloat16 becomes float32."""
        known, shape = self._checks_of(dataset), (stop - start, *dataset.shape[1:])
        row = prod(shape[1:]) * dataset.id.get_type().get_size()
        if not known.direct:
            self._compare_range(dataset, known, start * row, stop * row)
            require_memory()
            return read_rows(dataset, start, stop)
        halves = format_of(dataset) == torch.bfloat16
        made = np.empty(shape, np.int16 if halves else dataset.dtype)
        self._fill(dataset, known, start * row, made.reshape(-1).view(np.uint8))
        return as_numpy(torch.from_numpy(made).view(torch.bfloat16)) if halves else made

    def block(self, item: h5py.HLObject, start: int, stop: int) -> Block:
        """Return rows start:stop of a data set, or of a group of factors, as a block.

        If the factors have a higher precision than the rows, the product is computed and rounded.
        """
        if isinstance(item, h5py.Dataset):
            return DenseBlock(torch.from_numpy(self.rows(item, start, stop)))
        kind, shape = str(item.attrs["kind"]), tuple(int(s) for s in item.attrs["shape"])
        factors = {k: torch.from_numpy(self.rows(item[k], start, stop)) for k in KINDS[kind]}
        index = factors.get("index", torch.zeros(0))
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < shape[0]:
            raise ResultFileError(
                f"an index is outside the table of {shape[0]} rows",
                where=f"{item.file.filename}: {item.name}",
                remedy="The file is damaged; compute it again.",
            )
        block, dtype = from_factors(kind, factors, shape), dtype_named(str(item.attrs["dtype"]))
        require_memory(prod(shape) * block.dtype.itemsize)  # the file may claim any shape
        if block.dtype == dtype:
            return block
        return DenseBlock(torch.from_numpy(as_numpy(block.dense().to(dtype))))

    def read_all(self, dataset: h5py.Dataset) -> np.ndarray:
        """Return all numbers of a data set, which may be a scalar."""
        if dataset.shape:
            return self.rows(dataset, 0, dataset.shape[0])
        self._compare_range(dataset, self._checks_of(dataset), 0, 1)
        return np.asarray(dataset[()])

    def _checks_of(self, dataset: h5py.Dataset) -> DatasetChecks:
        """Return the chunks of a data set and their checksums."""
        name = str(dataset.name)
        if name not in self._datasets:
            chunks = ChunkOffsets.of(dataset)
            at = np.searchsorted(self._table[:-1, 0], chunks.offsets)
            offsets, sizes, known = self._table[at].T
            exact = (offsets == chunks.offsets) & (sizes == chunks.sizes)
            ends = chunks.offsets + chunks.sizes
            if not (exact | ((self._ends[at] <= chunks.offsets) & (ends <= offsets))).all():
                raise ResultFileError(f"the checksums do not match the position of {name}")
            sums = np.where(exact, known, _SEALED)
            self._datasets[name] = DatasetChecks(
                chunks, sums, sums == _SEALED, _is_plain(dataset, chunks)
            )
        return self._datasets[name]

    def _compare_range(
        self, dataset: h5py.Dataset, checks: DatasetChecks, start: int, stop: int
    ) -> None:
        """Verify the chunks that hold bytes start:stop of a data set."""
        last = min(checks.chunks.number(stop - 1) + 1, len(checks.compared)) if stop > start else 0
        for number in range(checks.chunks.number(start), last):
            if not checks.compared[number]:
                self._read_chunk(dataset, checks, number)

    def _read_chunk(self, dataset: h5py.Dataset, checks: DatasetChecks, number: int) -> np.ndarray:
        """Return the stored bytes of a chunk, (m,) uint8, after comparison."""
        found = np.empty(int(checks.chunks.sizes[number]), np.uint8)
        self._read(int(checks.chunks.offsets[number]), found)
        self._compare(dataset, checks, number, crc32c(found.data))
        return found

    def _fill(
        self, dataset: h5py.Dataset, checks: DatasetChecks, position: int, out: np.ndarray
    ) -> None:
        """Read the bytes of a data set from `position` on into `out` (m,) uint8."""
        chunks = checks.chunks
        while len(out):
            number = chunks.number(position)
            start, offset = chunks.start(number), int(chunks.offsets[number])
            data = chunks.room(start)
            part, out = np.split(out, [start + data - position])
            if checks.compared[number]:
                self._read(offset + position - start, part)
            elif len(part) == data:  # the whole chunk: no copy needed
                rest = np.empty(int(chunks.sizes[number]) - data, np.uint8)
                self._read(offset, part)
                self._read(offset + data, rest)
                self._compare(dataset, checks, number, crc32c(rest.data, crc32c(part.data)))
            else:
                part[:] = self._read_chunk(dataset, checks, number)[position - start :][: len(part)]
            position += len(part)

    def _read(self, offset: int, out: np.ndarray) -> None:
        """Fill `out` with the bytes from `offset` on."""
        if read_into(self._descriptor(), out.data, offset) < len(out):
            raise ResultFileError("the file is truncated", remedy=REMEDY)

    def _compare(
        self, dataset: h5py.Dataset, checks: DatasetChecks, number: int, found: int
    ) -> None:
        if found != checks.sums[number]:
            where = _rows_text(dataset, checks.chunks, number)
            raise ResultFileError(
                f"the data are damaged (the checksum of {where} is wrong)", remedy=REMEDY
            )
        checks.compared[number] = True


def damage_text(file: h5py.File, offsets: np.ndarray) -> str:
    """Return a text with the rows and data sets that begin at these offsets of a file."""
    found = []
    for path, dataset in datasets(file):
        chunks = ChunkOffsets.of(dataset)
        for number in np.flatnonzero(np.isin(chunks.offsets, offsets)).tolist():
            found.append(f"{_rows_text(dataset, chunks, number)} of {path}")
    more = f", and {len(found) - 3:,} more places" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more


def _rows_text(dataset: h5py.Dataset, chunks: ChunkOffsets, number: int) -> str:
    """Return a text with the rows of a chunk."""
    if not dataset.shape:
        return "the number"
    row = max(1, chunks.size // dataset.shape[0])
    start = chunks.start(number)
    first, last = start // row, (start + chunks.room(start) - 1) // row
    return f"row {first:,}" if first == last else f"rows {first:,} to {last:,}"


def _is_plain(dataset: h5py.Dataset, chunks: ChunkOffsets) -> bool:
    """Whether the bytes in the file equal the numbers' bytes in memory."""
    try:
        kind = h5_type(format_of(dataset))
    except (TypeError, ValueError):  # gradscope does not write this format
        return False
    here = chunks.size == 0 or len(chunks.offsets) > 0
    return here and not chunks.packed and bool(dataset.id.get_type().equal(kind))
