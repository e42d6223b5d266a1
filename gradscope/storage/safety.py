"""Checks before anything is read: a result file comes from somewhere else.

HDF5 can be made to read other files (external storage, virtual data sets, links), to claim
petabytes, and to load plugins. A result file needs none of this, so none of it is accepted; except
virtual rows of a file that says so, which are never read through HDF5.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import h5py

from gradscope.core.chunks import index_is_sound
from gradscope.errors import ResultFileError
from gradscope.storage.compression import filters_of, is_compressed, is_known
from gradscope.storage.factors import AXES
from gradscope.storage.layout import CHUNK_BYTES

SOURCES = "sources"  # the attribute of a file whose rows are in other files: see `joined`

_DEPTH = 4  # /chains/0/NAME/left
_CHUNK_BYTES = 2 * CHUNK_BYTES
_KINDS = "biufc"
_ATTRIBUTE_BYTES = 2**16


@dataclass(frozen=True)
class Item:
    """What is in a file at one path.

    Attributes:
        shape: Of a data set; None for a group.
        kind: numpy's letter for the kind of its numbers.
        attributes: The names of its attributes.
    """

    shape: tuple[int, ...] | None
    kind: str
    attributes: frozenset[str]


def check(file: h5py.File, size: int) -> dict[str, Item]:
    """Check the whole structure of a file of `size` bytes; return what is in it, by path.

    Raises:
        ResultFileError: Something is not of the kind that a result file is made of.
    """
    return dict(_group(file, "", size, seen=set(), depth=0))


def check_attributes(item: h5py.HLObject, size: int) -> frozenset[str]:
    """Check that attributes are texts, or short; return their names.

    Raises:
        ResultFileError: An attribute is of an unknown type, or claims more than the file holds.
    """
    names = set()
    for k in range(h5py.h5a.get_num_attrs(item.id)):
        attribute = h5py.h5a.open(item.id, index=k)
        name = attribute.name.decode(errors="replace")
        if name in ("DIMENSION_LIST", "REFERENCE_LIST") and isinstance(item, h5py.Dataset):
            continue  # never read here
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
    """Check a group and all that is in it; yield each with its path."""
    address = h5py.h5o.get_info(group.id).addr
    if address in seen or depth >= _DEPTH:
        raise _refused(group, "is linked in a loop or nested too deep")
    seen.add(address)
    yield path, Item(None, "", check_attributes(group, size))
    for link in group.id:
        name = link.decode("utf-8", "surrogateescape")
        if group.id.links.get_info(link).type != h5py.h5l.TYPE_HARD:
            raise _refused(group, f"has a link {name!r} to somewhere else")
        item, inner = h5py.h5o.open(group.id, link), f"{path}/{name}"
        if isinstance(item, h5py.h5g.GroupID):
            yield from _group(h5py.Group(item), inner, size, seen, depth + 1)
        elif isinstance(item, h5py.h5d.DatasetID):
            yield inner, _dataset(h5py.Dataset(item), inner, size)
        else:
            raise _refused(group, f"holds {name!r}, which is no array")


def _dataset(dataset: h5py.Dataset, path: str, size: int) -> Item:
    """Check a data set."""
    attributes, plist = check_attributes(dataset, size), dataset.id.get_create_plist()
    layout, dtype, shape = plist.get_layout(), dataset.id.dtype, dataset.id.shape
    found = Item(shape, dtype.kind, attributes)
    if layout == h5py.h5d.VIRTUAL and dtype.kind in _KINDS and _is_row(dataset):
        return found
    if plist.get_external_count() or layout == h5py.h5d.VIRTUAL:
        raise _refused(dataset, "takes its data from other files")
    is_text = path == "/samples/id" and dtype.kind == "S"
    if not (is_text or dtype.kind in _KINDS) or shape is None:
        raise _refused(dataset, f"holds {dtype}, not numbers")
    if _is_axis(path):
        return found  # only a name and a size; its data are never read
    filters, item = filters_of(plist), dataset.id.get_type().get_size()  # not numpy's: bfloat16
    codes = [code for code, _ in filters]
    if not is_known(filters, path):
        raise _refused(dataset, f"needs the filters {codes}, which are not known here")
    if layout == h5py.h5d.CHUNKED and not index_is_sound(dataset, size):
        raise _refused(dataset, "has an index of chunks that is wrong")
    if layout == h5py.h5d.CHUNKED and h5py.h5z.FILTER_FLETCHER32 not in codes:
        raise _refused(dataset, "has chunks without checksums")
    if dataset.id.get_space().get_simple_extent_dims(True) != shape:
        raise _refused(dataset, "can grow, and its chunks may claim anything")
    claimed = prod(shape) * item
    if layout != h5py.h5d.CHUNKED and claimed != dataset.id.get_storage_size():
        raise _refused(dataset, f"claims {claimed:,} bytes that are not stored")
    if is_compressed(filters):
        _check_compressed(dataset, item)
    elif claimed > size:
        raise _refused(dataset, f"claims {claimed:,} bytes in a file of {size:,}")
    return found


def _check_compressed(dataset: h5py.Dataset, item: int) -> None:
    """Check that each chunk is there and no larger than ours: so no more is claimed than that."""
    chunk = prod(dataset.chunks) * item
    if chunk > _CHUNK_BYTES:
        raise _refused(dataset, f"has chunks that claim {chunk:,} bytes each")
    grid = prod(-(-s // c) for s, c in zip(dataset.shape, dataset.chunks, strict=True))
    if dataset.id.get_num_chunks() != grid:
        raise _refused(dataset, f"claims {grid:,} chunks that are not all stored")


def _is_row(dataset: h5py.Dataset) -> bool:
    """Whether a data set holds rows, and its file says that they are in other files."""
    room, *parts = dataset.name.strip("/").split("/")
    if room != "chains" or len(parts) < 2 or SOURCES not in dataset.file.attrs:
        return False
    return not dataset.file[f"chains/{parts[0]}"].attrs["reduced"]


def _is_axis(name: str) -> bool:
    """Whether a dimension scale belongs here: at the root, or beside a group's factors."""
    parts = name.strip("/").split("/")
    return len(parts) == 1 or (len(parts) == _DEPTH and parts[-1] not in AXES)


def _refused(item: h5py.HLObject, what: str) -> ResultFileError:
    return ResultFileError(
        f"{item.name} {what}",
        remedy="A file that gradscope wrote has nothing of the kind; it is not opened.",
    )
