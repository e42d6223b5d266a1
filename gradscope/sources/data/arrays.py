"""Reads rows of arrays directly from files: .npz, .npy, folders of .npy, safetensors and HDF5.

An HDF5 file can refer to further files, and can declare more data than it stores. Both raise an
error.
"""

import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import IO, Any, Literal

import h5py
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from gradscope.core.chunks import index_is_sound
from gradscope.core.filetypes import AGAIN
from gradscope.errors import DatasetError
from gradscope.sources.data.columns import (
    NumberColumn,
    SequenceColumn,
    SequenceSizes,
    StoredArrays,
    StoredColumn,
    TextColumn,
    from_numpy,
    objects,
    require_available,
    require_distinct,
    torch_dtype,
)
from gradscope.sources.formats import (
    dataset_readers,
    is_safetensors,
    is_saved_by_torch,
    is_zip,
    matching,
    require_regular,
)

_IN_MEMORY = 2**26  # the most bytes of a compressed array to read as a whole
_PIECE = 2**22  # bytes to read at a time
_LONGEST = 2**24  # the most bytes of a header; a table of 40,000 fields has a million

ReadRows = Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class _Header:
    """The header of a .npy file: shape (N, ...), dtype, order, and the position of the numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool  # Fortran order: the first axis varies fastest
    start: int

    @property
    def nbytes(self) -> int:
        """The bytes of all numbers."""
        return prod(self.shape) * self.dtype.itemsize

    def rows(self, opened: Callable[[], AbstractContextManager[IO[bytes]]]) -> ReadRows:
        """Return a function that reads rows; for Fortran order, the array is kept in memory."""
        row = prod(self.shape[1:]) * self.dtype.itemsize

        def read(start: int, stop: int) -> np.ndarray:
            with opened() as file:
                file.seek(self.start + start * row)
                return _array(replace(self, shape=(stop - start, *self.shape[1:])), file)

        if self.shape and not (self.fortran and len(self.shape) > 1):
            return read
        with opened() as file:
            file.seek(self.start)
            whole = _array(self, file)
        return lambda start, stop: whole[start:stop] if self.shape else whole


@dataset_readers.register("npy")
@matching(lambda head: head.startswith(b"\x93NUMPY"))
def open_npy(path: Path) -> StoredArrays:
    """One array of numbers, or a table with named fields, written by numpy.save."""
    with path.open("rb") as file:
        header = _header(file, path.stat().st_size)
    fields = header.dtype.names

    @lru_cache(maxsize=1)
    def rows() -> ReadRows:  # the fields share the rows of a batch
        return lru_cache(maxsize=1)(header.rows(lambda: path.open("rb")))

    return StoredArrays(
        fields or (path.stem,), lambda name: _column(header, rows(), name if fields else None)
    )


def open_npy_folder(path: Path) -> StoredArrays:
    """A folder of .npy files; each has one array with the name of the file."""
    files = {p.stem: p for p in sorted(path.glob("*.npy"))}

    def load(name: str) -> StoredColumn:
        require_regular(files[name], DatasetError)
        arrays = open_npy(files[name])
        if arrays.names != (name,):
            what = "it is a table with named fields, not an array"
            raise DatasetError(
                what, where=str(files[name]), remedy="Give this file instead of the folder."
            )
        return arrays.load(name)

    return StoredArrays(tuple(files), load)


@dataset_readers.register("npz")
@matching(lambda head: is_zip(head) and not is_saved_by_torch(head))
def open_npz(path: Path) -> StoredArrays:
    """Named arrays of numbers or texts, written by numpy.savez."""
    archive = zipfile.ZipFile(path)  # kept open: reading its directory takes long
    every = [info for info in archive.infolist() if info.filename.endswith(".npy")]
    members = {info.filename.removesuffix(".npy"): info for info in every}
    require_distinct((info.filename.removesuffix(".npy") for info in every), "arrays in it")
    if not members:
        remedy = "Write the data with numpy.savez, one name for each array."
        raise DatasetError("this zip archive has no numpy arrays", remedy=remedy)
    notes = (
        f"the array {name} of {info.file_size:,} bytes is compressed, so every pass over the data "
        "decompresses it again; save it with numpy.savez or numpy.save to read rows directly"
        for name, info in members.items()
        if info.compress_type != zipfile.ZIP_STORED and info.file_size > _IN_MEMORY
    )

    def load(name: str) -> StoredColumn:
        info = members[name]
        with archive.open(info) as member:
            header = _header(member, info.file_size)
            if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                header = replace(header, start=_start_of(path, info) + header.start)
                return _column(header, header.rows(lambda: path.open("rb")))
            if header.nbytes <= _IN_MEMORY:
                whole = _array(header, member)
                return _column(header, lambda a, b: whole[a:b] if header.shape else whole)
        inflated = cache(lambda: archive.open(info))  # seeking back restarts the decompression
        return _column(header, header.rows(lambda: nullcontext(inflated())))

    return StoredArrays(tuple(members), load, tuple(notes))


def _header(file: IO[bytes], size: int) -> _Header:
    """Read a header and compare it with the size; the file is then positioned after it."""
    if file.read(6) != b"\x93NUMPY":
        remedy = "Write the data with numpy.save or numpy.savez."
        raise DatasetError("this part of the file is not a numpy array", remedy=remedy)
    file.seek(0)
    form = np.lib.format
    version = form.read_magic(file)
    read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
    shape, fortran, dtype = read(file, max_header_size=_LONGEST)
    if version == (3, 0) and dtype.names is not None:  # numpy has read UTF-8 as Latin-1
        dtype.names = tuple(name.encode("latin-1").decode() for name in dtype.names)
    header = _Header(tuple(map(int, shape)), dtype, bool(fortran), file.tell())
    if dtype.hasobject:
        raise objects()
    if header.nbytes != size - header.start:
        raise _cut_off(header, max(0, size - header.start))
    return header


def _cut_off(header: _Header, found: int) -> DatasetError:
    return DatasetError(
        f"its header declares {header.nbytes:,} bytes of numbers, but the file has {found:,}",
        remedy="The file is damaged or cut off: write or download it again.",
    )


def _array(header: _Header, file: IO[bytes]) -> np.ndarray:
    """Read the numbers at the current position of a file."""
    require_available(header.nbytes)
    values = np.empty(header.nbytes, np.uint8)
    view, found = values.data, 0
    while found < header.nbytes and (data := file.read(min(_PIECE, header.nbytes - found))):
        view[found : found + len(data)] = data
        found += len(data)
    file.read(1)  # at its end, an archive checks the checksum
    if found != header.nbytes:
        raise _cut_off(header, found)
    order: Literal["F", "C"] = "F" if header.fortran else "C"
    shaped = values.view(header.dtype).reshape(header.shape, order=order)
    return shaped if not header.fortran else np.ascontiguousarray(shaped)


def _column(header: _Header, read: ReadRows, field: str | None = None) -> StoredColumn:
    """Return the array, or a field of it, with rows from `read`."""
    inner = header.dtype if field is None else header.dtype[field]
    shape = (*header.shape, *inner.shape)

    def rows(start: int, stop: int) -> np.ndarray:
        found = read(start, stop)
        return found if field is None else found[field].copy()

    def texts(start: int, stop: int) -> list[str]:
        return [t if isinstance(t, str) else t.decode() for t in rows(start, stop).tolist()]

    if inner.base.kind in "US" and len(shape) == 1:
        return TextColumn(shape[0], texts)
    return NumberColumn(shape, torch_dtype(inner.base), lambda a, b: from_numpy(rows(a, b)))


def _start_of(path: Path, info: zipfile.ZipInfo) -> int:
    """Return the position of a stored member's bytes, after a check of their checksum."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        local = file.read(30)
        if local[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile("a member is not at its position in the directory")
        names = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        start = info.header_offset + 30 + names
        file.seek(start)
        left, crc = info.file_size, 0
        while left:
            data = file.read(min(_PIECE, left))
            if not data:
                raise zipfile.BadZipFile("the archive ends too early")
            crc, left = zlib.crc32(data, crc), left - len(data)
    if crc != info.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {info.filename!r}")
    return start


@dataset_readers.register("safetensors")
@matching(is_safetensors)
def open_safetensors(path: Path) -> StoredArrays:
    """Named tensors of a safetensors file."""
    file: Any = safe_open(path, framework="pt")  # kept open: reading its header takes long

    def load(name: str) -> StoredColumn:
        part = file.get_slice(name)
        shape = tuple(part.get_shape())
        if not shape:
            whole: Tensor = file.get_tensor(name)
            return whole

        def rows(start: int, stop: int) -> Tensor:
            found: Tensor = file.get_slice(name)[start:stop]
            return found.clone(memory_format=torch.contiguous_format)

        return NumberColumn(shape, part[:0].dtype, rows)

    return StoredArrays(tuple(file.keys()), load)


_DEPTH = 8  # the deepest nesting of groups
_DENSEST = 1100  # a byte decompresses to at most 1,032 bytes with deflate
_SLICE = 2**16  # rows of sequences to measure at a time


@dataset_readers.register("hdf5")
@matching(lambda head: head.startswith(b"\x89HDF\r\n\x1a\n"))
def open_hdf5(path: Path) -> StoredArrays:
    """Arrays of an HDF5 file, named by their paths: images, or train/images in a group."""
    with _open(path) as file:
        names = tuple(_names(file, "", set()))
    if not names:
        raise DatasetError(
            "this HDF5 file has no arrays", remedy="Write each array as a named data set."
        )

    def load(name: str) -> StoredColumn:
        with _open(path) as file:
            return _stored(path, name, file[name])

    return StoredArrays(names, load)


def _open(path: Path) -> Any:
    return h5py.File(path, "r", locking=False)


def _names(group: h5py.Group, prefix: str, seen: set[int]) -> Iterator[str]:
    """Yield the paths of all data sets; soft and external links are not followed."""
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
        raise DatasetError(f"it has {dtype}, not numbers", remedy=remedy)
    return NumberColumn(shape, torch_dtype(dtype), lambda a, b: from_numpy(rows(a, b)))


def _check(dataset: h5py.Dataset, size: int) -> None:
    """Raise for data that are missing or in further files, and for an index that crashes HDF5."""
    plist = dataset.id.get_create_plist()
    if plist.get_external_count() or plist.get_layout() == h5py.h5d.VIRTUAL:
        remedy = "Copy the data into one file with h5repack."
        raise DatasetError("its data are in further files", remedy=remedy)
    if dataset.shape is None:
        raise DatasetError("it is empty", remedy="Give at least one sample.")
    stored = min(dataset.id.get_storage_size(), size)
    most = stored * (_DENSEST if plist.get_nfilters() else 1)
    if dataset.nbytes > max(most, 0):
        what = f"it declares {dataset.nbytes:,} bytes, but {stored:,} are stored"
        raise DatasetError(what, remedy=f"The file is unfinished or damaged. {AGAIN}")
    if dataset.chunks is not None and not index_is_sound(dataset, size):
        raise DatasetError("its index of chunks is wrong", remedy=f"The file is damaged. {AGAIN}")
