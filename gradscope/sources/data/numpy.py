"""numpy's formats: .npz, .npy and folders of .npy files. Rows are read where they lie."""

import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import IO, Literal

import numpy as np
from torch import Tensor

from gradscope.errors import DatasetError
from gradscope.sources.data.columns import (
    Sliced,
    Stored,
    StoredArrays,
    Texts,
    from_numpy,
    objects,
    reading,
    require_memory,
    torch_dtype,
)
from gradscope.sources.data.readers import dataset_readers, is_zip, matching
from gradscope.sources.listing import listed

_IN_MEMORY = 2**26  # bytes up to which a compressed array is read as a whole
_PIECE = 2**22
_LONGEST = 2**24  # bytes of a header; a table of 40,000 fields has a million


@dataclass(frozen=True)
class _Header:
    """What a .npy file says of itself.

    Attributes:
        shape: (N, ...).
        dtype: Of the numbers.
        fortran: The first axis is the fastest.
        start: Where the numbers begin in the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    start: int

    @property
    def nbytes(self) -> int:
        """The bytes of all numbers."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def row(self) -> int:
        """The bytes of one row."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def sliceable(self) -> bool:
        """Whether there are rows, each in one piece."""
        return bool(self.shape) and not (self.fortran and len(self.shape) > 1)

    def part(self, n: int) -> "_Header":
        """Return the header of n rows alone."""
        return replace(self, shape=(n, *self.shape[1:]))


def is_npy(head: bytes) -> bool:
    """Whether a file that begins like this is a .npy file."""
    return head.startswith(b"\x93NUMPY")


@dataset_readers.register("npy")
@matching(is_npy)
def open_npy(path: Path) -> StoredArrays:
    """One array of numbers, or a table with named fields, as numpy.save writes it."""
    with reading(path), path.open("rb") as file:
        header = _header(file, path.stat().st_size)
    fields = header.dtype.names
    read = lru_cache(maxsize=1)(_reader(path, header))  # the fields share the rows of a batch

    def load(name: str) -> Stored:
        with reading(path, name):
            return _rows(path, header, read, None if fields is None else name)

    return StoredArrays(fields or (path.stem,), load)


def open_npy_folder(path: Path) -> StoredArrays:
    """A folder of .npy files, one array each, called as its file is."""
    files = {p.stem: p for p in sorted(path.glob("*.npy"))}

    def load(name: str) -> Stored:
        arrays = open_npy(files[name])
        if arrays.names != (name,):
            raise DatasetError(
                "it is a table with named fields, not an array",
                where=str(files[name]),
                remedy="Give that file itself as the data set.",
            )
        return arrays.load(name)

    return StoredArrays(tuple(files), load)


@dataset_readers.register("npz")
@matching(is_zip)
def open_npz(path: Path) -> StoredArrays:
    """Named arrays of numbers or texts, as numpy.savez writes them."""
    with reading(path):
        archive = zipfile.ZipFile(path)  # it stays open: to read its directory takes long
        members = _members(archive)

    def load(name: str) -> Stored:
        with reading(path, name):
            info = members[name]
            with archive.open(info) as member:
                header = _header(member, info.file_size)
                if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                    placed = replace(header, start=_start_of(path, info) + header.start)
                    return _rows(path, placed, _reader(path, placed))
                if header.nbytes <= _IN_MEMORY or not header.sliceable:
                    return _stored(path, _array(header, member))
        return _inflated(path, name, archive, info, header)

    return StoredArrays(tuple(members), load, _notes(members))


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the arrays of an archive by name."""
    every = [info for info in archive.infolist() if info.filename.endswith(".npy")]
    members = {info.filename.removesuffix(".npy"): info for info in every}
    if len(members) < len(every):
        names = Counter(info.filename for info in every)
        twice = [name.removesuffix(".npy") for name, count in names.items() if count > 1]
        raise DatasetError(
            f"several arrays in it are called {listed(map(repr, twice), 3)}",
            remedy="Write the data again, each array under a name of its own.",
        )
    if not members:
        raise DatasetError(
            "this zip archive holds no numpy arrays",
            remedy="Write the data with numpy.savez, one array a name.",
        )
    return members


def _notes(members: dict[str, zipfile.ZipInfo]) -> tuple[str, ...]:
    return tuple(
        f"the array {name} of {info.file_size:,} bytes is compressed, so every pass over the data "
        "inflates it anew; numpy.savez or numpy.save would let rows be read where they lie"
        for name, info in members.items()
        if info.compress_type != zipfile.ZIP_STORED and info.file_size > _IN_MEMORY
    )


def _header(file: IO[bytes], size: int) -> _Header:
    """Read a header and check it against the bytes there are; the file stands behind it then."""
    if file.read(6) != b"\x93NUMPY":
        raise DatasetError(
            "this part of the file is no numpy array",
            remedy="Write the data with numpy.save or numpy.savez.",
        )
    file.seek(0)
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read(file, max_header_size=_LONGEST)
    if version == (3, 0) and dtype.names is not None:  # read as if it were Latin-1
        dtype.names = tuple(name.encode("latin-1").decode() for name in dtype.names)
    header = _Header(tuple(map(int, shape)), dtype, bool(fortran), file.tell())
    if dtype.hasobject:
        raise objects()
    if header.nbytes != size - header.start:
        raise _cut_off(header, max(0, size - header.start))
    return header


def _cut_off(header: _Header, found: int) -> DatasetError:
    return DatasetError(
        f"its header claims {header.nbytes:,} bytes of numbers, there are {found:,}",
        remedy="The file is damaged or cut off: write or download it again.",
    )


def _array(header: _Header, file: IO[bytes]) -> np.ndarray:
    """Read the numbers that come next in a file."""
    require_memory(header.nbytes)
    values = np.empty(header.nbytes, np.uint8)
    view, found = values.data, 0
    while found < header.nbytes and (data := file.read(min(_PIECE, header.nbytes - found))):
        view[found : found + len(data)] = data
        found += len(data)
    file.read(1)  # at its end, an archive compares the checksum
    if found != header.nbytes:
        raise _cut_off(header, found)
    order: Literal["F", "C"] = "F" if header.fortran else "C"
    shaped = values.view(header.dtype).reshape(header.shape, order=order)
    return shaped if not header.fortran else np.ascontiguousarray(shaped)


def _reader(path: Path, header: _Header) -> Callable[[int, int], np.ndarray]:
    """Return what reads the rows from a start up to a stop; all of them where none is apart."""

    def read(start: int, stop: int) -> np.ndarray:
        with reading(path), path.open("rb") as file:
            file.seek(header.start + (start * header.row if header.sliceable else 0))
            return _array(header.part(stop - start) if header.sliceable else header, file)

    return read


def _rows(
    path: Path,
    header: _Header,
    read: Callable[[int, int], np.ndarray],
    field: str | None = None,
) -> Stored:
    """Return the array whose numbers begin at `header.start` of a file, or a field of it."""
    if not header.sliceable:
        whole = read(0, 0)
        return _stored(path, whole if field is None else whole[field].copy())

    def rows(start: int, stop: int) -> np.ndarray:
        found = read(start, stop)
        return found if field is None else found[field].copy()

    return _sliced(path, header, rows, field)


def _inflated(
    path: Path, name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, header: _Header
) -> Stored:
    """Return a compressed array of which only some rows are in memory at a time."""
    member = archive.open(info)

    def read(start: int, stop: int) -> np.ndarray:
        with reading(path, name):
            member.seek(header.start + start * header.row)  # backwards: from the beginning
            return _array(header.part(stop - start), member)

    return _sliced(path, header, read)


def _sliced(
    path: Path,
    header: _Header,
    read: Callable[[int, int], np.ndarray],
    field: str | None = None,
) -> Stored:
    inner = header.dtype if field is None else header.dtype[field]
    shape = (*header.shape, *inner.shape)
    if inner.base.kind in "US" and len(shape) == 1:
        return Texts(shape[0], lambda start, stop: _texts(path, read(start, stop)))

    def numbers(start: int, stop: int) -> Tensor:
        with reading(path):
            return from_numpy(read(start, stop))

    return Sliced(shape, torch_dtype(inner.base), numbers)


def _stored(path: Path, array: np.ndarray) -> Stored:
    """Return an array that is in memory."""
    if array.dtype.kind in "US" and array.ndim == 1:
        return Texts(len(array), lambda start, stop: _texts(path, array[start:stop]))
    return from_numpy(array)


def _texts(path: Path, array: np.ndarray) -> Sequence[str]:
    with reading(path):
        return [t if isinstance(t, str) else t.decode() for t in array.tolist()]


def _start_of(path: Path, info: zipfile.ZipInfo) -> int:
    """Return where a stored member's bytes begin, having checked them against their checksum."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        local = file.read(30)
        if local[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile("a member is not where the directory says")
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
