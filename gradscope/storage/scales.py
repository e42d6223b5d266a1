"""Dimension scales: names for axes, so that xarray and other netCDF readers open a group as it is.

`/sample` is the sample axis of everything. `/axisJ_S` is axis J of a parameter where it has size S;
parameters share them. A factored group has its own scales k, t, r, c or t, d. They hold no data.
"""

import h5py

from gradscope.storage.factors import AXES

_NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable. "  # netCDF-4's own marker


def attach_all(file: h5py.File) -> None:
    """Name every axis of every data set under /samples, /norms and /chains."""
    for table in ("samples", "norms"):
        for dataset in file[table].values():
            _attach(dataset, 0, _scale(file, "sample", dataset.shape[0]))
    for chain in file["chains"].values():
        for item in chain.values():
            if isinstance(item, h5py.Dataset):
                _attach_array(file, item, first=0 if chain.attrs["reduced"] else 1)
            else:
                _attach_factors(file, item)


def _attach_array(file: h5py.File, dataset: h5py.Dataset, first: int) -> None:
    for axis, size in enumerate(dataset.shape):
        name = "sample" if axis < first else f"axis{axis - first}_{size}"
        _attach(dataset, axis, _scale(file, name, size))


def _attach_factors(file: h5py.File, group: h5py.Group) -> None:
    for part in [name for name in group if name in AXES]:
        dataset = group[part]
        _attach(dataset, 0, _scale(file, "sample", dataset.shape[0]))
        for axis, name in enumerate(AXES[part], start=1):
            _attach(dataset, axis, _scale(group, name, dataset.shape[axis]))


def _scale(group: h5py.Group, name: str, size: int) -> h5py.Dataset:
    if name in group:
        return group[name]
    # track_order lets the list of attached data sets grow beyond 64 KB (4,085 of them)
    scale = group.create_dataset(name, (size,), ">f4", track_order=True)
    scale.make_scale(f"{_NO_VARIABLE}{size:10d}")
    return scale


def _attach(dataset: h5py.Dataset, axis: int, scale: h5py.Dataset) -> None:
    dataset.dims[axis].attach_scale(scale)
