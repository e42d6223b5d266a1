"""The journal beside `OUT.h5.part`: which rows are committed, after an fsync of them.

`OUT.h5.part.progress` holds everything a run needs to go on that is not in whole chunks of rows:
how many rows are complete, those of them that do not fill a chunk yet, the reducers' states, the
file's structure, and the checksums of the chunks. It is replaced as a whole: there is the old or
the new. It is an .npz of a header, JSON, and of arrays by their number.
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
COMMIT_SHARE = 20  # a commit may take one part in so many of the time
COMMIT_SPEED = 2**28  # bytes of states in a second, until one has shown how long it takes
LONGEST = ".part.progress.tmp"  # what is put behind a name, and where it is the longest


@dataclass(frozen=True)
class Paths:
    """The final file and what lies beside it while it is written."""

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
class Structure:
    """A copy of all bytes of an unfinished file that are not rows.

    Appending rows never changes them, unless these are compressed. What does (completing the file,
    giving a parameter another layout) can be stopped halfway: then the copy is put back.
    """

    size: int  # the file's bytes
    pieces: np.ndarray  # (m, 2) int64, where each piece of it begins and ends in the file
    data: np.ndarray  # uint8, the pieces one behind the other

    @classmethod
    def of(cls, descriptor: int, regions: Regions) -> "Structure":
        """Copy what lies between the rows of a file that is not open in HDF5."""
        size = os.fstat(descriptor).st_size
        taken = joined([region.extents for region in regions.by_path.values()])
        pieces = list(gaps(taken, size))
        data = b"".join(read(descriptor, stop - start, start).data for start, stop in pieces)
        return cls(size, np.array(pieces, np.int64), np.frombuffer(data, np.uint8))

    def put_back(self, descriptor: int) -> None:
        """Make the file's structure what it was."""
        position = 0
        for start, stop in self.pieces.tolist():
            write(descriptor, self.data[position : position + stop - start].data, start)
            position += stop - start
        os.ftruncate(descriptor, self.size)


@dataclass(frozen=True)
class Point:
    """The file as it was after a batch."""

    completed: int = 0  # the rows that are there
    # a copy of the reducers' states after them; None where they are too large to copy
    states: States | None = field(default_factory=dict)
    marks: Mapping[str, Mark] = field(default_factory=dict)  # where every region stood, by path


@dataclass(frozen=True)
class Entry:
    """What a journal says of a stopped run."""

    point: Point  # how far it had come. Of its marks, tail and overflowed alone are right
    identity: dict[str, Any]  # `FilePlan.identity` of the run
    structure: Structure  # the file's structure
    records: np.ndarray  # (m, 3) int64: offset, size and CRC-32C of what is complete, by offset
    replaces: bool = False  # whether the run was told to replace the final file that is there

    @classmethod
    def load(cls, path: Path) -> "Entry | None":
        """Read a journal; None when there is none."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            with np.load(io.BytesIO(data)) as found:  # which compares its checksums
                header = json.loads(found["header"].tobytes())
                arrays = [found[str(k)] for k in range(len(found.files) - 1)]
        except MemoryError:
            raise
        except Exception as error:
            raise OutputError(
                "the record of what is complete is damaged",
                where=str(path),
                remedy="Start again with overwrite=True, or put back a copy of it.",
            ) from error
        states: dict[str, dict[str, torch.Tensor]] = {owner: {} for owner in header["owners"]}
        for owner, key in header["keys"]:
            states[owner][key] = torch.from_numpy(arrays.pop(0))
        marks = {
            path: Mark(tail=arrays.pop(0), overflowed=lost)
            for path, lost in header["marks"].items()
        }
        structure = Structure(header["size"], arrays[0], arrays[1])
        point = Point(header["completed"], states, marks)
        return cls(point, header["identity"], structure, arrays[2], header["replaces"])

    def save(self, path: Path) -> None:
        """Write the journal to `path`, which is replaced only when it is on the disk."""
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
            sync_folder(path)  # what is written next may not fit to the record before
        finally:
            temporary.unlink(missing_ok=True)


class Journal:
    """The commits of one file."""

    def __init__(self, paths: Paths, descriptor: int, plan: FilePlan, replaces: bool) -> None:
        self.completed = 0  # the rows that the last commit made durable
        # whether the disk has kept what it was given: once it failed, a second try may succeed
        # without having written what the first one lost
        self.trusted = True
        self._paths, self._descriptor, self._plan = paths, descriptor, plan
        self._replaces = replaces
        self._last, self._cost = time.monotonic(), 0.0

    def is_due(self, size: int = 0) -> bool:
        """Whether the last commit was long ago, measured by what it cost.

        Of the first nothing is known but the `size` of the states that it is to keep, in bytes.
        """
        cost = self._cost or size / COMMIT_SPEED
        return time.monotonic() - self._last >= max(COMMIT_SECONDS, COMMIT_SHARE * cost)

    def commit(self, point: Point, structure: Structure, records: np.ndarray) -> None:
        """Make the rows durable, then say so."""
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
        """Report what goes wrong in the body, and trust the disk no more."""
        try:
            with writing(self._paths.final):
                yield
        except OutputError as error:
            cause = error.__cause__
            self.trusted = cause is not None and is_shortage(cause)  # the disk is not to blame
            raise


def recover(
    paths: Paths, descriptor: int, plan: FilePlan, *, overwrite: bool, resume: bool
) -> Entry | None:
    """Bring the locked `.part` into the state to go on from; None: begin with an empty file."""
    unfinished = os.fstat(descriptor).st_size > 0
    if unfinished and not (overwrite or resume):
        raise OutputError(
            "an unfinished file of a stopped run is there",
            where=str(paths.part),
            remedy="Give resume=True to go on with it, or overwrite=True to start again.",
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
    """Check, with the `.part` locked, that nobody has put the final file in its place meanwhile."""
    try:
        require_free(
            paths.final, overwrite=overwrite, what="another process has just written this file"
        )
    except OutputError:
        if os.fstat(descriptor).st_size == 0:
            paths.part.unlink(missing_ok=True)  # it was made by being opened
        raise


def require_intact(part: Path, descriptor: int, records: np.ndarray) -> None:
    """Check that what is complete in an unfinished file is as `records` (m, 3) say."""
    offsets = damaged(descriptor, records)
    if len(offsets):
        with h5py.File(part, "r", locking=False) as file:
            places = damage_text(file, offsets)
        raise OutputError(
            f"the unfinished file is damaged: {places} changed after they were written",
            where=str(part),
            remedy="Look after the disk. Then start again with overwrite=True, or put back a copy "
            f"of {part.name} and {part.name}.progress.",
        )


def require_same(found: Any, wanted: Any, path: Path) -> None:
    """Check that a file is of this run."""
    different = list(differences(found, wanted))
    if different:
        raise OutputError(
            "this is another run: " + "; ".join(different),
            where=str(path),
            remedy="Repeat the first run's options to resume it, or give overwrite=True.",
        )
