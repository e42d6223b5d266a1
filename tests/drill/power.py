"""The power fails after the k-th operation: what was not synced may be lost, or there in part.

A run is recorded, operation by operation. From the record comes what a disk may hold after a loss
of power: names as they were at some moment since the folder was synced last, each file as it was
when it was synced last, and of what was written since then any pages, or none.
"""

import os
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import getpid
from pathlib import Path

from tests.cli.forked import apart
from tests.drill.faults import RECORD
from tests.drill.kills import Case, begun, trouble_after
from tests.drill.runs import Job
from tests.drill.verdicts import FAILURE, RIGHT, Row, Setting, Verdict, judged

_HEAD = struct.Struct("<4q")
_PAGE = 4096


@dataclass(frozen=True)
class Operation:
    """An operation that succeeded.

    Attributes:
        kind: o open, w write, t truncate, s sync, r rename, u unlink.
        file: Its descriptor.
        offset: Where; of an opening its flags, of a truncation the length.
        data: What was written, or the names.
    """

    kind: str
    file: int
    offset: int
    data: bytes


@dataclass
class Stored:
    """A file on the disk.

    Attributes:
        synced: What it surely has.
        since: What was done to it after that: offset and data, or a length and None.
    """

    synced: bytearray = field(default_factory=bytearray)
    since: list[tuple[int, bytes | None]] = field(default_factory=list)

    def sync(self) -> None:
        """Make sure of everything."""
        for change in self.since:
            _apply(self.synced, *change)
        self.since.clear()

    def after_a_loss(self, rng: random.Random) -> bytes:
        """Return what may be there after the power was lost."""
        data, kept = bytearray(self.synced), rng.choice((0.0, 0.5, 0.9, 1.0))
        for offset, written in self.since:
            if written is None:
                if rng.random() < kept:
                    _apply(data, offset, None)
                continue
            for start in range(0, len(written), _PAGE):
                if rng.random() < kept:
                    _apply(data, offset + start, written[start : start + _PAGE])
        return bytes(data)


def _apply(data: bytearray, offset: int, written: bytes | None) -> None:
    end = offset + len(written or b"")
    if len(data) < end:
        data.extend(bytes(end - len(data)))
    if written is None:
        del data[offset:]
    else:
        data[offset:end] = written


def operations(journal: Path) -> Iterator[Operation]:
    """Yield what was recorded."""
    data, at = journal.read_bytes(), 0
    while at < len(data):
        kind, file, offset, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        yield Operation(chr(kind), file, offset, data[at : at + size])
        at += size


def disk_after(
    before: dict[str, bytes], done: list[Operation], rng: random.Random
) -> dict[str, bytes]:
    """Return the files that may be there, by name, when the power is lost after these.

    Args:
        before: The files that were there at first.
        done: What was done then.
        rng: Chooses among what is possible.
    """
    names = {name: Stored(bytearray(content)) for name, content in before.items()}
    open_: dict[int, Stored | None] = {}  # None: a folder
    sure = [dict(names)]  # the names since the folder was synced, after each change of them
    for operation in done:
        if operation.kind == "o":
            _open(operation, names, open_)
            sure.append(dict(names))
        elif operation.kind in "ru":
            old, new = (Path(name).name for name in operation.data.decode().split("\0"))
            moved = names.pop(old)
            if operation.kind == "r":
                names[new] = moved
            sure.append(dict(names))
        elif operation.kind == "s" and open_[operation.file] is None:
            del sure[:-1]
        elif operation.kind == "s":
            open_[operation.file].sync()  # type: ignore[union-attr]
        else:
            data = operation.data if operation.kind == "w" else None
            open_[operation.file].since.append((operation.offset, data))  # type: ignore[union-attr]
    found = rng.choice(sure)
    return {name: stored.after_a_loss(rng) for name, stored in found.items()}


def _open(operation: Operation, names: dict[str, Stored], open_: dict[int, Stored | None]) -> None:
    name, flags = Path(operation.data.decode()).name, operation.offset
    if flags & os.O_DIRECTORY or (name not in names and not flags & os.O_CREAT):
        open_[operation.file] = None
        return
    stored = names.setdefault(name, Stored())
    open_[operation.file] = stored
    if flags & os.O_TRUNC:
        stored.since.append((0, None))


def drill(jobs: list[Job], scratch: Path, setting: Setting, losses: int) -> Row:
    """Lose the power after operations of some runs, each time with several outcomes."""
    cases = [
        (case, done, k, number)
        for job in jobs
        for case, done in [_recorded(job, scratch)]
        for k in range(len(done) + 1)
        for number in range(losses)
    ]

    def judge(given: tuple[Case, list[Operation], int, int]) -> Verdict:
        case, done, k, number = given
        rng = setting.generator(case.job.name, k, number)
        folder = scratch / f"power-{getpid()}"
        folder.mkdir()
        before = {} if case.old is None else {case.job.result: case.old}
        for name, content in disk_after(before, done[:k], rng).items():
            (folder / name).write_bytes(content)
        try:
            trouble = trouble_after(folder, case)
        finally:
            shutil.rmtree(folder)
        if trouble is None:
            return Verdict(RIGHT)
        return Verdict(FAILURE, f"{case.job.name} after operation {k}, {number}: {trouble}")

    return judged("the power fails after an operation", cases, judge, setting.part(0.06))


def _recorded(job: Job, scratch: Path) -> tuple[Case, list[Operation]]:
    """Run a job undisturbed, and return what it did."""
    folder, old = begun(job, scratch)
    journal = scratch / "journal"
    with journal.open("wb") as file:

        def body() -> None:
            RECORD.arm(folder, file.fileno())
            job.start(folder)

        done = apart(body)
    assert done.code == 0, done
    case = Case(job, RECORD, (folder / job.result).read_bytes(), old, scratch)
    shutil.rmtree(folder)
    return case, list(operations(journal))
