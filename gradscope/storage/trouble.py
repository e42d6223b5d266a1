"""What the operating system and HDF5 say when a file cannot be written, in our words."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gradscope.core.shortage import is_shortage
from gradscope.errors import OutputError
from gradscope.storage.linux import FULL, reserve
from gradscope.storage.signals import deferred

_NAME_BYTES = 255
_SMALLER = "or store less: a reducer, --layout factored, --dtype float16"


@contextmanager
def writing(path: Path, *, again: bool = False) -> Iterator[None]:
    """Turn what is raised while `path` is written into an `OutputError` with its remedy.

    A signal that arrives meanwhile is handled afterwards.

    Args:
        path: The file.
        again: What is written may be tried again in smaller parts where memory does not suffice
            for the blocks that it is computed from: that is raised as it is.
    """
    try:
        with deferred():
            yield
    except (OSError, RuntimeError, MemoryError, KeyError, ValueError) as error:
        if isinstance(error, KeyError | ValueError) and not _is_of_hdf5(error):
            raise
        if again and is_shortage(error) and not isinstance(error, OSError):
            raise
        number = _number(error)
        if is_shortage(error):
            what, remedy = f"memory ran out: {_line(error)}", "Free some, and give --resume."
        elif number in FULL:
            what = "the disk is full, or a limit on the file's size is reached"
            remedy = f"Free space and go on with --resume, {_SMALLER}."
        elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
            what, remedy = "the folder cannot be written to", "Choose another place."
        elif number == errno.EAGAIN:
            what, remedy = "another process has the file open", "Close it, and give --resume."
        else:
            what = f"writing failed: {_line(error)}"
            remedy = "Check the path and the disk; what is complete is kept for --resume."
        raise OutputError(what, where=str(path), remedy=remedy) from error


def require_place(path: Path, suffix: str = "") -> None:
    """Refuse a file whose folder is not there, or whose name is too long for it.

    Args:
        path: The file.
        suffix: What is put behind its name while it is written.

    Raises:
        OutputError: It cannot be there.
    """
    folder = path.absolute().parent
    if not os.path.isdir(folder):  # noqa: PTH112 (which raises where a name is too long)
        raise OutputError(f"there is no folder {str(folder)!r}", remedy="Create it first.")
    require_short(path, suffix)


def require_short(path: Path, suffix: str = "") -> None:
    """Refuse a file whose name is too long, with what is put behind it while it is written.

    Raises:
        OutputError: It is.
    """
    over = excess(path.name + suffix, path.absolute().parent)
    if over > 0:
        behind = f", since {suffix} is put behind it while it is written" if suffix else ""
        raise OutputError(
            f"the name is {over} bytes too long for the disk{behind}",
            where=str(path),
            remedy="Choose a shorter one.",
        )


def excess(name: str, folder: Path) -> int:
    """Return by how many bytes a name is too long for a file in a folder."""
    most = _NAME_BYTES
    with suppress(AttributeError, OSError):  # elsewhere than on Unix, or there is no such folder
        most = os.pathconf(folder, "PC_NAME_MAX")
    return max(0, len(os.fsencode(name)) - most)


def secure_space(part: Path, descriptor: int) -> None:
    """Refuse a file that is laid out but will not fit on its disk; take the space where that works.

    Raises:
        OutputError: The disk has less space than the file still needs.
        OSError: The same, said by the system.
    """
    status = part.stat()
    missing = status.st_size - 512 * getattr(status, "st_blocks", 0)
    free = shutil.disk_usage(part.parent).free
    if missing > free:
        raise OutputError(
            f"the file needs {missing:,} more bytes, the disk has {free:,}",
            where=str(part),
            remedy=f"Choose another disk, {_SMALLER}.",
        )
    reserve(descriptor)


def _is_of_hdf5(error: Exception) -> bool:
    """Whether h5py raised it: what HDF5 cannot read becomes an error of any of these kinds."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith("h5py/")


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _number(error: Exception) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = re.search(r"errno = (\d+)", str(error))
    return int(found[1]) if found else None
