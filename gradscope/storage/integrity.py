"""The seal: which bytes of a result file are checked by what.

Rows lie in chunks with checksums, the sample table and the norms have one SHA-256 a column. All
other bytes (structure, names, attributes, scalars) are few, and HDF5 would believe them whatever
they say. Their SHA-256 stands behind HDF5's own end of the file, and is checked before HDF5 sees
the file: no byte of it can change unseen.

    seal = extents (m, 2) int64 · m int64 · SHA-256 (32 bytes) · "gradseal"      little-endian

An extent is (offset, size) of bytes that have a checksum of their own. The SHA-256 is that of the
extents followed by all bytes before the seal that lie in none of them.
"""

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gradscope.storage.places import Place

TABLES = ("samples", "norms")
_PIECE = 2**22
_MAGIC = b"gradseal"
_TAIL = struct.Struct("<q32s8s")


def joined(places: Sequence[Place]) -> np.ndarray:
    """Return (m, 2) int64: offset and size of all bytes at `places`, neighbours together."""
    together = np.concatenate([np.empty((0, 2), np.int64), *(place.extents for place in places)])
    together = together[np.argsort(together[:, 0])]
    ends = together.sum(1)
    first = np.flatnonzero(np.r_[True, together[1:, 0] != ends[:-1]][: len(together)])
    last = np.r_[first[1:] - 1, len(together) - 1][: len(first)]
    return np.stack([together[first, 0], ends[last] - together[first, 0]], 1)


def gaps(taken: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of what lies between the sorted extents in a file of `size` bytes."""
    position = 0
    for start, length in taken.tolist():
        if start > position:
            yield position, start
        position = max(position, start + length)
    if size > position:
        yield position, size


def write_seal(descriptor: int, taken: np.ndarray) -> None:
    """Append the seal to a file whose bytes `taken` (m, 2) have checksums of their own."""
    size = os.fstat(descriptor).st_size
    table = np.ascontiguousarray(taken, "<i8").tobytes()
    digest = _digest(descriptor, table, size)
    os.pwrite(descriptor, table + _TAIL.pack(len(taken), digest, _MAGIC), size)


def is_intact(path: Path) -> bool | None:
    """Whether the file is as it was sealed; None when it has no seal."""
    with path.open("rb") as file:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        tail = os.pread(descriptor, _TAIL.size, max(0, size - _TAIL.size))
        if len(tail) < _TAIL.size or not tail.endswith(_MAGIC):
            return None
        count, digest, _ = _TAIL.unpack(tail)
        end = size - _TAIL.size - 16 * count
        if count < 0 or end < 0:
            return False
        table = os.pread(descriptor, 16 * count, end)
        return _is_sound(table, end) and _digest(descriptor, table, end) == digest


def seal_of(path: Path) -> bytes:
    """Return the SHA-256 of a sealed file's seal, which tells it from any other."""
    with path.open("rb") as file:
        file.seek(-_TAIL.size, os.SEEK_END)
        digest: bytes = _TAIL.unpack(file.read())[1]
    return digest


def _is_sound(table: bytes, size: int) -> bool:
    """Whether the extents lie in the file one after the other, so that reading them ends."""
    starts, lengths = np.frombuffer(table, "<i8").reshape(-1, 2).T
    if not ((starts >= 0) & (lengths >= 0) & (starts <= size) & (lengths <= size)).all():
        return False
    return bool((starts + lengths <= np.append(starts[1:], size)).all())


def _digest(descriptor: int, table: bytes, size: int) -> bytes:
    digest = hashlib.sha256(table)
    for start, stop in gaps(np.frombuffer(table, "<i8").reshape(-1, 2), size):
        for at in range(start, stop, _PIECE):
            digest.update(os.pread(descriptor, min(_PIECE, stop - at), at))
    return digest.digest()


def column_digest(values: np.ndarray) -> str:
    """Return the SHA-256 of a column's bytes as they lie in the file."""
    return hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()
