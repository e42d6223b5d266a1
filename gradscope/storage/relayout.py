"""Giving a parameter whose blocks change their structure during a run a dense layout.

The old factors stay in the file, aside, until it is completed: should the run be stopped before
the change is recorded, they are still needed.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import h5py
import torch

from gradscope.blocks.base import TILE_BYTES
from gradscope.storage.checks import Checks
from gradscope.storage.columns import create_dense, rows_array
from gradscope.storage.compression import compression_of
from gradscope.storage.disk import Disk
from gradscope.storage.editing import editing
from gradscope.storage.factors import stored_rows
from gradscope.storage.formats import named
from gradscope.storage.names import unescape
from gradscope.storage.slots import ASIDE, Slots, bind
from gradscope.storage.stream import Stream


def make_dense(
    part: Path,
    descriptor: int,
    disk: Disk,
    slots: Slots,
    columns: Sequence[str],
    completed: int,
    batch: int,
) -> Slots:
    """Make the factored groups `columns` dense data sets.

    Args:
        part: The unfinished file.
        descriptor: The same, open.
        disk: What writes to it.
        slots: Its places now.
        columns: The paths of the groups.
        completed: The rows that are there already.
        batch: The rows of a batch.

    Returns:
        The places from now on.
    """
    for path, stream in slots.streams.items():
        if path.startswith(tuple(f"{column}/" for column in columns)):
            disk.write(stream.held_back())
    disk.wait()
    with h5py.File(part, "r", locking=False) as file:
        records = slots.records(slots.marks, slots.places(file), disk.packer)
    with editing(descriptor) as file:
        moved = {column: _move(file, column, batch) for column in columns}
        made = bind(file)
        made.take_over(slots)
    with h5py.File(part, "r", locking=False) as file:
        checks = Checks(lambda: descriptor, records)
        for column, aside in moved.items():
            _copy(file[aside], checks, made.streams[column], completed, disk)
        disk.wait()
    return made


def _move(file: h5py.File, column: str, batch: int) -> str:
    """Put a factored group aside, create a dense data set in its place; return where it went."""
    place, aside = PurePosixPath(column), file.require_group(ASIDE)
    moved = f"{aside.name}/{len(aside)}"
    file.move(column, moved)
    old = file[moved]
    n = next(iter(old.values())).shape[0]
    shape = (n, *(int(s) for s in old.attrs["shape"]))
    dtype = named(str(old.attrs["dtype"]))
    compression = compression_of(next(iter(old.values())))
    array = rows_array(shape, dtype, batch, compression)
    create_dense(file[str(place.parent)], unescape(place.name), array)
    return moved


def _copy(old: h5py.Group, checks: Checks, new: Stream, completed: int, disk: Disk) -> None:
    row = max(1, new.place.size // new.shape[0])
    step = max(1, TILE_BYTES // row // new.together) * new.together
    for at in range(0, completed, step):
        rows = stored_rows(old, slice(at, min(at + step, completed)), checks)
        disk.write(new.add(torch.from_numpy(rows).to(new.dtype)))
