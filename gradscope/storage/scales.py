"""Dimension scales: names for axes, so that xarray and other netCDF readers open a group as it is.

`/sample` is the sample axis of everything. `/axisJ_S` is axis J of a parameter where it has size S;
parameters share them. A factored group has its own scales k, t, r, c or t, d. They hold no data.

The two lists that bind a data set and its scales to each other are written as HDF5 itself would,
but each once: it writes a scale's whole list anew with every data set, which for thousands of them
takes gigabytes and minutes.

Source: HDF5 Dimension Scale Specification.
"""

from collections.abc import Iterator

import h5py
import numpy as np
from h5py import h5r

from gradscope.storage.factors import AXES
from gradscope.storage.integrity import TABLES
from gradscope.storage.layout import put_attribute
from gradscope.storage.places import datasets

_NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable. "  # netCDF-4's own marker
_LIST = np.dtype(
    {"names": ["dataset", "dimension"], "formats": [h5py.ref_dtype, "<u4"], "itemsize": 16}
)
_VECTOR = h5py.vlen_dtype(h5py.ref_dtype)


def attach_all(file: h5py.File) -> None:
    """Name every axis of every data set."""
    reduced = {k for k, chain in file["chains"].items() if chain.attrs["reduced"]}
    lists: dict[str, list[tuple[h5r.Reference, int]]] = {}  # of a scale: the axes it names
    scales: dict[str, tuple[h5py.Dataset, np.ndarray]] = {}
    for path, dataset in datasets(file):
        axes = list(_axes(path, dataset.shape, reduced))
        own = h5r.create(dataset.id, b".", h5r.OBJECT)
        vectors = np.empty(len(axes), object)
        for axis, name in enumerate(axes):
            if name not in scales:
                made = _create(file, name, dataset.shape[axis])
                scales[name] = made, np.array([made.ref], object)
            lists.setdefault(name, []).append((own, axis))
            vectors[axis] = scales[name][1]
        if axes:
            put_attribute(dataset, "DIMENSION_LIST", vectors, _VECTOR)
    for name, entries in lists.items():
        put_attribute(scales[name][0], "REFERENCE_LIST", np.array(entries, _LIST), _LIST)


def _axes(path: str, shape: tuple[int, ...], reduced: set[str]) -> Iterator[str]:
    """Yield the path of each axis's scale."""
    room, *parts = path.strip("/").split("/")
    has_samples = room in TABLES or (room == "chains" and parts[0] not in reduced)
    if has_samples:
        yield "/sample"
    if room == "chains" and len(parts) == 3:  # factors
        yield from (f"{path.removesuffix(parts[2])}{axis}" for axis in AXES[parts[2]])
    else:
        yield from (f"/axis{k}_{size}" for k, size in enumerate(shape[has_samples:]))


def _create(file: h5py.File, path: str, size: int) -> h5py.Dataset:
    # track_order lets the list of attached data sets grow beyond 64 KB (4,085 of them)
    scale = file.create_dataset(path, (size,), ">f4", track_order=True)
    scale.make_scale(f"{_NO_VARIABLE}{size:10d}")
    return scale
