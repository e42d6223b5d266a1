"""The journal of an unfinished `OUT.h5.part`: it records the rows that are safely on the disk.

`OUT.h5.part.progress` has the data that a run needs to resume. These are the number of complete
rows, the rows that do not fill a chunk yet, the reducers' states, the file's structure, and the
checksums of the chunks. Each commit syncs the rows and then replaces the journal atomically. The
journal is an .npz file with a JSON header and numbered arrays.
"""

import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from gradscope.errors import OutputError
from gradscope.process.shortage import is_shortage
from gradscope.storage.format.files import read, require_free, sync_folder, write, writing
from gradscope.storage.format.numbers import as_numpy
from gradscope.storage.format.seal import damage_text, damaged, gaps, joined
from gradscope.storage.plan import FilePlan, States, differences
from gradscope.storage.write.region import Mark, Regions

COMMIT_SECONDS = 1.0
COMMIT_SHARE = 20  # commits may take 1/20 of the time
COMMIT_SPEED = 2**28  # assumed bytes of states per second, before the first commit is timed
LONGEST = ".part.progress.tmp"  # the longest suffix of a file's name while it is written


@dataclass(frozen=True)
class Paths:
    """The paths of the final file, the unfinished file and the journal."""

    final: Path

    @property
    def part(self) -> Path:
        """The unfinished file."""
        return self.final.with_name(f"{self.final.name}.part")

    @property
    def progress(self) -> Path:
        """The journal."""
        return self.final.with_name(f"{self.final.name}.part.progress")


@dataclass(frozen=True)
class NonRowBytes:
    """A copy of all bytes of an unfinished file that are not rows.

    Appending rows does not change these bytes, unless rows are compressed. Completing the file or
    changing a parameter's layout does. If such a change is interrupted, the copy is restored.
    """

    size: int  # the file's size in bytes
    pieces: np.ndarray  # (m, 2) int64, start and stop of each piece of structure in the file
    data: np.ndarray  # uint8, the concatenated pieces

    @classmethod
    def of(cls, descriptor: int, regions: Regions) -> "NonRowBytes":
        """Copy all bytes outside the rows of a file, which must not be open in HDF5."""
        size = os.fstat(descriptor).st_size
        taken = joined([region.extents for region in regions.by_path.values()])
        pieces = list(gaps(taken, size))
        data = b"".join(read(descriptor, stop - start, start).data for start, stop in pieces)
        return cls(size, np.array(pieces, np.int64), np.frombuffer(data, np.uint8))

    def put_back(self, descriptor: int) -> None:
        """Restore the structure of the file."""
        position = 0
        for start, stop in self.pieces.tolist():
            write(descriptor, self.data[position : position + stop - start].data, start)
            position += stop - start
        os.ftruncate(descriptor, self.size)


@dataclass(frozen=True)
class Point:
    """The state of the file after a batch."""

    completed: int = 0  # the number of complete rows
    # a copy of the reducers' states after these rows, or None if they are too large to copy
    states: States | None = field(default_factory=dict)
    marks: Mapping[str, Mark] = field(default_factory=dict)  # {path: mark of the region}


@dataclass(frozen=True)
class Entry:
    """The content of a journal."""

    point: Point  # the last commit; in its marks, only tail and overflowed are valid
    identity: dict[str, Any]  # `FilePlan.identity` of the run
    structure: NonRowBytes  # the file's structure
    # (m, 3) int64: offset, size and CRC-32C of the complete chunks, sorted by offset
    records: np.ndarray
    replaces: bool = False  # whether the run was started with overwrite

    @classmethod
    def load(cls, path: Path) -> "Entry | None":
        """Return the journal at `path`, or None if the file does not exist."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            with np.load(io.BytesIO(data)) as found:  # verifies the archive's checksums
                header = json.loads(found["header"].tobytes())
                arrays = [found[str(k)] for k in range(len(found.files) - 1)]
        except MemoryError:
            raise
        except Exception as error:
            raise OutputError(
                "this file, which records the finished rows of a stopped run, is damaged",
                where=str(path),
                remedy="Start again with overwrite=True, or restore a copy of the file.",
            ) from error
        states: dict[str, dict[str, torch.Tensor]] = {owner: {} for owner in header["owners"]}
        for owner, key in header["keys"]:
            states[owner][key] = torch.from_numpy(arrays.pop(0))
        marks = {
            path: Mark(tail=arrays.pop(0), overflowed=lost)
            for path, lost in header["marks"].items()
        }
        structure = NonRowBytes(header["size"], arrays[0], arrays[1])
        point = Point(header["completed"], states, marks)
        return cls(point, header["identity"], structure, arrays[2], header["replaces"])

    def save(self, path: Path) -> None:
        """Write and sync the journal, then replace the file at `path`."""
        point, states = self.point, self.point.states or {}
        kept = {p: m for p, m in point.marks.items() if len(m.tail) or m.overflowed}
        keys = [(owner, key) for owner, state in states.items() for key in state]
        arrays = [as_numpy(states[owner][key]) for owner, key in keys]
        arrays += [mark.tail for mark in kept.values()]
        arrays += [self.structure.pieces, self.structure.data, self.records]
        header = {
            "completed": point.completed,
            "identity": self.identity,
            "replaces": self.replaces,
            "owners": list(states),
            "keys": keys,
            "marks": {path: mark.overflowed for path, mark in kept.items()},
            "size": self.structure.size,
        }
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        numbered: dict[str, Any] = {str(k): array for k, array in enumerate(arrays)}
        temporary = path.with_name(path.name + ".tmp")
        try:
            with temporary.open("wb") as file:
                np.savez(file, header=text, **numbered)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path)  # the next rows may not match the previous journal
        finally:
            temporary.unlink(missing_ok=True)


class Journal:
    """Commits the progress of one file."""

    def __init__(self, paths: Paths, descriptor: int, plan: FilePlan, replaces: bool) -> None:
        self.completed = 0  # the number of rows in the last commit
        # whether all writes to the disk succeeded. After a failed sync, a second sync may succeed
        # although data of the first are lost
        self.trusted = True
        self._paths, self._descriptor, self._plan = paths, descriptor, plan
        self._replaces = replaces
        self._last, self._cost = time.monotonic(), 0.0

    def is_due(self, size: int = 0) -> bool:
        """Whether enough time has passed since the last commit, given the time of a commit.

        For the first commit, the time is estimated from `size`, the bytes of the states.
        """
        cost = self._cost or size / COMMIT_SPEED
        return time.monotonic() - self._last >= max(COMMIT_SECONDS, COMMIT_SHARE * cost)

    def commit(self, point: Point, structure: NonRowBytes, records: np.ndarray) -> None:
        """Sync the rows, then save the journal."""
        begin = time.monotonic()
        with self.trusting():
            os.fsync(self._descriptor)
            entry = Entry(point, self._plan.identity, structure, records, self._replaces)
            entry.save(self._paths.progress)
        self.completed = point.completed
        self._last = time.monotonic()
        self._cost = self._last - begin

    @contextmanager
    def trusting(self) -> Iterator[None]:
        """Convert errors in the body to an `OutputError`, and stop trusting the disk."""
        try:
            with writing(self._paths.final):
                yield
        except OutputError as error:
            cause = error.__cause__
            self.trusted = cause is not None and is_shortage(cause)  # not an error of the disk
            raise


def recover(
    paths: Paths, descriptor: int, plan: FilePlan, *, overwrite: bool, resume: bool
) -> Entry | None:
    """Restore the locked `.part` to its last commit; return None if the run starts from zero."""
    unfinished = os.fstat(descriptor).st_size > 0
    if unfinished and not (overwrite or resume):
        raise OutputError(
            "an unfinished file of a stopped run exists",
            where=str(paths.part),
            remedy="Give resume=True to continue that run, or overwrite=True to start again.",
        )
    found = Entry.load(paths.progress) if unfinished and resume else None
    if overwrite and found is not None and found.identity != plan.identity:
        found = None
    may_replace = overwrite or (found is not None and found.replaces)
    require_not_there(paths, descriptor, overwrite=may_replace)
    if found is None:
        paths.progress.unlink(missing_ok=True)
        os.ftruncate(descriptor, 0)
        return None
    require_same(found.identity, plan.identity, paths.part)
    found.structure.put_back(descriptor)
    require_intact(paths.part, descriptor, found.records)
    return found


def require_not_there(paths: Paths, descriptor: int, *, overwrite: bool) -> None:
    """Raise if another process has written the final file; the `.part` must be locked."""
    try:
        require_free(
            paths.final, overwrite=overwrite, what="another process has just written this file"
        )
    except OutputError:
        if os.fstat(descriptor).st_size == 0:
            paths.part.unlink(missing_ok=True)  # created when it was opened
        raise


def require_intact(part: Path, descriptor: int, records: np.ndarray) -> None:
    """Raise if complete chunks of an unfinished file differ from `records` (m, 3)."""
    offsets = damaged(descriptor, records)
    if len(offsets):
        with h5py.File(part, "r", locking=False) as file:
            places = damage_text(file, offsets)
        raise OutputError(
            f"the unfinished file is damaged: {places} changed after they were written",
            where=str(part),
            remedy="Check the disk. Then start again with overwrite=True, or restore copies of "
            f"{part.name} and {part.name}.progress and resume.",
        )


def require_same(found: Any, wanted: Any, path: Path) -> None:
    """Raise if the identity of a file differs from this run's."""
    different = list(differences(found, wanted))
    if different:
        raise OutputError(
            "the file belongs to a run with different options or inputs: " + "; ".join(different),
            where=str(path),
            remedy="Give the same options and inputs to resume that run, or overwrite=True.",
        )
