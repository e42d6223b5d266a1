"""A disk that stops or fails at the k-th operation of a run, for every k.

What is promised: a process that is killed at any moment leaves no result, the old one or the new
one, complete; one whose disk fails says so once, with exit code 6 (3 where it was to read); and
whoever goes on gets the same bytes as a run that nobody disturbed.
"""

import errno
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from os import getpid
from pathlib import Path

from tests.cli import forked
from tests.cli.forked import Outcome
from tests.drill import faults, runs
from tests.drill.faults import CHANGES, COUNT, EVERYTHING, Action, Fault, Kind
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


def drill(
    commands: Sequence[Job], writers: Sequence[Job], scratch: Path, setting: Setting
) -> Iterator[Row]:
    """Yield the rows: the command line, killed and with a failing disk; and the writer alone."""
    for drill, jobs, kinds, share in (
        ("killed at every operation of a command", commands, KILLS[:1], 0.5),
        ("the disk fails at an operation of a command", commands, FAILURES, 0.06),
        ("killed at every operation of the writer", writers, KILLS, 0.25),
        ("the disk fails at an operation of the writer", writers, FAILURES, 0.06),
    ):
        yield judged(drill, list(cases(jobs, kinds, scratch)), judge, setting.part(share))


def cases(jobs: Sequence[Job], kinds: Sequence[Fault], scratch: Path) -> Iterator[Case]:
    """Yield each fault at each operation of each job."""
    for job in jobs:
        folder, old = begun(job, scratch)
        done = _step(job, folder, COUNT)
        assert done.code == 0, done
        wanted = (folder / job.result).read_bytes()
        for kind in kinds:
            for k in range(faults.seen(kind.kinds)):
                yield Case(job, kind.after(k), wanted, old, scratch)
        shutil.rmtree(folder)


def judge(case: Case) -> Verdict:
    """Let it happen, look at what is there, and go on."""
    folder, _ = begun(case.job, case.scratch, case.old)
    try:
        done = _step(case.job, folder, case.fault)
        trouble = _trouble_of(done, case) or trouble_after(folder, case, done)
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
        again = forked.apart(lambda: case.job.again(folder))
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
    _clear(folder, job, old)
    return folder, old


def _clear(folder: Path, job: Job, old: bytes | None) -> None:
    for path in folder.iterdir():
        path.unlink()
    if old is not None:
        (folder / job.result).write_bytes(old)


def _step(job: Job, folder: Path, fault: Fault) -> Outcome:
    """Start a job in a process of its own, on such a disk."""
    faults.share()

    def body() -> None:
        fault.arm(folder)
        job.start(folder)

    return forked.apart(body)


def _is_there(folder: Path, case: Case) -> bool:
    result = folder / case.job.result
    return result.exists() and result.read_bytes() == case.wanted


def _trouble_of(done: Outcome, case: Case) -> str | None:
    """Return what is wrong with how a process ended."""
    if case.fault.action in (Action.KILL, Action.HALF_AND_KILL):
        return None if done.code == KILLED else f"it was not killed, {told(done)}"
    if done.code == 0 or is_one_message(done, (3, 6)):
        return None
    return told(done)
