"""The seal: which bytes of a result file are checked by what.

Rows, aggregates, states and tables lie in chunks, each with a checksum. All other bytes
(structure, names, attributes) are few, and HDF5 would believe them whatever they say. The seal
stands behind HDF5's own end of the file, and is checked before HDF5 sees the file: no byte of it
can change unseen.

    seal = table (m, 3) int64 · m int64 · SHA-256 (32 bytes) · "gradcrcs"      little-endian

A record of the table is the offset, the size and the CRC-32C of a chunk. The SHA-256 is that of
the table followed by all bytes before the seal that lie in none of the chunks. In the first
version, "gradseal", a record is (offset, size) only: chunks have Fletcher-32 and tables a SHA-256.
"""

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from crc32c import crc32c

from gradscope.core.shortage import started
from gradscope.storage.format.files import read, read_into, write
from gradscope.storage.format.layout import RECORD

NO_RECORDS = np.empty((0, RECORD), np.int64)

_PIECE = 2**22
_STEP, _THREADS, _RUN = 2**20, 2, 2**24  # bytes read at a time; threads, and what is worth them
_MAGICS = {2: b"gradseal", 3: b"gradcrcs"}  # by the numbers in a record
_TAIL = struct.Struct("<q32s8s")


def joined(extents: Sequence[np.ndarray]) -> np.ndarray:
    """Return (m, 2) int64: offset and size of all `extents` (k, 2), neighbours together."""
    together = np.concatenate([np.empty((0, 2), np.int64), *extents])
    together = together[np.argsort(together[:, 0])]
    ends = together.sum(1)
    first = np.flatnonzero(np.r_[True, together[1:, 0] != ends[:-1]][: len(together)])
    last = np.r_[first[1:] - 1, len(together) - 1][: len(first)]
    return np.stack([together[first, 0], ends[last] - together[first, 0]], 1)


def gaps(taken: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of what lies between sorted extents (m, 2 or 3) in a file of `size`."""
    position = 0
    for start, length in taken[:, :2].tolist():
        if start > position:
            yield position, start
        position = max(position, start + length)
    if size > position:
        yield position, size


@dataclass(frozen=True)
class Seal:
    """What stands at the end of a file."""

    table: np.ndarray  # (m, 3) int64: offset, size, CRC-32C; or (m, 2) in the first version
    digest: bytes  # the SHA-256, which tells the file from any other
    intact: bool  # whether it is that of the file


def write_seal(descriptor: int, table: np.ndarray) -> None:
    """Append the seal to a file whose chunks are in `table` (m, 3), by their offsets."""
    size = os.fstat(descriptor).st_size
    stored = np.ascontiguousarray(table, "<i8")
    tail = _TAIL.pack(len(stored), _digest(descriptor, stored, size), _MAGICS[stored.shape[1]])
    write(descriptor, stored.tobytes() + tail, size)


def seal_of(path: Path) -> Seal | None:
    """Read a file's seal, and compare the file with it; None when it has no seal."""
    with path.open("rb") as file:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        tail = read(descriptor, _TAIL.size, max(0, size - _TAIL.size)).tobytes()
        columns = {magic: columns for columns, magic in _MAGICS.items()}.get(tail[-8:])
        if len(tail) < _TAIL.size or columns is None:
            return None
        count, digest, _ = _TAIL.unpack(tail)
        end = size - _TAIL.size - 8 * columns * count
        if count < 0 or end < 0:
            return Seal(np.empty((0, columns), np.int64), digest, intact=False)
        table = read(descriptor, 8 * columns * count, end).view("<i8")
        table = table.reshape(-1, columns)
        intact = _is_sound(table, end) and _digest(descriptor, table, end) == digest
        return Seal(table, digest, intact)


def damaged(descriptor: int, table: np.ndarray) -> np.ndarray:
    """Return the offsets (k,) of those chunks in `table` (m, 3) whose bytes have changed."""
    cuts = np.flatnonzero(np.diff(np.cumsum(table[:, 1]) // _RUN)) + 1
    runs = np.split(table, cuts)
    if len(runs) < 2:
        return _damaged(descriptor, table)
    with started(_THREADS, "gradscope-check") as pool:
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
    """Whether the chunks lie in the file one after the other, so that reading them ends."""
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
