"""How arrays lie in the file: chunks, and the creation of data sets.

Every data set with a sample axis is allocated in full before the first row is written. From then
on only data bytes change and no structure. Chunks are near 1 MiB, and each carries a checksum.
"""

from math import ceil, prod

import h5py
import torch

from gradscope.storage.formats import h5_type

CHUNK_BYTES = 2**20
SMALL_CHUNK = 2**14  # below this, several batches share a chunk

Shape = tuple[int, ...]


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


def create(
    group: h5py.Group, name: str, shape: Shape, dtype: torch.dtype, chunks: Shape | None
) -> h5py.Dataset:
    """Create a data set, allocated at once; with chunks, each has a Fletcher-32 checksum."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if chunks is not None:
        plist.set_chunk(chunks)
        plist.set_fletcher32()
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    made = h5py.h5d.create(group.id, name.encode(), h5_type(dtype), space, plist, links)
    return h5py.Dataset(made)
