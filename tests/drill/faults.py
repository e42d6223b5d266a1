"""A file system that stops, fails or is slow at its k-th operation, by `faults.c`."""

import ctypes
import errno
import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from pathlib import Path

_SOURCE = Path(__file__).with_name("faults.c")


class Kind(IntFlag):
    """Kinds of operation, as in faults.c."""

    OPEN = 1
    WRITE = 2
    CUT = 4
    SYNC = 8
    ALLOCATE = 16
    NAME = 32
    READ = 64
    LOOK = 128


CHANGES = Kind.OPEN | Kind.WRITE | Kind.CUT | Kind.SYNC | Kind.ALLOCATE | Kind.NAME
EVERYTHING = CHANGES | Kind.READ | Kind.LOOK


class Action(IntEnum):
    """What happens at operation k, as in faults.c."""

    COUNT = 0
    KILL = 1
    HALF_AND_KILL = 2
    FAIL = 3
    FAIL_FROM = 4
    SHORT = 5
    SHORT_FROM = 6
    PAUSE = 7
    RECORD = 8


@dataclass(frozen=True)
class Fault:
    """What the disk does."""

    action: Action  # its kind
    kinds: Kind  # the operations that are counted
    number: int = 0  # the error that it answers with
    at: int = 0  # which of them; for pauses, the longest in microseconds

    def __str__(self) -> str:
        error = f" {errno.errorcode[self.number]}" if self.number else ""
        return f"{self.action.name}{error} of {self.kinds!r} at {self.at}"

    def after(self, k: int) -> "Fault":
        """Return the same at another operation."""
        return replace(self, at=k)

    def arm(self, folder: Path, journal: int = -1) -> None:
        """Let it happen to this process, with the files in a folder."""
        given = (self.at, self.action, self.number, self.kinds, journal)
        _library().faults_arm(os.fsencode(folder), *map(int, given))


COUNT = Fault(Action.COUNT, EVERYTHING)
RECORD = Fault(Action.RECORD, CHANGES)


def share() -> None:
    """Let forks of this process count where it sees it."""
    _library().faults_share()


def seen(kinds: Kind) -> int:
    """Return how many operations were counted since a fault was armed, here or in a fork."""
    return int(_library().faults_seen(int(kinds)))


def preload(folder: Path) -> dict[str, str] | None:
    """Return the environment in which faults work; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    made = folder / "faults.so"
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(_SOURCE)]
    subprocess.run([*words, "-ldl", "-lpthread"], check=True)
    return {"LD_PRELOAD": str(made)}


def are_here() -> bool:
    """Whether this process was started with them."""
    return hasattr(ctypes.CDLL(None), "faults_arm")


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, *[ctypes.c_int] * 4]
    library.faults_arm.restype = None
    library.faults_seen.argtypes = [ctypes.c_int]
    library.faults_seen.restype = ctypes.c_long
    return library
