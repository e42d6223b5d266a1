"""The last steps: results, axes and seal; verification; and the move to the final place."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from gradscope.errors import OutputError, ResultFileError
from gradscope.storage.format.files import sync_folder
from gradscope.storage.format.numbers import escape
from gradscope.storage.format.seal import write_seal
from gradscope.storage.plan import States, to_json
from gradscope.storage.read.file import GradientFile, open_file
from gradscope.storage.write.create import attach_scales, create_results, create_states
from gradscope.storage.write.journal import Paths, require_intact
from gradscope.storage.write.region import ASIDE, Region, Regions
from gradscope.storage.write.target import Target

Look = Callable[[GradientFile], None]


@dataclass(frozen=True)
class Ending:
    """What a file gets besides its rows."""

    results: Mapping[int, Mapping[str, Tensor]]  # {chain: {name: (*shape)}} for the reduced chains
    certificate: Mapping[str, Any]  # stored as JSON
    # {parameter: {attribute: value}}, for /norms
    norm_attributes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # {owner: {key: tensor}}, for /states: what files are merged from
    states: States = field(default_factory=dict)
    look: Look | None = None  # called with the file while it is open for its verification


def complete(
    paths: Paths, descriptor: int, target: Target, regions: Regions, ending: Ending
) -> None:
    """Turn the `.part`, whose rows are all there, into the final file.

    Every byte of it is read back before it gets there, and compared with what it was in memory.
    """
    with target.editing() as file:
        if ASIDE in file:
            del file[ASIDE]
        regions = regions.without_aside
        results = ending.results.items()
        filling = {
            p: v for k, r in results for p, v in create_results(file[f"chains/{k}"], r).items()
        }
        filling |= create_states(file, ending.states)
        for path, region in regions.by_path.items():
            if region.mark.overflowed:
                file[path].attrs["overflowed"] = region.mark.overflowed
        for name, attributes in ending.norm_attributes.items():
            for key, number in attributes.items():
                file[f"norms/{escape(name)}"].attrs[key] = float(number)
        attach_scales(file)
        made = {path: Region(file[path]) for path in filling}
        file.attrs["certificate"] = to_json(ending.certificate)
        file.attrs["status"] = "complete"
    for path, values in filling.items():
        for value in values:
            made[path].add(value, target)
    target.close()
    records = [regions.records(regions.marks), *(r.records(r.mark) for r in made.values())]
    table = np.concatenate(records)
    table = table[np.argsort(table[:, 0])]
    require_intact(paths.part, descriptor, table)
    write_seal(descriptor, table)
    _verify(paths, ending.look)
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
