"""HDF5 as data: arrays of numbers, sequences of different lengths and texts, read in slices.

HDF5 can be made to read other files and to claim what it does not hold; none of it is accepted.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

from gradscope.core.chunks import index_is_sound
from gradscope.errors import DatasetError
from gradscope.sources.data.columns import (
    NumberColumn,
    SequenceColumn,
    SequenceSizes,
    StoredArrays,
    StoredColumn,
    TextColumn,
    from_numpy,
    torch_dtype,
)
from gradscope.sources.formats import AGAIN, dataset_readers, matching

_DEPTH = 8
_DENSEST = 1100  # deflate makes at most 1,032 bytes of one
_SLICE = 2**16  # rows of which lengths are looked at together


@dataset_readers.register("hdf5")
@matching(lambda head: head.startswith(b"\x89HDF\r\n\x1a\n"))
def open_hdf5(path: Path) -> StoredArrays:
    """Arrays of an HDF5 file, each by its path: images, or train/images in a group."""
    with _open(path) as file:
        names = tuple(_names(file, "", set()))
    if not names:
        raise DatasetError("this HDF5 file holds no arrays", remedy="Write one array a name.")

    def load(name: str) -> StoredColumn:
        with _open(path) as file:
            return _stored(path, name, file[name])

    return StoredArrays(names, load)


def _open(path: Path) -> Any:
    return h5py.File(path, "r", locking=False)


def _names(group: h5py.Group, prefix: str, seen: set[int]) -> Iterator[str]:
    """Yield the paths of all data sets; links that lead elsewhere are not followed."""
    address = h5py.h5o.get_info(group.id).addr
    if address in seen or prefix.count("/") > _DEPTH:
        return
    seen.add(address)
    for name in group:
        kind = group.id.links.get_info(name.encode("utf-8", "surrogateescape")).type
        if kind == h5py.h5l.TYPE_HARD:
            item = group[name]
            if isinstance(item, h5py.Dataset):
                yield prefix + name
            elif isinstance(item, h5py.Group):
                yield from _names(item, f"{prefix}{name}/", seen)


def _stored(path: Path, name: str, dataset: h5py.Dataset) -> StoredColumn:
    _check(dataset, path.stat().st_size)
    shape, dtype = tuple(map(int, dataset.shape)), dataset.dtype
    inner = h5py.check_vlen_dtype(dtype)

    def rows(start: int, stop: int) -> np.ndarray:
        with _open(path) as file:
            found: np.ndarray = file[name][start:stop]
            return found

    def texts(start: int, stop: int) -> list[str]:
        with _open(path) as file:
            return [str(text) for text in file[name].asstr()[start:stop]]

    def sequences(start: int, stop: int) -> list[Tensor]:
        return [from_numpy(np.asarray(row, inner)) for row in rows(start, stop)]

    def sizes() -> SequenceSizes:
        parts = (rows(k, min(k + _SLICE, shape[0])) for k in range(0, shape[0], _SLICE))
        return torch.tensor([len(row) for part in parts for row in part], dtype=torch.int64), ()

    if h5py.check_string_dtype(dtype) is not None and len(shape) == 1:
        return TextColumn(shape[0], texts)
    if inner is not None and len(shape) == 1 and inner.kind in "biuf":
        return SequenceColumn(torch_dtype(inner), sequences, sizes)
    if not shape:
        return from_numpy(np.asarray(dataset[()]))
    if dtype.kind not in "biufc":
        remedy = "Store numbers, texts, or one sequence of numbers a sample."
        raise DatasetError(f"it holds {dtype}, not numbers", remedy=remedy)
    return NumberColumn(shape, torch_dtype(dtype), lambda a, b: from_numpy(rows(a, b)))


def _check(dataset: h5py.Dataset, size: int) -> None:
    """Refuse data that are elsewhere or not there, and an index by which HDF5 crashes."""
    plist = dataset.id.get_create_plist()
    if plist.get_external_count() or plist.get_layout() == h5py.h5d.VIRTUAL:
        remedy = "Copy them into one file (h5repack)."
        raise DatasetError("it takes its data from other files", remedy=remedy)
    if dataset.shape is None:
        raise DatasetError("it is empty", remedy="Give at least one sample.")
    stored = min(dataset.id.get_storage_size(), size)
    most = stored * (_DENSEST if plist.get_nfilters() else 1)
    if dataset.nbytes > max(most, 0):
        what = f"it claims {dataset.nbytes:,} bytes, of which {stored:,} are stored"
        raise DatasetError(what, remedy=f"The file is unfinished or damaged. {AGAIN}")
    if dataset.chunks is not None and not index_is_sound(dataset, size):
        raise DatasetError("its index of chunks is wrong", remedy=f"It is damaged. {AGAIN}")
