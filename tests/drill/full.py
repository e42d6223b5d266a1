"""A disk that is full, at every size that is too small for a run, and a limit on files' sizes."""

import ctypes
import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from os import getpid
from pathlib import Path

from tests.cli.forked import Outcome, apart
from tests.drill.faults import COUNT
from tests.drill.kills import Case, begun, trouble_after
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

_PAGE = 4096
_ROOM = 3  # times the result's size: more than any of these runs takes
_NEW_NAMESPACE, _RECURSIVE, _PRIVATE, _AGAIN = 0x20000, 0x4000, 0x40000, 0x20  # of sched.h, mount.h


def drill(jobs: Sequence[Job], scratch: Path, setting: Setting) -> Iterator[Row]:
    """Yield the rows: a small file system, where one can be mounted, and limits."""
    known = [_undisturbed(job, scratch) for job in jobs]
    sizes = [
        (case, size)
        for case in known
        for size in range(_PAGE, _ROOM * len(case.wanted) + 8 * _PAGE, _PAGE)
    ]
    if can_mount(scratch):
        yield judged("a full disk, of every size", sizes, _on_small_disk, setting.part(0.03))
    limits = [(case, size) for case in known for size in range(0, len(case.wanted) + 512, 512)]
    yield judged("a limit on the size of files", limits, _limited, setting.part(0.03))


def can_mount(scratch: Path) -> bool:
    """Whether this process may mount file systems, for itself alone."""
    folder = scratch / "mount"
    folder.mkdir(exist_ok=True)
    return apart(lambda: _mount(folder, 2**20)).code == 0


def _undisturbed(job: Job, scratch: Path) -> Case:
    folder, old = begun(job, scratch)
    done = apart(lambda: job.start(folder))
    assert done.code == 0, done
    wanted = (folder / job.result).read_bytes()
    shutil.rmtree(folder)
    return Case(job, COUNT, wanted, old, scratch)


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
        print(_kind(done), _trouble(case, folder, done) or "", end="")

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
        print(_kind(done), _trouble(case, folder, done) or "", end="")

    try:
        return _verdict(case, size, apart(body))
    finally:
        shutil.rmtree(folder)


def _kind(done: Outcome) -> str:
    return RIGHT if done.code == 0 else REFUSED


def _trouble(case: Case, folder: Path, done: Outcome) -> str | None:
    if done.code and not is_one_message(done, (6,)):
        return told(done)
    if done.code and "disk" not in done.err:
        return f"the message does not tell of the disk, {told(done)}"
    return trouble_after(folder, case, done)


def _verdict(case: Case, size: int, done: Outcome) -> Verdict:
    kind, _, trouble = done.out.partition(" ")
    if done.code or trouble:
        return Verdict(FAILURE, f"{case.job.name}, {size:,} bytes: {trouble or told(done)}")
    return Verdict(kind)
