"""Dimension scales: names for axes, so that xarray and other netCDF readers open a group as it is.

`/sample` is the sample axis of everything. `/axisJ_S` is axis J of a parameter where it has size S;
parameters share them. A factored group has its own scales k, t, r, c or t, d. They hold no data.
"""

from collections.abc import Iterator

import h5py

from gradscope.storage.factors import AXES
from gradscope.storage.integrity import TABLES
from gradscope.storage.places import datasets

_NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable. "  # netCDF-4's own marker


def attach_all(file: h5py.File) -> None:
    """Name every axis of every data set."""
    reduced = {k for k, chain in file["chains"].items() if chain.attrs["reduced"]}
    made: dict[str, h5py.Dataset] = {}
    for path, dataset in list(datasets(file)):
        for axis, name in enumerate(_axes(path, dataset.shape, reduced)):
            if name not in made:
                made[name] = _create(file, name, dataset.shape[axis])
            h5py.h5ds.attach_scale(dataset.id, made[name].id, axis)


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
