"""Open a result file from an untrusted source: its structure is checked before any use.

The seal is checked first, before HDF5 opens the file. A malicious file can make HDF5 read other
files (external storage, virtual data sets, links), allocate petabytes, and load plugins. Result
files do not use these features, so files with them are refused. The exception is a merged file
with virtual rows, which are never read through HDF5. Finally, names, shapes and types are compared
with the format of result files.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np

from gradscope.core.chunks import index_is_sound
from gradscope.core.filetypes import describe
from gradscope.errors import ResultFileError
from gradscope.storage.format.files import reading
from gradscope.storage.format.layout import (
    AXES,
    CHUNK_BYTES,
    FORMAT,
    FORMAT_VERSION,
    KEYS,
    SOURCES,
    TABLES,
    filters_of,
    is_compressed,
    is_known,
)
from gradscope.storage.format.numbers import unescape
from gradscope.storage.format.seal import REMEDY, Checks, Seal, seal_of

_CONTINUE = "Run the gradscope compute or attribute that wrote it again, with --resume."
_DEPTH = 4  # /chains/0/NAME/left
_HEAD = 4096  # bytes by which a file of another kind is described
_CHUNK_BYTES = 2 * CHUNK_BYTES
_KINDS = "biufc"
_ATTRIBUTE_BYTES = 2**16
_PLAIN = ("identity", "mean")  # chains whose arrays have the parameters' shapes
_COLUMNS = {"index": "iu", "loss": "f", "norm": "f", "finite": "b"}  # {required column: kinds}
_ATTRIBUTES: dict[str, Callable[[Any], bool]] = {  # {name: whether a value is valid}
    **dict.fromkeys(("chain", "dtype", "kind", KEYS), lambda value: isinstance(value, str)),
    "reduced": lambda value: isinstance(value, bool | np.bool_),
    "overflowed": lambda value: isinstance(value, int | np.integer) and bool(value >= 0),
    "shape": lambda value: np.ndim(value) == 1 and np.asarray(value).dtype.kind in "iu",
}


@dataclass(frozen=True)
class OpenFile:
    """An open result file; close it, or use it in a `with` statement."""

    file: h5py.File  # the HDF5 file, whose structure was checked
    checks: Checks  # reads and verifies data
    seal: bytes  # the SHA-256 of the seal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def open_checked(path: Path) -> OpenFile:
    """Open a result file and check everything but its rows."""
    try:
        with reading(str(path)):
            file, seal = _file(path)
            try:
                return _checked(file, path.stat().st_size, seal)
            except BaseException:
                file.close()
                raise
    except ResultFileError as error:
        raise error if error.where else error.at(str(path)) from error.__cause__


def reopen(path: Path, digest: bytes) -> OpenFile:
    """Open a file whose structure was checked when it had this seal."""
    with reading(str(path)):
        seal = seal_of(path) if os.path.isfile(path) else None  # noqa: PTH113
        if seal is None or not seal.intact or seal.digest != digest:
            raise ResultFileError(
                "the file has changed since it was first opened",
                where=str(path),
                remedy="Wait until no other process writes the file, and try again.",
            )
        file = h5py.File(path, "r", locking=False)
        return OpenFile(file, Checks(file.id.get_vfd_handle, seal.table), digest)


def document(texts: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the attribute `key`, a JSON document."""
    with suppress(ValueError):
        found = json.loads(texts.get(key, "{}"))
        if isinstance(found, dict):
            return found
    raise ResultFileError(f"the attribute {key!r} is not a JSON document", remedy=REMEDY)


def _file(path: Path) -> tuple[h5py.File, Seal | None]:
    """Check the seal, open the file, and return the file and its seal."""
    if os.path.isdir(path):  # noqa: PTH112 (Path.is_dir raises if a name is too long)
        raise ResultFileError(
            "this is a directory", remedy="Give the file that gradscope compute -o wrote."
        )
    if not os.path.isfile(path):  # noqa: PTH113
        part = path.with_name(path.name + ".part")
        raise ResultFileError(
            ("this is not a regular file" if os.path.exists(path) else "there is no such file"),  # noqa: PTH110
            remedy=f"{part.name} exists: its run is not finished. {_CONTINUE}"
            if os.path.isfile(part)  # noqa: PTH113
            else "Check the path.",
        )
    seal = seal_of(path)
    if seal is not None and not seal.intact:
        raise ResultFileError(
            "the structure of the file was changed after it was written", remedy=REMEDY
        )
    if not h5py.is_hdf5(path):
        with path.open("rb") as plain:
            what, _ = describe(plain.read(_HEAD))
        raise ResultFileError(
            f"this is {what}, not an HDF5 file",
            remedy="Give the file that gradscope compute -o wrote.",
        )
    try:
        return h5py.File(path, "r", locking=False), seal
    except OSError as error:
        if "truncated" not in str(error):
            raise
        raise ResultFileError(
            "the file is truncated", remedy="Take another copy of the file, or compute it again."
        ) from error


def _checked(file: h5py.File, size: int, seal: Seal | None) -> OpenFile:
    """Check the structure of an open file of `size` bytes."""
    _attributes(file, size)
    found = file.attrs.get("format")
    if not isinstance(found, str) or found != FORMAT:
        raise ResultFileError(
            "this HDF5 file was not written by gradscope",
            remedy="Give the file that gradscope compute -o wrote.",
        )
    version = file.attrs.get("format_version")
    if not isinstance(version, int | np.integer) or version > FORMAT_VERSION:
        raise ResultFileError(
            f"the file has format version {version}; this gradscope reads {FORMAT_VERSION}",
            remedy="Install a newer gradscope.",
        )
    if file.attrs.get("status") != "complete":
        raise ResultFileError(
            "the file is not finished: its run was stopped, or is still in progress",
            remedy=_CONTINUE,
        )
    if seal is None:
        raise ResultFileError(
            "the file has no seal: it was truncated, or changed after it was written",
            remedy=REMEDY,
        )
    _require_contents(file, dict(_group(file, "", size, seen=set(), depth=0)))
    return OpenFile(file, Checks(file.id.get_vfd_handle, seal.table), seal.digest)


@dataclass(frozen=True)
class Item:
    """A group or data set in a file."""

    shape: tuple[int, ...] | None  # the shape of a data set, or None for a group
    kind: str  # numpy's letter for the kind of numbers
    attributes: frozenset[str]  # the names of the attributes


def _attributes(item: h5py.HLObject, size: int) -> frozenset[str]:
    """Check that attributes are texts or short lists; return their names."""
    names = set()
    for k in range(h5py.h5a.get_num_attrs(item.id)):
        attribute = h5py.h5a.open(item.id, index=k)
        name = attribute.name.decode(errors="replace")
        if name in ("DIMENSION_LIST", "REFERENCE_LIST") and isinstance(item, h5py.Dataset):
            continue  # gradscope does not read these
        dtype, shape = attribute.dtype, attribute.shape
        known = dtype.kind in _KINDS or h5py.check_string_dtype(dtype)
        known = known and shape is not None
        if not known or prod(shape) * dtype.itemsize > min(size, _ATTRIBUTE_BYTES):
            raise _refused(item, f"has an attribute {name!r} that is not a text or a short list")
        names.add(name)
    return frozenset(names)


def _group(
    group: h5py.Group, path: str, size: int, seen: set[int], depth: int
) -> Iterator[tuple[str, Item]]:
    """Check a group and its contents; yield the path and `Item` of each."""
    address = h5py.h5o.get_info(group.id).addr
    if address in seen or depth >= _DEPTH:
        raise _refused(group, "is linked in a loop or nested too deep")
    seen.add(address)
    yield path, Item(None, "", _attributes(group, size))
    for link in group.id:
        name = link.decode("utf-8", "surrogateescape")
        if group.id.links.get_info(link).type != h5py.h5l.TYPE_HARD:
            raise _refused(group, f"has a soft or external link {name!r}")
        item, inner = h5py.h5o.open(group.id, link), f"{path}/{name}"
        if isinstance(item, h5py.h5g.GroupID):
            yield from _group(h5py.Group(item), inner, size, seen, depth + 1)
        elif isinstance(item, h5py.h5d.DatasetID):
            yield inner, _dataset(h5py.Dataset(item), inner, size)
        else:
            raise _refused(group, f"holds {name!r}, which is not an array")


def _dataset(dataset: h5py.Dataset, path: str, size: int) -> Item:
    """Check the storage of a data set."""
    attributes, plist = _attributes(dataset, size), dataset.id.get_create_plist()
    layout, dtype, shape = plist.get_layout(), dataset.id.dtype, dataset.id.shape
    found = Item(shape, dtype.kind, attributes)
    room, *parts = path.strip("/").split("/")
    if room == "chains" and len(parts) > 1 and SOURCES in dataset.file.attrs:
        is_row = dtype.kind in _KINDS and not dataset.file[f"chains/{parts[0]}"].attrs["reduced"]
        if is_row and layout == h5py.h5d.VIRTUAL:
            return found  # the file is marked as virtual
    if plist.get_external_count() or layout == h5py.h5d.VIRTUAL:
        raise _refused(dataset, "takes its data from other files")
    is_text = path in ("/samples/id", "/samples/preview") and dtype.kind == "S"
    if not (is_text or dtype.kind in _KINDS) or shape is None:
        raise _refused(dataset, f"holds {dtype}, not numbers")
    if not parts or (len(parts) == _DEPTH - 1 and parts[-1] not in AXES):
        return found  # the scale of an axis, whose data are never read
    filters, item = filters_of(plist), dataset.id.get_type().get_size()  # not numpy's: bfloat16
    codes = [code for code, _ in filters]
    if not is_known(filters, path):
        raise _refused(dataset, f"uses the filters {codes}, which gradscope does not write")
    if layout == h5py.h5d.CHUNKED and not index_is_sound(dataset, size):
        raise _refused(dataset, "has a wrong index of chunks")
    if layout == h5py.h5d.CHUNKED and h5py.h5z.FILTER_FLETCHER32 not in codes:
        raise _refused(dataset, "has chunks without checksums")
    if dataset.id.get_space().get_simple_extent_dims(True) != shape:
        raise _refused(dataset, "is resizable")
    claimed = prod(shape) * item
    if layout != h5py.h5d.CHUNKED and claimed != dataset.id.get_storage_size():
        raise _refused(dataset, f"claims {claimed:,} bytes that are not stored")
    if not is_compressed(filters):
        if claimed > size:
            raise _refused(dataset, f"claims {claimed:,} bytes in a file of {size:,}")
        return found
    chunk = prod(dataset.chunks) * item
    grid = prod(-(-s // c) for s, c in zip(shape, dataset.chunks, strict=True))
    if chunk > _CHUNK_BYTES:  # larger than any chunk that gradscope writes
        raise _refused(dataset, f"has chunks that claim {chunk:,} bytes each")
    if dataset.id.get_num_chunks() != grid:
        raise _refused(dataset, f"claims {grid:,} chunks that are not all stored")
    return found


def _refused(item: h5py.HLObject, what: str) -> ResultFileError:
    return ResultFileError(
        f"{item.name} {what}",
        remedy="gradscope does not write such files and does not open them. Give the file that "
        "gradscope compute -o wrote.",
    )


def _require_contents(file: h5py.File, items: Mapping[str, Item]) -> None:
    """Check that a file has all its parts, and that each array has one row per sample."""
    inside: dict[str, list[str]] = {path: [] for path, item in items.items() if item.shape is None}
    for path in items:
        if path:
            inside[path.rpartition("/")[0]].append(path)

    def require_group(path: str, what: str) -> None:
        _require(path in inside, f"there is no {what}")

    def require_attributes(path: str, *names: str, always: bool = True) -> None:
        for name in names:
            there = name in items[path].attributes
            sound = _ATTRIBUTES[name](file[path].attrs[name]) if there else not always
            _require(sound, f"the attribute {name!r} of {path} is missing or of another type")

    def require_array(path: str, n: int | None) -> None:
        """Check an array, or a group of factors, with one row for each of n samples if given."""
        require_attributes(path, "overflowed", always=False)
        shape = items[path].shape
        if shape is not None:
            _require(n is None or shape[:1] == (n,), f"{path} has the shape {shape}, not {n} rows")
            return
        require_attributes(path, "kind", "dtype", "shape")
        for factor in inside[path]:
            _require(bool(items[factor].shape), f"{factor} is not an array of factors")

    for group, paths in inside.items():
        names = {unescape(path.rpartition("/")[2]) for path in paths}
        _require(len(names) == len(paths), f"{group} names a parameter twice")
    for name in (*TABLES, "chains"):
        require_group(f"/{name}", f"group /{name}")
    for name, kinds in _COLUMNS.items():
        column = items.get(f"/samples/{name}")
        sound = column is not None and column.kind in kinds and len(column.shape or ()) == 1
        _require(sound, f"the column /samples/{name} is missing or of another type")
    n = (items["/samples/index"].shape or ())[0]
    for path in (path for table in TABLES for path in inside[f"/{table}"]):
        _require(items[path].shape == (n,), f"{path} is not a column of {n} samples")
    for k in range(len(inside["/chains"])):
        path = f"/chains/{k}"
        require_group(path, f"chain {k}")
        require_attributes(path, "chain", "reduced")
        reduced = file[path].attrs["reduced"]
        for array in inside[path]:
            require_array(array, None if reduced else n)
        if file[path].attrs["chain"] in _PLAIN:
            _require_parameters(file, path, items, inside[path], () if reduced else (n,))
    for owner in inside.get("/states", []):
        _require(owner in inside, f"{owner} is not a group")
        require_attributes(owner, KEYS)
        for path in inside[owner]:
            require_array(path, None)


def _require_parameters(
    file: h5py.File, path: str, items: Mapping[str, Item], arrays: list[str], front: tuple[int, ...]
) -> None:
    """Check that the arrays of a chain `identity` or `mean` have the parameters' shapes."""
    document = json.loads(str(file.attrs.get("parameters")))
    sound = isinstance(document, dict) and all(isinstance(s, list) for s in document.values())
    _require(sound, "the attribute 'parameters' does not hold shapes")
    wanted = {name: (*front, *shape) for name, shape in document.items()}
    found = {}
    for array in arrays:
        shape = items[array].shape
        if shape is None:
            shape = (*front, *(int(s) for s in file[array].attrs["shape"]))
        found[unescape(array.rpartition("/")[2])] = shape
    none = not found and not front  # a mean has no arrays if no sample was finite
    _require(none or wanted == found, f"names or shapes in {path} differ from the parameters")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ResultFileError(
            f"{what}: this is not a result file, or it is damaged",
            remedy="Give the file that gradscope compute -o wrote.",
        )
