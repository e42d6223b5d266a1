"""How arrays lie in the file: number formats, chunks, and the creation of data sets.

Every data set with a sample axis is allocated in full before the first row is written. From then
on only data bytes change and no metadata, so that a process killed at any moment leaves a file
that opens. Chunks are near 1 MiB, their rows divide the batch, and each carries a checksum.
"""

from math import ceil, prod

import h5py
import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES = 2**20
SMALL_CHUNK = 2**14  # below this, several batches share a chunk
CACHE_BYTES = 2**16  # a chunk above this is written at once, not kept in memory

Shape = tuple[int, ...]


def stored_dtype(dtype: torch.dtype, wanted: np.dtype) -> np.dtype:
    """Return `wanted`, made complex for complex gradients and real for real ones."""
    if dtype.is_complex == (wanted.kind == "c"):
        return wanted
    if dtype.is_complex:
        return np.dtype(np.complex128 if wanted.itemsize == 8 else np.complex64)
    return np.dtype(np.float64 if wanted.itemsize == 16 else np.float32)


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the numpy dtype of a tensor dtype; float32 for bfloat16, which numpy lacks."""
    if dtype == torch.bfloat16:
        return np.dtype(np.float32)
    return torch.empty(0, dtype=dtype).numpy().dtype


def as_numpy(values: Tensor, dtype: np.dtype | None = None) -> np.ndarray:
    """Return `values` as a contiguous array, without a copy where there is nothing to convert."""
    dtype = numpy_dtype(values.dtype) if dtype is None else dtype
    wanted = torch.from_numpy(np.empty(0, dtype)).dtype
    plain = values.detach().to(wanted).cpu().resolve_conj().resolve_neg().contiguous()
    array: np.ndarray = plain.numpy()
    return array


def row_chunks(n: int, batch: int, row: Shape, itemsize: int) -> Shape | None:
    """Return the chunk shape of a data set (n, *row) that is written in batches of `batch` rows.

    None where there is nothing to store.
    """
    bytes_a_row = prod(row) * itemsize
    if n == 0 or bytes_a_row == 0:
        return None
    if bytes_a_row >= CHUNK_BYTES:
        return (1, *split(row, itemsize))
    if batch * bytes_a_row < SMALL_CHUNK:
        return (min(n, batch * (SMALL_CHUNK // (batch * bytes_a_row))), *row)
    fit = min(CHUNK_BYTES // bytes_a_row, batch, n)
    return (max(d for d in range(1, fit + 1) if batch % d == 0), *row)


def split(shape: Shape, itemsize: int) -> Shape:
    """Return a chunk shape near 1 MiB for an array, cut along its first axes."""
    chunk = list(shape)
    for axis, size in enumerate(shape):
        parts = ceil(prod(chunk) * itemsize / CHUNK_BYTES)
        chunk[axis] = max(1, ceil(size / parts))
        if prod(chunk) * itemsize <= CHUNK_BYTES:
            break
    return tuple(chunk)


def create(
    group: h5py.Group, name: str, shape: Shape, dtype: np.dtype, chunks: Shape | None
) -> h5py.Dataset:
    """Create a data set, allocated at once; with chunks, each has a Fletcher-32 checksum."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if chunks is None:
        return group.create_dataset(name, shape, dtype, dcpl=plist)
    return group.create_dataset(name, shape, dtype, chunks=chunks, fletcher32=True, dcpl=plist)


def write_rows(dataset: h5py.Dataset, start: int, values: np.ndarray) -> None:
    """Write `values` (n, ...) to the rows from `start` on, without h5py's selection overhead."""
    if values.size == 0:
        return
    inside = dataset.id.get_space()
    inside.select_hyperslab((start, *[0] * (values.ndim - 1)), values.shape)
    dataset.id.write(h5py.h5s.create_simple(values.shape), inside, values)
