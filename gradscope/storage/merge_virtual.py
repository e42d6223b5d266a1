"""Columns whose rows stay in the files that are merged: HDF5's virtual data sets.

Other programs read them through HDF5, which looks for the files beside the virtual one and reads
what is missing as the fill value: NaN here, and -1 for indices. Ours never do: see `joined`.
"""

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from gradscope.errors import RefusedError
from gradscope.storage.columns import describe, factors_group
from gradscope.storage.formats import h5_type, numpy_dtype
from gradscope.storage.layout import Shape, utf8_links
from gradscope.storage.merge_forms import DENSE, in_table
from gradscope.storage.merge_parts import Parts
from gradscope.storage.names import unescape
from gradscope.storage.plan import to_json
from gradscope.storage.safety import SOURCES


def create_virtual(file: h5py.File, parts: Parts, folder: Path) -> None:
    """Create virtual data sets for the rows of all chains, and record where they are.

    Args:
        file: In `folder`.
        parts: The files that have the rows.
        folder: What their paths are relative to.

    Raises:
        RefusedError: A column's rows lie in another form in some files than in others.
    """
    if parts.uneven:
        raise RefusedError(
            f"{', '.join(sorted(parts.uneven))}: stored as factors of other sizes in other files, "
            "which one data set cannot refer to",
            where="virtual",
            remedy="Merge without --virtual, or compute with --layout dense.",
        )
    file.attrs[SOURCES] = to_json(_records(parts, folder))
    for path, form in parts.forms.items():
        if in_table(path):
            continue
        place, _, escaped = path.rpartition("/")
        group, name = file[place], unescape(escaped)
        if form.kind is None:
            shape, dtype = form.parts[DENSE]
            describe(_create(group, escaped, shape, dtype, path, parts, folder), name, "dense")
        else:
            group = factors_group(group, name, form.kind, form.shape, form.dtype)
            for part, (shape, dtype) in form.parts.items():
                _create(group, part, shape, dtype, f"{path}/{part}", parts, folder)


def _records(parts: Parts, folder: Path) -> list[dict[str, Any]]:
    """Return what the file says of those that have its rows."""
    return [
        {
            "path": os.path.relpath(part.path, folder),
            "seal": part.seal.hex(),
            "rows": [part.start - parts.start, part.stop - parts.start],
        }
        for part in parts.files
    ]


def _create(
    group: h5py.Group,
    escaped: str,
    row: Shape,
    dtype: torch.dtype,
    path: str,
    parts: Parts,
    folder: Path,
) -> h5py.Dataset:
    """Create a data set (N, *row) whose rows are in the data sets `path` of the files."""
    space = h5py.h5s.create_simple((len(parts), *row))
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_obj_track_times(False)  # the same run gives the same bytes
    plist.set_fill_value(_fill(dtype))
    for part in parts.files:
        source = h5py.h5s.create_simple((len(part), *row))
        if not source.get_simple_extent_npoints():
            continue
        space.select_hyperslab((part.start - parts.start, *[0] * len(row)), (len(part), *row))
        names = (os.path.relpath(part.path, folder), path)
        plist.set_virtual(space, *(_literal(name) for name in names), source)
    space.select_all()
    made = h5py.h5d.create(group.id, escaped.encode(), h5_type(dtype), space, plist, utf8_links())
    return h5py.Dataset(made)


def _fill(dtype: torch.dtype) -> np.ndarray:
    numbers = numpy_dtype(dtype)
    return np.array(np.nan if numbers.kind in "fc" else -1, numbers)


def _literal(name: str) -> bytes:
    """Return a name as HDF5 takes it where %b stands for a number."""
    return name.replace("%", "%%").encode("utf-8", "surrogateescape")
