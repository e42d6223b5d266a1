"""A disk that stops or fails at its k-th operation: what `os` does to the files of one folder."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = ("pwrite", "preadv", "ftruncate", "fsync", "fstat", "stat", "replace", "unlink")


class Stopped(BaseException):
    """In place of a kill: nothing of ours reaches the disk afterwards."""


class Disk:
    """Counts operations, and has all of them fail from one on.

    Args:
        folder: Whose files it holds.
        at: The operation that fails first, counted from 0; none if negative.
        number: What it answers with; a stop instead if 0.
        once: Only that operation fails.
    """

    def __init__(self, folder: Path, at: int = -1, number: int = 0, *, once: bool = False) -> None:
        self.seen: list[str] = []
        self._folder, self._at, self._number, self._once = folder, at, number, once

    @contextmanager
    def inserted(self, calls: tuple[str, ...] = CALLS) -> Iterator["Disk"]:
        """Take the place of the disk."""
        with pytest.MonkeyPatch.context() as patch:
            for name in calls:
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
            yield self

    def _counted(self, name: str, plain: Any) -> Any:
        def call(place: Any, *rest: Any, **more: Any) -> Any:
            number = isinstance(place, int)
            where = Path(f"/proc/self/fd/{place}").readlink() if number else Path(place)
            if self._folder not in where.parents and not (number and where == self._folder):
                return plain(place, *rest, **more)
            k = len(self.seen)
            self.seen.append(name)
            if k == self._at or (k > self._at >= 0 and not self._once):
                raise OSError(self._number, os.strerror(self._number)) if self._number else Stopped
            return plain(place, *rest, **more)

        return call


def operations(count: int, most: int) -> list[int]:
    """Return at most so many operations of a run, the first and the last among them."""
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})


FULL, BROKEN = errno.ENOSPC, errno.EIO
