"""How HDF5 writes the structure of a result file: through a file object of ours.

For two reasons. HDF5 fills what it allocates with zeros; written out, that would double the work,
so the zeros become a hole in a sparse file, which reads the same (a chunk of zeros has the
checksum zero, so a hole is a valid chunk). And HDF5 does not recover from a failure: it keeps the
file open, tries again when the process ends, and crashes. So it is never told of one: the error is
held back and raised when HDF5 is done. Some memory is kept for it to come to an end with.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import h5py
import numpy as np
from crc32c import crc32c

from gradscope.core.shortage import RESERVE
from gradscope.storage.whole import read_into, write

Written = dict[int, tuple[int, int]]

_HOLE = 4096  # shorter runs of zeros are written
_VERSION = ("v110", "v110")  # the older one needs kilobytes for each data set


class DescriptorFile:
    """A file object for h5py over a descriptor, which raises nothing.

    Attributes:
        error: The first thing that went wrong; nothing is written after it.
        written: Size and CRC-32C of what was written, by its offset, for who asks.
    """

    def __init__(self, descriptor: int, written: Written | None = None) -> None:
        self.error: BaseException | None = None
        self.written = written
        self._descriptor = descriptor
        self._position = 0
        self._end = os.fstat(descriptor).st_size
        self._closed = False

    def check(self) -> None:
        """Have nothing to do with the file any more, and raise the error that was held back."""
        self._closed = True
        if self.error is not None:
            raise self.error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        size = self._size() if whence == os.SEEK_END else 0
        self._position = offset + (0, self._position, size)[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer`; beyond the end everything is zero."""
        try:
            count = 0 if self._closed else read_into(self._descriptor, buffer, self._position)
            if count < len(buffer):
                buffer[count:] = bytes(len(buffer) - count)
        except BaseException as error:
            self.error = self.error or error
        self._position += len(buffer)
        return len(buffer)

    def read(self, size: int) -> bytes:
        """Return `size` bytes; h5py tells by this method that it is given a file."""
        found = bytearray(size)
        self.readinto(memoryview(found))
        return bytes(found)

    def write(self, data: memoryview) -> int:
        """Write `data`, or leave a hole."""
        try:
            self._write(data, self._position)
        except BaseException as error:
            self.error = self.error or error
        self._position += len(data)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        """Set the file's length."""
        size = self._position if size is None else size
        try:
            if not (self.error or self._closed) and size != os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, size)
        except BaseException as error:
            self.error = error
        return size

    def flush(self) -> None:
        """Do nothing: every write has already gone to the descriptor."""

    def _size(self) -> int:
        try:
            return os.fstat(self._descriptor).st_size
        except OSError as error:
            self.error = self.error or error
            return self._end

    def _write(self, data: memoryview, position: int) -> None:
        if self.written is not None:
            self.written[position] = len(data), crc32c(data)
        beyond = len(data) >= _HOLE and position >= self._end
        if self.error or self._closed or (beyond and not _is_any(data)):
            return
        write(self._descriptor, [data], position)
        self._end = max(self._end, position + len(data))


@contextmanager
def editing(descriptor: int, written: Written | None = None) -> Iterator[h5py.File]:
    """Open the HDF5 file behind `descriptor`, or begin one in an empty file; and close it.

    Args:
        descriptor: Of the file.
        written: Takes size and CRC-32C of all that HDF5 writes, by offset: compressed chunks too.

    Raises:
        OSError: Something could not be written.
    """
    behind, reserve = DescriptorFile(descriptor, written), bytearray(RESERVE)
    mode = "r+" if os.fstat(descriptor).st_size else "w"
    file = h5py.File(behind, mode, libver=_VERSION)
    try:
        yield file
    finally:
        reserve.clear()
        try:
            file.close()
        finally:
            behind.check()


def _is_any(data: memoryview) -> bool:
    """Whether a byte is not zero."""
    cut = len(data) // 8 * 8
    return bool(np.frombuffer(data[:cut], np.uint64).any() or any(data[cut:]))
