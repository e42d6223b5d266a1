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
    Ragged,
    Sliced,
    Stored,
    StoredArrays,
    Texts,
    from_numpy,
    reading,
    torch_dtype,
)
from gradscope.sources.data.readers import dataset_readers, matching

_DEPTH = 8
_DENSEST = 1100  # deflate makes at most 1,032 bytes of one
_SLICE = 2**16  # rows of which lengths are looked at together


def is_hdf5(head: bytes) -> bool:
    """Whether a file that begins like this is an HDF5 file."""
    return head.startswith(b"\x89HDF\r\n\x1a\n")


@dataset_readers.register("hdf5")
@matching(is_hdf5)
def open_hdf5(path: Path) -> StoredArrays:
    """Arrays of an HDF5 file, each by its path: images, or train/images in a group."""
    with reading(path), _open(path) as file:
        names = tuple(_names(file, "", set()))
    if not names:
        raise DatasetError(
            "this HDF5 file holds no arrays", where=str(path), remedy="Write one array a name."
        )

    def load(name: str) -> Stored:
        with reading(path, name), _open(path) as file:
            return _stored(path, name, file[name], path.stat().st_size)

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


def _stored(path: Path, name: str, dataset: h5py.Dataset, size: int) -> Stored:
    _check(dataset, size)
    shape, dtype = tuple(map(int, dataset.shape)), dataset.dtype
    inner = h5py.check_vlen_dtype(dtype)
    if h5py.check_string_dtype(dtype) is not None and len(shape) == 1:
        return Texts(shape[0], lambda a, b: _texts(path, name, a, b))
    if inner is not None and len(shape) == 1 and inner.kind in "biuf":
        lengths = [
            len(row)
            for start in range(0, shape[0], _SLICE)
            for row in dataset[start : start + _SLICE]
        ]
        return Ragged(
            torch.tensor(lengths, dtype=torch.int64),
            (),
            torch_dtype(inner),
            lambda a, b: [from_numpy(np.asarray(row, inner)) for row in _rows(path, name, a, b)],
        )
    if not shape:
        return from_numpy(np.asarray(dataset[()]))
    if dtype.kind not in "biufc":
        raise DatasetError(
            f"it holds {dtype}, not numbers",
            remedy="Store numbers, texts, or one sequence of numbers a sample.",
        )

    def read(start: int, stop: int) -> Tensor:
        return from_numpy(_rows(path, name, start, stop))

    return Sliced(shape, torch_dtype(dtype), read)


def _rows(path: Path, name: str, start: int, stop: int) -> np.ndarray:
    with reading(path, name), _open(path) as file:
        found: np.ndarray = file[name][start:stop]
        return found


def _texts(path: Path, name: str, start: int, stop: int) -> list[str]:
    with reading(path, name), _open(path) as file:
        return [str(text) for text in file[name].asstr()[start:stop]]


def _check(dataset: h5py.Dataset, size: int) -> None:
    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    if plist.get_external_count() or layout == h5py.h5d.VIRTUAL:
        raise DatasetError(
            "it takes its data from other files", remedy="Copy them into one file (h5repack)."
        )
    if dataset.shape is None:
        raise DatasetError("it is empty", remedy="Give at least one sample.")
    stored = min(dataset.id.get_storage_size(), size)
    most = stored * (_DENSEST if plist.get_nfilters() else 1)
    if dataset.nbytes > max(most, 0):
        raise DatasetError(
            f"it claims {dataset.nbytes:,} bytes, of which {stored:,} are stored",
            remedy="The file is unfinished or damaged: write or download it again.",
        )
    if dataset.chunks is not None and not index_is_sound(dataset, size):
        raise DatasetError(
            "its index of chunks is wrong", remedy="It is damaged: write or download it again."
        )
