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
from gradscope.storage.plan import States, to_json
from gradscope.storage.reader import GradientFile, open_file
from gradscope.storage.resume import require_intact
from gradscope.storage.sidecar import Paths
from gradscope.storage.slots import ASIDE, Slots
from gradscope.storage.whole import sync_folder

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

    Every byte of it is read back before it gets there, and compared with what it was in memory.
    What is to be reported of it is looked at when it is opened to be verified.
    """
    with editing(descriptor) as file:
        if ASIDE in file:
            del file[ASIDE]
        slots = slots.without_aside
        made = [pair for k in results for pair in add_results(file[f"chains/{k}"], results[k])]
        made += add_states(file, states)
        for path, stream in slots.streams.items():
            if stream.mark.overflowed:
                file[path].attrs["overflowed"] = stream.mark.overflowed
        for name, attributes in norm_attributes.items():
            for key, number in attributes.items():
                file[f"norms/{escape(name)}"].attrs[key] = float(number)
        scales.attach_all(file)
        places = slots.places(file)
        file.attrs["certificate"] = to_json(certificate)
        file.attrs["status"] = "complete"
    for stream, values in made:
        for value in values:
            disk.write(stream.add(value))
    disk.wait()
    records = [slots.records(slots.marks, places, disk.packer)]
    records += [stream.records(stream.mark) for stream, _ in made]
    table = np.concatenate(records)
    table = table[np.argsort(table[:, 0])]
    require_intact(paths.part, descriptor, table)
    integrity.write_seal(descriptor, table)
    _verify(paths, look)
    os.fsync(descriptor)
    paths.part.replace(paths.final)
    paths.progress.unlink(missing_ok=True)
    sync_folder(paths.final)


def _verify(paths: Paths, look: Look | None) -> None:
    """Open the file as a reader does, with all its checks."""
    try:
        with open_file(paths.part) as file:
            if look is not None:
                look(file)
    except ResultFileError as error:
        raise OutputError(
            f"the file just written does not verify: {error.what}",
            where=str(paths.part),
            remedy="The disk or its driver may be failing; give --resume to complete it again.",
        ) from error
