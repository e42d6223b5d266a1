"""The last steps: results, axes and seal; verification; and the move to the final place."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from gradscope.errors import OutputError, ResultFileError
from gradscope.storage import integrity, scales
from gradscope.storage.build import add_results, add_states
from gradscope.storage.disk import Disk
from gradscope.storage.editing import editing
from gradscope.storage.names import escape
from gradscope.storage.places import place_of
from gradscope.storage.plan import States, to_json
from gradscope.storage.reader import GradientFile, open_file
from gradscope.storage.relayout import ASIDE
from gradscope.storage.sidecar import Paths
from gradscope.storage.slots import Slots

Look = Callable[[GradientFile], None]


def complete(
    paths: Paths,
    descriptor: int,
    disk: Disk,
    slots: Slots,
    results: Mapping[int, Mapping[str, Tensor]],
    certificate: Mapping[str, Any],
    norm_attributes: Mapping[str, Mapping[str, float]],
    states: States,
    look: Look | None = None,
) -> None:
    """Turn the `.part`, whose rows are all there, into the final file.

    What is to be reported of it is looked at when it is opened to be verified.
    """
    rows = {path: s for path, s in slots.streams.items() if not path.startswith(f"/{ASIDE}/")}
    with editing(descriptor) as file:
        if ASIDE in file:
            del file[ASIDE]
        made = [pair for k in results for pair in add_results(file[f"chains/{k}"], results[k])]
        made += add_states(file, states)
        for path, stream in rows.items():
            if stream.mark.overflowed:
                file[path].attrs["overflowed"] = stream.mark.overflowed
        for name, attributes in norm_attributes.items():
            for key, number in attributes.items():
                file[f"norms/{escape(name)}"].attrs[key] = float(number)
        for table in integrity.TABLES:
            for column in file[table].values():
                column.attrs["sha256"] = integrity.column_digest(column[()])
        scales.attach_all(file)
        packed = [place_of(file[path]) for path, stream in rows.items() if stream.place.packed]
        file.attrs["certificate"] = to_json(certificate)
        file.attrs["status"] = "complete"
    for stream, value in made:
        disk.write(stream.add(value))
    disk.wait()
    places = [s.place for s in rows.values() if not s.place.packed]
    places += [s.place for s, _ in made if s.place.checked]
    integrity.write_seal(descriptor, integrity.joined([*places, *packed]))
    _verify(paths, look)
    os.fsync(descriptor)
    paths.part.replace(paths.final)
    paths.progress.unlink(missing_ok=True)
    _sync_folder(paths)


def _verify(paths: Paths, look: Look | None) -> None:
    """Open the file as a reader does, and read its tables and the end of every array."""
    try:
        with open_file(paths.part) as file:
            for name in file.norms:
                np.asarray(file.norms[name])
            for chain in file.chains:
                for array in chain.values():
                    array[-1:]
            if look is not None:
                look(file)
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
