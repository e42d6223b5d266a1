"""Streams for results and notices: the process's own stdout and stderr.

While a command runs, stdout is for its results only. Other code (also C libraries and child
processes) prints to stderr instead. It may close or replace `sys.stdout` and `sys.stderr`.
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, TextIO

from gradscope.errors import OutputError

CLOSED_PIPE = 128 + signal.SIGPIPE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Streams(NamedTuple):
    out: TextIO
    err: TextIO


_own: ContextVar[_Streams | None] = ContextVar("streams", default=None)


def out() -> TextIO:
    """Return the stream for results."""
    own = _own.get()
    return sys.stdout if own is None else own.out


def err() -> TextIO:
    """Return the stream for notices."""
    own = _own.get()
    return sys.stderr if own is None else own.err


@contextmanager
def reserve_stdout() -> Iterator[None]:
    """Reserve stdout for text that the body writes to `out()`.

    Raises:
        OSError: The text cannot be written.
    """
    before = sys.stdout, sys.stderr
    own = _Streams(*map(_copy, before))
    token = _own.set(own)
    shield = _shield(before[1])
    try:
        with _first_is_second(before[0]):
            sys.stdout = sys.stderr = shield
            yield
            own.out.flush()
    finally:
        sys.stdout, sys.stderr = before
        _own.reset(token)
        for stream, original in zip(own, before, strict=True):
            if stream is not original:
                with suppress(OSError):  # reported already, or without a reader
                    stream.close()


@contextmanager
def report_write_errors() -> Iterator[None]:
    """Exit silently if a pipe is closed, as by `head`; raise an error if stdout is full.

    Raises:
        OutputError: stdout is full, or a device failed.
    """
    try:
        yield
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer and rich then exit with 1
            sys.exit(CLOSED_PIPE)
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (nothing remains to be flushed)
        raise OutputError(
            f"cannot be written to: {error.strerror}",
            where="stdout",
            remedy="Free space at the destination. A complete result file is kept.",
        ) from error


def open_standard_ones() -> None:
    """Open the null device for each of stdin, stdout and stderr that is closed.

    Otherwise the next opened file would get its number, and printed text would go into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115


class _Shield(io.TextIOWrapper):
    """Writes to stderr; closing it has no effect."""

    def close(self) -> None:
        """Stay open."""
        with suppress(OSError, ValueError):
            self.flush()


def _number(stream: TextIO) -> int | None:
    """Return the file descriptor of a stream, or None."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _copy(stream: TextIO) -> TextIO:
    """Return a separate stream to the same destination; the same stream if that is impossible."""
    number = _number(stream)
    if number is None:
        return stream
    stream.flush()
    raw = os.fdopen(os.dup(number), "wb")
    buffered = getattr(stream, "line_buffering", False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=buffered)


def _shield(stream: TextIO) -> TextIO:
    number = _number(stream)
    if number is None:
        return stream
    raw = os.fdopen(number, "wb", closefd=False)
    return _Shield(raw, stream.encoding, stream.errors, line_buffering=True)


@contextmanager
def _first_is_second(stdout: TextIO) -> Iterator[None]:
    """Redirect descriptor 1 to descriptor 2, if descriptor 1 belongs to stdout."""
    saved = os.dup(1) if _number(stdout) == 1 else None
    if saved is not None:
        with suppress(OSError):  # there may be no stderr
            os.dup2(2, 1)
    try:
        yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)
