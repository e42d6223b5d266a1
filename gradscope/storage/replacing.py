"""Writing any other file than a result: beside its place, which it takes when it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gradscope.errors import OutputError
from gradscope.storage.resume import locked
from gradscope.storage.trouble import require_place

SUFFIX = ".part"


def check_free(path: Path, size: int, *, overwrite: bool) -> None:
    """Refuse a file of `size` bytes that may not be written or does not fit.

    Raises:
        OutputError: It is there already, or there is no folder or no space for it.
    """
    require_place(path, SUFFIX)
    with reported(path):
        _check_free(path, size, overwrite)


def _check_free(path: Path, size: int, overwrite: bool) -> None:
    if path.is_dir():
        raise OutputError("this is a folder", where=str(path), remedy="Choose another name.")
    if path.exists() and not overwrite:
        raise OutputError(
            "the file exists already",
            where=str(path),
            remedy="Choose another name, or give --overwrite.",
        )
    free = shutil.disk_usage(path.absolute().parent).free
    if size > free:
        raise OutputError(
            f"the file would take {size:,} bytes, the disk has {free:,}",
            where=str(path),
            remedy="Choose another disk, or export fewer samples or parameters.",
        )


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn what the system says of a file that is to be written into an `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="Check the place, and the space on its disk; nothing was left there.",
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open `path`.part for writing; when the body ends well, it is synced and becomes `path`.

    Whatever else happens, `path` stays as it was and nothing stays beside it; a process that is
    killed leaves the `.part`, which the next one clears.

    Raises:
        OutputError: It cannot be written.
    """
    part = path.with_name(path.name + SUFFIX)
    with reported(path), locked(part) as descriptor:
        try:
            os.ftruncate(descriptor, 0)
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                yield file
            os.fsync(descriptor)
            part.replace(path)
        except BaseException:
            with suppress(OSError):  # what went wrong first is said
                part.unlink(missing_ok=True)
            raise
