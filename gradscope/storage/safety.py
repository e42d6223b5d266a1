"""Checks before anything is read: a result file comes from somewhere else.

HDF5 can be made to read other files (external storage, virtual data sets, links), to claim
petabytes, and to load plugins. A result file needs none of this, so none of it is accepted; except
virtual rows of a file that says so, which are never read through HDF5.
"""

from math import prod

import h5py

from gradscope.core.chunks import index_is_sound
from gradscope.errors import ResultFileError
from gradscope.storage.compression import is_compressed, is_known
from gradscope.storage.factors import AXES
from gradscope.storage.layout import CHUNK_BYTES

SOURCES = "sources"  # the attribute of a file whose rows are in other files: see `joined`

_DEPTH = 4  # /chains/0/NAME/left
_CHUNK_BYTES = 2 * CHUNK_BYTES
_KINDS = "biufc"
_ATTRIBUTE_BYTES = 2**16


def check(file: h5py.File, size: int) -> None:
    """Check the whole structure of a file of `size` bytes.

    Raises:
        ResultFileError: Something is not of the kind that a result file is made of.
    """
    _check_group(file, size, seen=set(), depth=0)


def check_attributes(item: h5py.HLObject, size: int) -> None:
    """Check that attributes are texts, or short.

    Raises:
        ResultFileError: An attribute is of an unknown type, or claims more than the file holds.
    """
    for k in range(h5py.h5a.get_num_attrs(item.id)):
        attribute = h5py.h5a.open(item.id, index=k)
        name = attribute.name.decode(errors="replace")
        if name in ("DIMENSION_LIST", "REFERENCE_LIST") and isinstance(item, h5py.Dataset):
            continue  # never read here
        dtype = attribute.dtype
        known = dtype.kind in _KINDS or h5py.check_string_dtype(dtype)
        claimed = prod(attribute.shape or ()) * dtype.itemsize
        known = known and attribute.shape is not None
        if not known or claimed > min(size, _ATTRIBUTE_BYTES):
            raise _refused(item, f"has an attribute {name!r} that is not a text or a short list")


def _check_group(group: h5py.Group, size: int, seen: set[int], depth: int) -> None:
    address = h5py.h5o.get_info(group.id).addr
    if address in seen or depth >= _DEPTH:
        raise _refused(group, "is linked in a loop or nested too deep")
    seen.add(address)
    check_attributes(group, size)
    for name in group:
        if group.id.links.get_info(name.encode("utf-8", "surrogateescape")).type != (
            h5py.h5l.TYPE_HARD
        ):
            raise _refused(group, f"has a link {name!r} to somewhere else")
        item = group[name]
        if isinstance(item, h5py.Group):
            _check_group(item, size, seen, depth + 1)
        elif isinstance(item, h5py.Dataset):
            _check_dataset(item, size)
        else:
            raise _refused(group, f"holds {name!r}, which is no array")


def _check_dataset(dataset: h5py.Dataset, size: int) -> None:
    check_attributes(dataset, size)
    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    if layout == h5py.h5d.VIRTUAL and dataset.dtype.kind in _KINDS and _is_row(dataset):
        return
    if plist.get_external_count() or layout == h5py.h5d.VIRTUAL:
        raise _refused(dataset, "takes its data from other files")
    is_text = dataset.name == "/samples/id" and dataset.dtype.kind == "S"
    if not (is_text or dataset.dtype.kind in _KINDS) or dataset.shape is None:
        raise _refused(dataset, f"holds {dataset.dtype}, not numbers")
    if _is_axis(dataset.name):
        return  # only a name and a size; its data are never read
    filters = [plist.get_filter(k)[0] for k in range(plist.get_nfilters())]
    if not is_known(dataset):
        raise _refused(dataset, f"needs the filters {filters}, which are not known here")
    if layout == h5py.h5d.CHUNKED and not index_is_sound(dataset, size):
        raise _refused(dataset, "has an index of chunks that is wrong")
    if layout == h5py.h5d.CHUNKED and h5py.h5z.FILTER_FLETCHER32 not in filters:
        raise _refused(dataset, "has chunks without checksums")
    if dataset.maxshape != dataset.shape:
        raise _refused(dataset, "can grow, and its chunks may claim anything")
    claimed = prod(dataset.shape) * dataset.id.get_type().get_size()  # not numpy's: see bfloat16
    if layout != h5py.h5d.CHUNKED and claimed != dataset.id.get_storage_size():
        raise _refused(dataset, f"claims {claimed:,} bytes that are not stored")
    if is_compressed(dataset):
        _check_compressed(dataset)
    elif claimed > size:
        raise _refused(dataset, f"claims {claimed:,} bytes in a file of {size:,}")


def _check_compressed(dataset: h5py.Dataset) -> None:
    """Check that each chunk is there and no larger than ours: so no more is claimed than that."""
    chunk = prod(dataset.chunks) * dataset.id.get_type().get_size()
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
