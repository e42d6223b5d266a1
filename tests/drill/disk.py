"""A disk that stops, fails, is full, or loses power, at every moment of a run.

What is promised: a process that is killed at any moment leaves no result, the old one or the new
one, complete; one whose disk fails says so once, with exit code 6 (3 where it was to read); and
`--resume` gives the same bytes as a run that nothing disturbed.
"""

import ctypes
import errno
import os
import random
import resource
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from os import getpid
from pathlib import Path

from tests.cli.forked import Outcome, apart
from tests.drill import faults, runs
from tests.drill.faults import CHANGES, COUNT, EVERYTHING, RECORD, Action, Fault, Kind
from tests.drill.runs import Job
from tests.drill.verdicts import (
    FAILURE,
    REFUSED,
    RIGHT,
    Row,
    Setting,
    Verdict,
    is_one_message,
    judged,
    told,
)

KILLED = -9
KILLS = (Fault(Action.KILL, CHANGES), Fault(Action.HALF_AND_KILL, Kind.WRITE))
FAILURES = (
    Fault(Action.FAIL, EVERYTHING, errno.EIO),
    Fault(Action.FAIL_FROM, EVERYTHING, errno.EIO),
    Fault(Action.FAIL_FROM, Kind.WRITE | Kind.ALLOCATE | Kind.SYNC, errno.ENOSPC),
    Fault(Action.FAIL, Kind.WRITE | Kind.READ | Kind.OPEN | Kind.SYNC, errno.EINTR),
    Fault(Action.SHORT, Kind.WRITE | Kind.READ),
    Fault(Action.SHORT_FROM, Kind.WRITE | Kind.READ),
)
_NUMBERS = count()


@dataclass(frozen=True)
class Case:
    """One fault at one operation of one job."""

    job: Job
    fault: Fault
    wanted: bytes
    old: bytes | None
    scratch: Path

    def __str__(self) -> str:
        return f"{self.job.name}, {self.fault}"


def kills(
    commands: Sequence[Job], writers: Sequence[Job], scratch: Path, setting: Setting, losses: int
) -> Iterator[Row]:
    """Yield the rows: the command line, killed and with a failing disk; and the writer alone."""
    for drill, jobs, kinds, share in (
        ("killed at every operation of a command", commands, KILLS[:1], 0.5),
        ("the disk fails at an operation of a command", commands, FAILURES, 0.06),
        ("killed at every operation of the writer", writers, KILLS, 0.25),
        ("the disk fails at an operation of the writer", writers, FAILURES, 0.06),
    ):
        yield judged(drill, list(cases(jobs, kinds, scratch)), _judged, setting.part(share))
    yield power([*commands, *writers], scratch, setting, losses)


def cases(jobs: Sequence[Job], kinds: Sequence[Fault], scratch: Path) -> Iterator[Case]:
    """Yield each fault at each operation of each job."""
    for job in jobs:
        case = undisturbed(job, scratch)
        for kind in kinds:
            for k in range(faults.seen(kind.kinds)):
                yield replace(case, fault=kind.after(k))


def undisturbed(job: Job, scratch: Path, fault: Fault = COUNT, journal: int = -1) -> Case:
    """Run a job on a disk that only counts, or records what is done."""
    folder, old = begun(job, scratch)
    done = _step(job, folder, fault, journal)
    assert done.code == 0, done
    wanted = (folder / job.result).read_bytes()
    shutil.rmtree(folder)
    return Case(job, fault, wanted, old, scratch)


def _judged(case: Case) -> Verdict:
    """Let it happen, look at what is there, and go on."""
    folder, _ = begun(case.job, case.scratch, case.old)
    try:
        done = _step(case.job, folder, case.fault)
        trouble = None
        if case.fault.action in (Action.KILL, Action.HALF_AND_KILL):
            trouble = None if done.code == KILLED else f"it was not killed, {told(done)}"
        elif done.code and not is_one_message(done, (3, 6)):
            trouble = told(done)
        trouble = trouble or trouble_after(folder, case, done)
    finally:
        shutil.rmtree(folder)
    if trouble is not None:
        return Verdict(FAILURE, f"{case}: {trouble}")
    return Verdict(RIGHT if done.code in (0, KILLED) else REFUSED)


def trouble_after(folder: Path, case: Case, done: Outcome | None = None) -> str | None:
    """Return what is wrong with the files that are there, or with going on from them."""
    result, wanted = folder / case.job.result, case.wanted
    if result.exists() and result.read_bytes() not in (wanted, case.old):
        return "the result is neither the old one nor the new one"
    if done is not None and done.code == 0 and not _is_there(folder, case):
        return f"it ended well without a right result, {told(done)}"
    if not _is_there(folder, case) or case.job.goes_on:
        again = apart(lambda: case.job.again(folder))
        if again.code:
            return f"going on: {told(again)}"
        if not _is_there(folder, case):
            return "what went on gave other bytes"
    names = sorted(path.name for path in folder.iterdir())
    return None if names == [case.job.result] else f"left behind: {names}"


def begun(job: Job, scratch: Path, old: bytes | None = None) -> tuple[Path, bytes | None]:
    """Make a folder for a case, and the result in it that is to be replaced."""
    folder = scratch / f"case-{getpid()}-{next(_NUMBERS)}"
    folder.mkdir()
    if job.before is not None and old is None:
        runs.finished(job.before, folder)
        old = (folder / job.result).read_bytes()
    for path in folder.iterdir():
        path.unlink()
    if old is not None:
        (folder / job.result).write_bytes(old)
    return folder, old


def _step(job: Job, folder: Path, fault: Fault, journal: int = -1) -> Outcome:
    """Start a job in a process of its own, on such a disk."""
    here = faults.are_here()
    if here:
        faults.share()

    def body() -> None:
        if here:
            fault.arm(folder, journal)
        job.start(folder)

    return apart(body)


def _is_there(folder: Path, case: Case) -> bool:
    result = folder / case.job.result
    return result.exists() and result.read_bytes() == case.wanted


# A full disk, of every size that is too small for a run, and a limit on files' sizes

_PAGE = 4096
_ROOM = 3  # times the result's size: more than any of these runs takes
_NEW_NAMESPACE, _RECURSIVE, _PRIVATE, _AGAIN = 0x20000, 0x4000, 0x40000, 0x20  # of sched.h, mount.h


def full(jobs: Sequence[Job], scratch: Path, setting: Setting) -> Iterator[Row]:
    """Yield the rows: a small file system, where one can be mounted, and limits."""
    known = [undisturbed(job, scratch) for job in jobs]
    sizes = [
        (case, size)
        for case in known
        for size in range(_PAGE, _ROOM * len(case.wanted) + 8 * _PAGE, _PAGE)
    ]
    folder = scratch / "mount"
    folder.mkdir()
    if apart(lambda: _mount(folder, 2**20)).code == 0:  # for this process alone
        yield judged("a full disk, of every size", sizes, _on_small_disk, setting.part(0.03))
    limits = [(case, size) for case in known for size in range(0, len(case.wanted) + 512, 512)]
    yield judged("a limit on the size of files", limits, _limited, setting.part(0.03))


def _mount(folder: Path, size: int, again: bool = False) -> None:
    """Mount a file system in memory that only this process and its children see."""
    library = ctypes.CDLL(None, use_errno=True)
    options = f"size={size}".encode()
    calls = [lambda: library.mount(b"none", bytes(folder), b"tmpfs", _AGAIN * again, options)]
    if not again:
        apart_from_others = lambda: library.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None)  # noqa: E731
        calls = [lambda: library.unshare(_NEW_NAMESPACE), apart_from_others, *calls]
    for call in calls:
        if call():
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _on_small_disk(given: tuple[Case, int]) -> Verdict:
    """Run on a file system of some size, then make it larger and go on."""
    case, size = given
    folder = case.scratch / f"disk-{getpid()}"
    folder.mkdir(exist_ok=True)

    def body() -> None:
        _mount(folder, size + len(case.old or b""))
        if case.old is not None:
            (folder / case.job.result).write_bytes(case.old)
        done = apart(lambda: case.job.start(folder))
        _mount(folder, 2**28, again=True)
        print(_told_of(case, folder, done), end="")

    return _verdict(case, size, apart(body))


def _limited(given: tuple[Case, int]) -> Verdict:
    """Run with a limit on files' sizes, then go on without."""
    case, size = given
    folder, _ = begun(case.job, case.scratch, case.old)

    def start() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        case.job.start(folder)

    def body() -> None:
        done = apart(start)
        print(_told_of(case, folder, done), end="")

    try:
        return _verdict(case, size, apart(body))
    finally:
        shutil.rmtree(folder)


def _told_of(case: Case, folder: Path, done: Outcome) -> str:
    """Return what came of a run, and what is wrong."""
    kind, trouble = REFUSED if done.code else RIGHT, ""
    if done.code and not is_one_message(done, (6,)):
        trouble = told(done)
    elif done.code and "disk" not in done.err:
        trouble = f"the message does not tell of the disk, {told(done)}"
    return f"{kind} {trouble or trouble_after(folder, case, done) or ''}"


def _verdict(case: Case, size: int, done: Outcome) -> Verdict:
    kind, _, trouble = done.out.partition(" ")
    if done.code or trouble:
        return Verdict(FAILURE, f"{case.job.name}, {size:,} bytes: {trouble or told(done)}")
    return Verdict(kind)


# The power fails after the k-th operation: what was not synced may be lost, or there in part.
# A run is recorded, operation by operation. From the record comes what a disk may hold after a loss
# of power: names as they were at some moment since the folder was synced last, each file as it was
# when it was synced last, and of what was written since then any pages, or none.

_HEAD = struct.Struct("<4q")


@dataclass(frozen=True)
class Operation:
    """An operation that succeeded."""

    kind: str  # o open, w write, t truncate, s sync, r rename, u unlink
    file: int  # its descriptor
    offset: int  # where; of an opening its flags, of a truncation the length
    data: bytes  # what was written, or the names


@dataclass
class Stored:
    """A file on the disk."""

    synced: bytearray = field(default_factory=bytearray)  # what it surely has
    # what was done to it after that: offset and data, or a length and None
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
            name, flags = Path(operation.data.decode()).name, operation.offset
            is_file = not flags & os.O_DIRECTORY and (name in names or flags & os.O_CREAT)
            stored = open_[operation.file] = names.setdefault(name, Stored()) if is_file else None
            if stored is not None and flags & os.O_TRUNC:
                stored.since.append((0, None))
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


def power(jobs: list[Job], scratch: Path, setting: Setting, losses: int) -> Row:
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
    journal = scratch / "journal"
    with journal.open("wb") as file:
        case = undisturbed(job, scratch, RECORD, file.fileno())
    return case, list(operations(journal))
