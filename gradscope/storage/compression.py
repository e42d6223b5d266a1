"""Compressed rows: HDF5's own filters, and those of hdf5plugin.

A chunk goes through shuffle (which puts alike bytes together), the compression, and Fletcher-32, in
this order: the checksum is of the bytes as they are stored, and is verified before anything is
taken apart.
"""

from importlib import import_module
from typing import Any

import h5py

from gradscope.config import Compression
from gradscope.errors import GradscopeError, ResultFileError, SpecError

Filters = list[tuple[int, tuple[int, ...]]]  # code and values of each

_CODES = {"gzip": h5py.h5z.FILTER_DEFLATE, "zstd": 32015, "blosc2": 32026}
_NAMES = {code: name for name, code in _CODES.items()}
_SHUFFLE, _CHECK = h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32


def require(compression: Compression | None) -> None:
    """Check that a compression can be had here.

    Raises:
        SpecError: It needs a library that is not installed.
    """
    if compression is not None and compression.name != "gzip":
        _plugin(SpecError, f"the compression {compression.name}")


def set_filters(plist: h5py.h5p.PropDCID, compression: Compression | None) -> None:
    """Give a data set's chunks their filters.

    Raises:
        SpecError: The compression needs a library that is not installed.
    """
    if compression is not None:
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)  # how large chunks get, time will tell
        if compression.name == "gzip":
            plist.set_shuffle()
            plist.set_deflate(compression.level)
        else:
            library = _plugin(SpecError, f"the compression {compression.name}")
            if compression.name == "zstd":
                plist.set_shuffle()
                made = library.Zstd(clevel=compression.level)
            else:  # shuffles by itself
                made = library.Blosc2(cname="zstd", clevel=compression.level)
            plist.set_filter(made.filter_id, 0, made.filter_options)
    plist.set_fletcher32()


def filters_of(plist: h5py.h5p.PropDCID) -> Filters:
    """Return a data set's filters."""
    found = (plist.get_filter(k) for k in range(plist.get_nfilters()))
    return [(int(code), values) for code, _, values, _ in found]


def compression_of(dataset: h5py.Dataset) -> Compression | None:
    """Return how a data set that a run has written is compressed."""
    for code, values in filters_of(dataset.id.get_create_plist()):
        if code in _NAMES:
            place = {"gzip": 0, "zstd": 0, "blosc2": 4}[_NAMES[code]]
            level = int(values[place]) if len(values) > place else 1
            return Compression(_NAMES[code], level)
    return None


def is_compressed(filters: Filters) -> bool:
    """Whether chunks are of any size."""
    return any(code in _NAMES for code, _ in filters)


def is_known(filters: Filters, name: str) -> bool:
    """Whether the data set `name` has no other filters than these, in this order, checksum last.

    Raises:
        ResultFileError: They are known, but not to be had here.
    """
    codes = [code for code, _ in filters]
    first = [code for code in codes[:-1] if code != _SHUFFLE]
    if codes[-1:] != [_CHECK] or len(first) > 1 or any(code not in _NAMES for code in first):
        return not codes
    if first and first[0] != h5py.h5z.FILTER_DEFLATE:
        _plugin(ResultFileError, f"{name} is compressed with {_NAMES[first[0]]}, which")
    return True


def _plugin(kind: type[GradscopeError], what: str) -> Any:
    """Import hdf5plugin, which tells HDF5 of its filters."""
    try:
        return import_module("hdf5plugin")
    except ImportError as error:
        raise kind(
            f"{what} needs hdf5plugin, which is not installed",
            remedy="pip install 'gradscope[compression]'"
            + ("; or choose gzip." if kind is SpecError else "."),
        ) from error
