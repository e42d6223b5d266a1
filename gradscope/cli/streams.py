"""When stdout cannot be written to: whoever read it has gone, or the disk behind it is full."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradscope.errors import OutputError

CLOSED_PIPE = 128 + signal.SIGPIPE
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def written() -> Iterator[None]:
    """Leave quietly when a pipe is closed, as `head` closes it; say so when stdout is full.

    Raises:
        OutputError: stdout is full.
    """
    try:
        yield
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer and rich exit with 1 then
            sys.exit(CLOSED_PIPE)
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (nothing is left to be flushed)
        raise OutputError(
            f"cannot be written to: {error.strerror}",
            where="stdout",
            remedy="Free space where it goes. A result file that is complete stays.",
        ) from error
