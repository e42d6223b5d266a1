"""Giving a parameter whose blocks change their structure during a run a dense layout."""

from pathlib import PurePosixPath

import h5py
import numpy as np

from gradscope.blocks.base import TILE_BYTES
from gradscope.storage.columns import create_dense
from gradscope.storage.editing import editing
from gradscope.storage.factors import stored_rows
from gradscope.storage.layout import write_rows
from gradscope.storage.names import unescape
from gradscope.storage.sidecar import Paths
from gradscope.storage.undo import undoable

_ASIDE = "replaced"


def make_dense(
    paths: Paths, descriptor: int, columns: list[str], completed: int, batch: int
) -> None:
    """Rewrite the factored groups `columns` of the closed `.part` as dense data sets."""
    with undoable(paths, descriptor):
        with editing(descriptor) as file:
            aside = file.create_group(_ASIDE)
            for k, column in enumerate(columns):
                file.move(column, f"{aside.name}/{k}")
                _create(file, column, aside[str(k)], batch)
        with editing(descriptor) as file:
            for k, column in enumerate(columns):
                _copy(file[f"{_ASIDE}/{k}"], file[column], completed)
            del file[_ASIDE]


def _create(file: h5py.File, column: str, old: h5py.Group, batch: int) -> None:
    place = PurePosixPath(column)
    n = next(iter(old.values())).shape[0]
    shape = (n, *(int(s) for s in old.attrs["shape"]))
    chain, dtype = file[str(place.parent)], np.dtype(str(old.attrs["dtype"]))
    create_dense(chain, unescape(place.name), shape, dtype, batch)


def _copy(old: h5py.Group, new: h5py.Dataset, completed: int) -> None:
    row = max(1, new.dtype.itemsize * int(np.prod(new.shape[1:])))
    together = new.chunks[0] if new.chunks else 1
    step = max(1, TILE_BYTES // row // together) * together
    for at in range(0, completed, step):
        write_rows(new, at, stored_rows(old, slice(at, min(at + step, completed))))
