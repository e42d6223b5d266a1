"""Where the bytes of a result file lie, and the seal over those that have no checksum of their own.

Rows lie in chunks with checksums, the sample table and the norms have one SHA-256 a column. All
other bytes (the structure, names, attributes, scalars) are few; their SHA-256 is the `checksum`
data set, so that no byte of the file can change unseen.
"""

import hashlib
import os
from collections.abc import Iterator

import h5py
import numpy as np

from gradscope.errors import ResultFileError

CHECKSUM = "checksum"
TABLES = ("samples", "norms")
_PIECE = 2**22


def datasets(file: h5py.File) -> Iterator[h5py.Dataset]:
    """Yield every data set."""
    pending: list[h5py.Group] = [file]
    while pending:
        for item in pending.pop().values():
            if isinstance(item, h5py.Group):
                pending.append(item)
            else:
                yield item


def chunk_extents(dataset: h5py.Dataset) -> np.ndarray:
    """Return (m, 2) int64: each chunk's offset in the file and stored size.

    Raises:
        ResultFileError: The chunks are not one for each place of the grid, with its checksum.
    """
    found: list[tuple[int, ...]] = []
    dataset.id.chunk_iter(
        lambda c: found.append((c.byte_offset, c.size, c.filter_mask, *c.chunk_offset))
    )
    table = np.array(found, np.int64).reshape(-1, 3 + dataset.ndim)
    places = table[:, 3:] // np.array(dataset.chunks)
    grid = -(-np.array(dataset.shape) // np.array(dataset.chunks))
    whole = len(table) == grid.prod() and ((places >= 0) & (places < grid)).all()
    if not whole or len(np.unique(places, axis=0)) != len(table) or table[:, 2].any():
        raise ResultFileError(f"chunks of {dataset.name} are missing or unchecked")
    return table[:, :2]


def extents(file: h5py.File) -> np.ndarray:
    """Return (m, 2) int64, sorted: offset and size of all bytes that the seal leaves out."""
    parts = [np.empty((0, 2), np.int64)]
    for dataset in datasets(file):
        own = dataset.name == f"/{CHECKSUM}" or dataset.name.split("/")[1] in TABLES
        if dataset.chunks is not None:
            parts.append(chunk_extents(dataset))
        elif own and dataset.id.get_offset() is not None:
            size = dataset.id.get_storage_size()
            parts.append(np.array([[dataset.id.get_offset(), size]], np.int64))
    together = np.concatenate(parts)
    return together[np.argsort(together[:, 0])]


def gaps(taken: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of what lies between the sorted extents in a file of `size` bytes."""
    position = 0
    for start, length in taken.tolist():
        if start > position:
            yield position, start
        position = max(position, start + length)
    if size > position:
        yield position, size


def seal(descriptor: int, taken: np.ndarray) -> bytes:
    """Return the SHA-256 of all bytes outside `taken`."""
    digest = hashlib.sha256()
    for start, stop in gaps(taken, os.fstat(descriptor).st_size):
        for at in range(start, stop, _PIECE):
            digest.update(os.pread(descriptor, min(_PIECE, stop - at), at))
    return digest.digest()


def column_digest(values: np.ndarray) -> str:
    """Return the SHA-256 of a column's bytes as they lie in the file."""
    return hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()
