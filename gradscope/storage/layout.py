"""How arrays lie in the file: chunks, and the creation of data sets.

Every data set with a sample axis is allocated in full before the first row is written. From then
on only data bytes change and no structure. Chunks are near 1 MiB, and each carries a checksum.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil, prod

import h5py
import numpy as np
import torch
from h5py.h5s import SCALAR

from gradscope.config import Compression
from gradscope.storage.checksum import CHECKSUM_BYTES
from gradscope.storage.compression import set_filters
from gradscope.storage.formats import h5_type, text_type

CHUNK_BYTES = 2**20
SMALL_CHUNK = 2**14  # below this, several batches share a chunk

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Array:
    """A data set as it is to be.

    Attributes:
        shape: Of all of it.
        dtype: Of its numbers.
        chunks: The shape of a chunk, None where it lies in one piece.
        text: The bytes of each entry where they are texts, not numbers.
        compression: Of its chunks.
    """

    shape: Shape
    dtype: torch.dtype
    chunks: Shape | None
    text: int | None = None
    compression: Compression | None = None

    @property
    def pieces(self) -> int:
        """The number of chunks."""
        if self.chunks is None:
            return 0
        return prod(-(-size // c) for size, c in zip(self.shape, self.chunks, strict=True))

    @property
    def nbytes(self) -> int:
        """The bytes it takes in the file, not compressed: whole chunks and their checksums."""
        if self.chunks is None:
            return prod(self.shape) * (self.text or self.dtype.itemsize)
        return self.pieces * (prod(self.chunks) * self.dtype.itemsize + CHECKSUM_BYTES)


def row_chunks(n: int, batch: int, row: Shape, itemsize: int) -> Shape | None:
    """Return the chunk shape of a data set (n, *row) that is written in batches of `batch` rows.

    Rows that divide the batch need no copy. None where there is nothing to store.
    """
    bytes_a_row = prod(row) * itemsize
    if n == 0 or bytes_a_row == 0:
        return None
    if bytes_a_row >= CHUNK_BYTES:
        return (1, *split(row, itemsize))
    if batch * bytes_a_row < SMALL_CHUNK:
        return (min(n, batch * (SMALL_CHUNK // (batch * bytes_a_row))), *row)
    fit = min(CHUNK_BYTES // bytes_a_row, batch, n)
    divisor = max(d for d in range(1, fit + 1) if batch % d == 0)
    return (divisor if 2 * divisor >= fit else fit, *row)


def split(shape: Shape, itemsize: int) -> Shape:
    """Return a chunk shape of at most 1 MiB: cut along one axis, one entry of those before it."""
    chunk = list(shape)
    for axis, size in enumerate(shape):
        inner = prod(shape[axis + 1 :]) * itemsize
        parts = ceil(size / max(1, CHUNK_BYTES // inner))
        chunk[axis] = max(1, ceil(size / parts))
        if inner <= CHUNK_BYTES:
            break
    return tuple(chunk)


def create(group: h5py.Group, name: str, array: Array) -> h5py.Dataset:
    """Create a data set whose chunks have checksums; allocated at once unless it is compressed."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_obj_track_times(False)  # the same run gives the same bytes
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if array.chunks is not None:
        plist.set_chunk(array.chunks)
        set_filters(plist, array.compression)
    shape = array.shape
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    kind = h5_type(array.dtype) if array.text is None else text_type(array.text)
    made = h5py.h5d.create(group.id, name.encode(), kind, space, plist, utf8_links())
    return h5py.Dataset(made)


@cache
def utf8_links() -> h5py.h5p.PropLCID:
    """Return how names are stored."""
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    return links


def put_attribute(item: h5py.HLObject, name: str, values: np.ndarray, kind: np.dtype) -> None:
    """Write a new attribute: as `item.attrs` does, in a third of its time."""
    space = h5py.h5s.create_simple(values.shape) if values.shape else h5py.h5s.create(SCALAR)
    made = h5py.h5a.create(item.id, name.encode(), h5py.h5t.py_create(kind, logical=True), space)
    made.write(values, h5py.h5t.py_create(kind))
