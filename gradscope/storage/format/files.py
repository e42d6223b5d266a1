"""Files on the disk: reading, writing and locking them, and errors of the system in our words."""

import ctypes
import errno
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import numpy as np

from gradscope.errors import OutputError, ResultFileError
from gradscope.process.libc import function
from gradscope.process.shortage import is_shortage

if sys.platform != "win32":
    import fcntl

_SMALLER = "Or store less: a reducer, gradscope compute --layout factored or --dtype float16."
_AGAIN = "run the command again; gradscope compute and attribute continue with --resume"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # file systems that have none
_NAME_BYTES = 255
_HEAD = 4096  # bytes of a page or a result, in which it names its maker
_RESULT = "result of gradscope"
DRAFT = ".draft"  # of what is not complete; `.part` is of runs, which are kept

Write = Callable[[BinaryIO], object]
HeadTest = Callable[[bytes], bool]  # whether a file that begins so is of the kind that is written
_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE of fcntl.h


def read_into(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill `out` with the bytes of a file from `offset` on; return how many there were."""
    done = 0
    while done < len(out) and (count := os.preadv(descriptor, [out[done:]], offset + done)):
        done += count
    return done


def read(descriptor: int, size: int, offset: int) -> np.ndarray:
    """Return the bytes (m,) uint8 of a file from `offset` on, up to its end."""
    found = np.empty(size, np.uint8)
    return found[: read_into(descriptor, found.data, offset)]


def write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`: the system may take less at a time."""
    view = memoryview(data)
    while len(view):
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


def begin_writeback(descriptor: int, start: int, stop: int) -> None:
    """Have the system bring bytes to the disk while others are computed: see sync_file_range(2).

    What fails is told by the `fsync` that follows.
    """
    call = function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if call is not None:
        call(descriptor, start, stop - start, _WRITEBACK)


def sync_folder(path: Path) -> None:
    """Make the name of a file durable, which is another sync than that of its bytes."""
    if os.name != "posix":
        return
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def secure_space(part: Path, descriptor: int) -> None:
    """Refuse a laid out file that will not fit on its disk; take the space where that works."""
    status = part.stat()
    missing = status.st_size - 512 * getattr(status, "st_blocks", 0)
    free = shutil.disk_usage(part.parent).free
    if missing > free:
        raise OutputError(
            f"the file needs {missing:,} more bytes, the disk has {free:,}",
            where=str(part),
            remedy=f"Choose another disk, {_SMALLER}.",
        )
    call = function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call is None or not status.st_size or call(descriptor, 0, 0, status.st_size) == 0:
        return  # holes read as zeros as before
    number = ctypes.get_errno()
    if number in _FULL:
        raise OSError(number, os.strerror(number))


@contextmanager
def locked(part: Path) -> Iterator[int]:
    """Open a `.part` for this process alone, and yield its descriptor."""
    busy = OutputError(
        "another process is writing this file",
        where=str(part),
        remedy="Wait for it to end, or choose another name.",
    )
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if sys.platform != "win32":
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise busy from error
        is_same = False
        with suppress(FileNotFoundError):
            is_same = os.path.samestat(part.stat(), os.fstat(descriptor))
        if not is_same:
            raise busy  # the other process finished between our opening and our locking
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def reporting_errors(path: Path) -> Iterator[None]:
    """Turn what the system says of a file that is to be written into an `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="Check the place, and the space on its disk; nothing was left there.",
        ) from error


def written(path: Path, write: Write) -> int:
    """Write `path`.draft, which is synced and becomes `path` when it is complete; return its size.

    Whatever goes wrong, `path` stays as it was and nothing stays beside it; a process that is
    killed leaves the `.draft`, which the next one clears. A device or a pipe is written to.
    """
    with reporting_errors(path):
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                write(file)
                return file.tell() if file.seekable() else 0
        part = path.with_name(path.name + DRAFT)
        with locked(part) as descriptor:
            try:
                os.ftruncate(descriptor, 0)
                with os.fdopen(descriptor, "wb", closefd=False) as file:
                    write(file)
                os.fsync(descriptor)
                part.replace(path)
            except BaseException:
                with suppress(OSError):  # what went wrong first is said
                    part.unlink(missing_ok=True)
                raise
        return path.stat().st_size


def write_page(path: Path, text: str, maker: str) -> int:
    """Write a page that names its maker, and return its bytes; no other file is replaced."""
    content, mark = text.encode(), f'<meta name="generator" content="{maker}">'.encode()
    assert mark in content[:_HEAD]
    _require_kind(path, f"page of {maker}", lambda head: mark in head)
    written(path, lambda file: file.write(content))
    return len(content)


def put_in_place(path: Path, data: bytes, part: Path, descriptor: int) -> None:
    """Write a file whose `.part` is open and locked; it is at `path` when it is on the disk."""
    with writing(path):
        os.ftruncate(descriptor, 0)
        write(descriptor, data, 0)
        os.fsync(descriptor)
        part.replace(path)
        sync_folder(path)


@contextmanager
def deferring_signals() -> Iterator[None]:
    """Let the handlers of SIGINT and SIGTERM run after the body: one that raises breaks HDF5."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                handlers[number] = signal.signal(number, lambda *s: arrived.append(s))
        yield
    finally:
        for known, handler in handlers.items():
            signal.signal(known, handler)
        for came, frame in arrived:
            handlers[came](came, frame)


@contextmanager
def writing(path: Path, *, again: bool = False) -> Iterator[None]:
    """Turn what is raised while `path` is written into an `OutputError` with its remedy.

    A signal that arrives meanwhile is handled afterwards.
    """
    try:
        with deferring_signals():
            yield
    except (OSError, RuntimeError, MemoryError, KeyError, ValueError) as error:
        if isinstance(error, KeyError | ValueError) and not _is_of_hdf5(error):
            raise
        if again and is_shortage(error) and not isinstance(error, OSError):
            raise
        number = error.errno if isinstance(error, OSError) else None
        found = re.search(r"errno = (\d+)", str(error))
        number = number or (int(found[1]) if found else None)
        if is_shortage(error):
            what, remedy = f"memory ran out: {_line(error)}", f"Free some memory, and {_AGAIN}."
        elif number in _FULL:
            what = "the disk is full, or a limit on the file's size is reached"
            remedy = f"Free space, and {_AGAIN}. {_SMALLER}"
        elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
            what, remedy = "the folder cannot be written to", "Choose another place."
        elif number == errno.EAGAIN:
            what, remedy = "another process has the file open", f"Close it, and {_AGAIN}."
        else:
            what = f"writing failed: {_line(error)}"
            remedy = f"Check the path and the disk, and {_AGAIN}."
        raise OutputError(what, where=str(path), remedy=remedy) from error


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn what HDF5 raises while `where` is read into a `ResultFileError`."""
    try:
        yield
    except ResultFileError as error:
        raise error if error.where else error.at(where) from error.__cause__
    except (OSError, RuntimeError, KeyError, ValueError, MemoryError) as error:
        if is_shortage(error):
            raise ResultFileError(
                f"memory does not suffice for what is to be read ({_line(error)})",
                where=where,
                remedy="Read fewer rows at a time. If one is too much, the file may claim more "
                "than any run has written.",
            ) from error
        closed = "identifier" in str(error)
        raise ResultFileError(
            "the file is closed" if closed else f"its data are damaged ({_line(error)})",
            where=where,
            remedy=(
                "Read it inside the with statement that opened it."
                if closed
                else "A checksum or the structure does not match what was written; take another "
                "copy of the file, or compute it again."
            ),
        ) from error


def require_place(path: Path, suffix: str = "") -> None:
    """Refuse a folder, a file whose folder is not there, or whose name is too long for it."""
    folder = path.absolute().parent
    if os.path.isdir(path):  # noqa: PTH112
        raise OutputError("this is a folder", where=str(path), remedy="Name a file.")
    if not os.path.isdir(folder):  # noqa: PTH112 (which raises where a name is too long)
        raise OutputError(f"there is no folder {str(folder)!r}", remedy="Create it first.")
    require_short(path, suffix)


def require_short(path: Path, suffix: str = "") -> None:
    """Refuse a file whose name is too long, with what is put behind it while it is written."""
    over = excess(path.name + suffix, path.absolute().parent)
    if over > 0:
        suffix_note = f", since {suffix} is put behind it while it is written" if suffix else ""
        raise OutputError(
            f"the name is {over} bytes too long for the disk{suffix_note}",
            where=str(path),
            remedy="Choose a shorter one.",
        )


def require_distinct(path: Path, sources: Iterable[Path], what: str = "a file") -> None:
    """Refuse to replace what a result is made from; the caller tells what the system says."""
    if path.exists() and any(source.exists() and path.samefile(source) for source in sources):
        raise OutputError(
            f"the result would replace {what} that it is made from",
            where=str(path),
            remedy="Choose another name.",
        )


def require_free(
    path: Path,
    *,
    overwrite: bool,
    what: str = "the file exists already",
    kind: str = _RESULT,
    known: HeadTest = lambda head: head.startswith(b"\x89HDF") and b"gradscope" in head,
) -> None:
    """Refuse to replace a file that is there, unless that is wanted and it is of the same kind."""
    if not overwrite and path.exists():
        raise OutputError(
            what, where=str(path), remedy="Choose another name, or give overwrite=True."
        )
    _require_kind(path, kind, known)


def _require_kind(path: Path, kind: str, known: HeadTest) -> None:
    """Refuse to replace a file of another kind than is written; an empty one may be.

    A result is no stream: it cannot be written to a device, nor to a pipe.
    """
    with reporting_errors(path):
        wrong = path.exists() and kind == _RESULT
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD)
            wrong = bool(head) and not known(head)
    if wrong:
        raise OutputError(
            f"a file of another kind is there, no {kind}",
            where=str(path),
            remedy="Move it away, or choose another name.",
        )


def excess(name: str, folder: Path) -> int:
    """Return by how many bytes a name is too long for a file in a folder."""
    most = _NAME_BYTES
    with suppress(AttributeError, OSError):  # elsewhere than on Unix, or there is no such folder
        most = os.pathconf(folder, "PC_NAME_MAX")
    return max(0, len(os.fsencode(name)) - most)


def _is_of_hdf5(error: Exception) -> bool:
    """Whether h5py raised it: what HDF5 cannot read becomes an error of any of these kinds."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith("h5py/")


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
