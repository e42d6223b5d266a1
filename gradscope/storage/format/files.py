"""Read, write and lock files, and convert errors of the operating system."""

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
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # the file system has no locks
_NAME_BYTES = 255
_HEAD = 4096  # the program that wrote a page or a result is named in these first bytes
_RESULT = "result of gradscope"
DRAFT = ".draft"  # suffix of incomplete files; runs use `.part`, which is kept for --resume

Write = Callable[[BinaryIO], object]
HeadTest = Callable[[bytes], bool]  # whether a file with these first bytes may be replaced
_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE in fcntl.h


def read_into(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill `out` with the bytes of a file from `offset` on; return the number of bytes read."""
    done = 0
    while done < len(out) and (count := os.preadv(descriptor, [out[done:]], offset + done)):
        done += count
    return done


def read(descriptor: int, size: int, offset: int) -> np.ndarray:
    """Return the bytes (m,) uint8 of a file from `offset` on, up to its end."""
    found = np.empty(size, np.uint8)
    return found[: read_into(descriptor, found.data, offset)]


def write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`, in several calls if the system writes less at a time."""
    view = memoryview(data)
    while len(view):
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


def begin_writeback(descriptor: int, start: int, stop: int) -> None:
    """Start writing bytes to the disk in the background: see sync_file_range(2).

    A later `fsync` reports errors.
    """
    call = function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if call is not None:
        call(descriptor, start, stop - start, _WRITEBACK)


def sync_folder(path: Path) -> None:
    """Make the name of a file durable by syncing its folder."""
    if os.name != "posix":
        return
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def secure_space(part: Path, descriptor: int) -> None:
    """Reserve the disk space of a laid-out file if possible; raise if the disk has too little."""
    status = part.stat()
    missing = status.st_size - 512 * getattr(status, "st_blocks", 0)
    free = shutil.disk_usage(part.parent).free
    if missing > free:
        raise OutputError(
            f"the file needs {missing:,} more bytes; the disk has {free:,} bytes free",
            where=str(part),
            remedy=f"Choose another disk. {_SMALLER}",
        )
    call = function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call is None or not status.st_size or call(descriptor, 0, 0, status.st_size) == 0:
        return  # the file still reads as zeros
    number = ctypes.get_errno()
    if number in _FULL:
        raise OSError(number, os.strerror(number))


@contextmanager
def locked(part: Path) -> Iterator[int]:
    """Open and lock a `.part` for this process, and yield its descriptor."""
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
            raise busy  # another process finished the file between opening and locking
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def reporting_errors(path: Path) -> Iterator[None]:
    """Convert an OSError in the body to an `OutputError` on `path`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"the file cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="Check the path and the free space of its disk. No partial file remains.",
        ) from error


def written(path: Path, write: Write) -> int:
    """Write `path`.draft, sync it and rename it to `path`; return its size in bytes.

    After an error, `path` is unchanged and the `.draft` is removed. A killed process leaves the
    `.draft`, and the next call overwrites it. A device or a pipe is written to directly.
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
                with suppress(OSError):  # the first error is the one to report
                    part.unlink(missing_ok=True)
                raise
        return path.stat().st_size


def write_page(path: Path, maker: str, *parts: str) -> int:
    """Write a page that names its `maker`, and return its size; replace only such a page."""
    content, mark = [p.encode() for p in parts], f'<meta name="generator" content="{maker}">'
    assert mark in parts[0][:_HEAD]
    _require_kind(path, f"page of {maker}", lambda head: mark.encode() in head)
    written(path, lambda file: file.writelines(content))
    return sum(map(len, content))


def put_in_place(path: Path, data: bytes, part: Path, descriptor: int) -> None:
    """Write an open and locked `.part`, sync it, and rename it to `path`."""
    with writing(path):
        os.ftruncate(descriptor, 0)
        write(descriptor, data, 0)
        os.fsync(descriptor)
        part.replace(path)
        sync_folder(path)


@contextmanager
def deferring_signals() -> Iterator[None]:
    """Run the handlers of SIGINT and SIGTERM after the body: an exception would break HDF5."""
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
    """Convert errors in the body, which writes `path`, to an `OutputError`.

    Signals are handled after the body. With `again`, a shortage of memory is raised unchanged.
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
            remedy = f"Free disk space, and {_AGAIN}. {_SMALLER}"
        elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
            what, remedy = "no permission to write to the folder", "Choose another folder."
        elif number == errno.EAGAIN:
            what, remedy = "another process has the file open", f"Close it, and {_AGAIN}."
        else:
            what = f"writing failed: {_line(error)}"
            remedy = f"Check the path and the disk, and {_AGAIN}."
        raise OutputError(what, where=str(path), remedy=remedy) from error


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Convert errors in the body, which reads `where`, to a `ResultFileError`."""
    try:
        yield
    except ResultFileError as error:
        raise error if error.where else error.at(where) from error.__cause__
    except (OSError, RuntimeError, KeyError, ValueError, MemoryError) as error:
        if is_shortage(error):
            raise ResultFileError(
                f"there is too little memory to read the rows ({_line(error)})",
                where=where,
                remedy="Read fewer rows at a time. If a single row fails, the file may be damaged "
                "and claim a wrong size: take another copy.",
            ) from error
        closed = "identifier" in str(error)
        raise ResultFileError(
            "the file is closed" if closed else f"the data are damaged ({_line(error)})",
            where=where,
            remedy=(
                "Read it inside the with statement that opened it."
                if closed
                else "A checksum or the structure differs from what was written. Take another "
                "copy of the file, or compute it again."
            ),
        ) from error


def require_place(path: Path, suffix: str = "") -> None:
    """Raise if `path` is a folder, has no parent folder, or has too long a name."""
    folder = path.absolute().parent
    if os.path.isdir(path):  # noqa: PTH112
        raise OutputError("this is a folder", where=str(path), remedy="Give a file name.")
    if not os.path.isdir(folder):  # noqa: PTH112 (Path.is_dir raises if a name is too long)
        raise OutputError(
            f"the folder {str(folder)!r} does not exist", remedy="Create the folder first."
        )
    require_short(path, suffix)


def require_short(path: Path, suffix: str = "") -> None:
    """Raise if the file name with `suffix`, which it has while it is written, is too long."""
    over = excess(path.name + suffix, path.absolute().parent)
    if over > 0:
        suffix_note = f" (while it is written, the name ends in {suffix})" if suffix else ""
        raise OutputError(
            f"the file name is {over} bytes too long for the disk{suffix_note}",
            where=str(path),
            remedy="Choose a shorter name.",
        )


def require_distinct(path: Path, sources: Iterable[Path], what: str = "an input") -> None:
    """Raise if `path` is among the `sources`; the caller converts an OSError."""
    if path.exists() and any(source.exists() and path.samefile(source) for source in sources):
        raise OutputError(
            f"the output would replace {what}",
            where=str(path),
            remedy="Choose another name for the output.",
        )


def require_free(
    path: Path,
    *,
    overwrite: bool,
    what: str = "the file exists already",
    kind: str = _RESULT,
    known: HeadTest = lambda head: head.startswith(b"\x89HDF") and b"gradscope" in head,
) -> None:
    """Raise if `path` exists, unless `overwrite` is given and it is a file of the same kind."""
    if not overwrite and path.exists():
        raise OutputError(
            what, where=str(path), remedy="Choose another name, or give overwrite=True."
        )
    _require_kind(path, kind, known)


def _require_kind(path: Path, kind: str, known: HeadTest) -> None:
    """Raise if `path` is a file of another kind; an empty file may be replaced.

    A result file cannot be written to a device or a pipe.
    """
    with reporting_errors(path):
        wrong = path.exists() and kind == _RESULT
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD)
            wrong = bool(head) and not known(head)
    if wrong:
        raise OutputError(
            f"the existing file is of another kind (expected: {kind}) and is not replaced",
            where=str(path),
            remedy="Move the file away, or choose another name.",
        )


def excess(name: str, folder: Path) -> int:
    """Return the number of bytes by which a file name is too long for the folder."""
    most = _NAME_BYTES
    with suppress(AttributeError, OSError):  # not on Unix, or the folder does not exist
        most = os.pathconf(folder, "PC_NAME_MAX")
    return max(0, len(os.fsencode(name)) - most)


def _is_of_hdf5(error: Exception) -> bool:
    """Whether h5py raised the error: h5py raises these types for files that it cannot read."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith("h5py/")


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
