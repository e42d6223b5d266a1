"""The seal: which bytes of a result file are checked by what.

Rows, aggregates, states and tables lie in pieces, each with a checksum. All other bytes
(structure, names, attributes) are few, and HDF5 would believe them whatever they say. The seal
stands behind HDF5's own end of the file, and is checked before HDF5 sees the file: no byte of it
can change unseen.

    seal = table (m, 3) int64 · m int64 · SHA-256 (32 bytes) · "gradcrcs"      little-endian

A record of the table is the offset, the size and the CRC-32C of a piece. The SHA-256 is that of
the table followed by all bytes before the seal that lie in none of the pieces. In the first
version, "gradseal", a record is (offset, size) only: chunks have Fletcher-32 and tables a SHA-256.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradscope.storage.places import Place
from gradscope.storage.whole import read, write

TABLES = ("samples", "norms")
_PIECE = 2**22
_MAGICS = {2: b"gradseal", 3: b"gradcrcs"}  # by the numbers in a record
_TAIL = struct.Struct("<q32s8s")


def joined(places: Iterable[Place]) -> np.ndarray:
    """Return (m, 2) int64: offset and size of all bytes at `places`, neighbours together."""
    together = np.concatenate([np.empty((0, 2), np.int64), *(place.extents for place in places)])
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
    """What stands at the end of a file.

    Attributes:
        table: (m, 3) int64: offset, size, CRC-32C; or (m, 2) in the first version.
        digest: The SHA-256, which tells the file from any other.
        intact: Whether it is that of the file.
    """

    table: np.ndarray
    digest: bytes
    intact: bool


def write_seal(descriptor: int, table: np.ndarray) -> None:
    """Append the seal to a file whose pieces are in `table` (m, 3), by their offsets."""
    size = os.fstat(descriptor).st_size
    stored = np.ascontiguousarray(table, "<i8")
    tail = _TAIL.pack(len(stored), _digest(descriptor, stored, size), _MAGICS[stored.shape[1]])
    write(descriptor, [stored.tobytes(), tail], size)


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


def _is_sound(table: np.ndarray, size: int) -> bool:
    """Whether the pieces lie in the file one after the other, so that reading them ends."""
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


def column_digest(values: np.ndarray) -> str:
    """Return the SHA-256 of a column's bytes as they lie in the file."""
    return hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()
