"""The last steps: results, axes and seal; verification; and the move to the final place."""

import os
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
from torch import Tensor

from gradscope.errors import OutputError, ResultFileError
from gradscope.storage import integrity, scales
from gradscope.storage.build import add_results
from gradscope.storage.editing import editing
from gradscope.storage.names import escape
from gradscope.storage.plan import to_json
from gradscope.storage.reader import open_file
from gradscope.storage.sidecar import Paths
from gradscope.storage.undo import undoable


def complete(
    paths: Paths,
    descriptor: int,
    results: Mapping[int, Mapping[str, Tensor]],
    certificate: Mapping[str, Any],
    norm_attributes: Mapping[str, Mapping[str, float]],
) -> None:
    """Turn the closed `.part`, whose rows are all there, into the final file."""
    with undoable(paths, descriptor, keep=True):
        with editing(descriptor) as file:
            for k, values in results.items():
                add_results(file[f"chains/{k}"], values)
            for name, attributes in norm_attributes.items():
                for key, value in attributes.items():
                    file[f"norms/{escape(name)}"].attrs[key] = float(value)
            for table in integrity.TABLES:
                for column in file[table].values():
                    column.attrs["sha256"] = integrity.column_digest(column[()])
            scales.attach_all(file)
            file.attrs["certificate"] = to_json(certificate)
            file.attrs["status"] = "complete"
        _seal(paths, descriptor)
        _verify(paths)
        os.fsync(descriptor)
    paths.part.replace(paths.final)  # from here on nothing is undone
    paths.clear()
    _sync_folder(paths)


def _seal(paths: Paths, descriptor: int) -> None:
    with h5py.File(paths.part, "r", locking=False) as file:
        taken = integrity.extents(file)
    integrity.write_seal(descriptor, taken)


def _verify(paths: Paths) -> None:
    """Open the file as a reader does, and read its tables and the ends of every array."""
    try:
        with open_file(paths.part) as file:
            for column in (file.samples, file.norms):
                for name in column:
                    np.asarray(column[name])
            for chain in file.chains:
                for array in chain.values():
                    if chain.reduced:
                        array[...]
                    else:
                        array[:1], array[-1:]
    except ResultFileError as error:
        raise OutputError(
            f"the file just written does not verify: {error.what}",
            where=str(paths.part),
            remedy="The disk or its driver may be failing; give --resume to complete it again.",
        ) from error


def _sync_folder(paths: Paths) -> None:
    if os.name != "posix":
        return
    folder = os.open(paths.final.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
