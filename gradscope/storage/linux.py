"""What Linux can do for a large file beyond Python's `os`; nothing goes wrong without it.

Elsewhere, and on file systems that have no way to do it, these functions do nothing.
"""

import ctypes
import errno
import os

from gradscope.core.libc import function

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRITE = 2  # SYNC_FILE_RANGE_WRITE, of fcntl.h


def reserve(descriptor: int) -> None:
    """Have the disk keep space for all of a file, whose holes read as zeros as before.

    Writing to it then takes the system half of its time, and never finds the disk full.
    See `man 2 fallocate`.

    Args:
        descriptor: Of the file, which has its length.

    Raises:
        OSError: There is not enough space.
    """
    call = function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    size = os.fstat(descriptor).st_size
    if call is None or not size or call(descriptor, 0, 0, size) == 0:
        return
    number = ctypes.get_errno()
    if number in FULL:
        raise OSError(number, os.strerror(number))


def begin_writeback(descriptor: int, start: int, stop: int) -> None:
    """Let the system begin to bring written bytes to the disk, while others are computed.

    It tells nothing of what fails: the `fsync` that follows does. See `man 2 sync_file_range`.

    Args:
        descriptor: Of the file.
        start: The first byte.
        stop: One beyond the last byte.
    """
    call = function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if call is not None:
        call(descriptor, start, stop - start, _WRITE)
