"""Allocating a result file without writing it.

HDF5 fills what it allocates with zeros. Written out, that would double the work; here the zeros
become a hole in a sparse file, which reads the same. A chunk of zeros has the checksum zero, so a
hole is a valid chunk.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import h5py
import numpy as np

_HOLE = 4096  # shorter runs of zeros are written: they may be metadata that replaces something


class SparseFile:
    """A file object for h5py over a descriptor; zeros beyond all that is written become a hole."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = 0
        self._end = os.fstat(descriptor).st_size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        size = os.fstat(self._descriptor).st_size
        self._position = offset + (0, self._position, size)[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer`."""
        count = os.preadv(self._descriptor, [buffer], self._position)
        buffer[count:] = bytes(len(buffer) - count)  # beyond the end everything is zero
        self._position += len(buffer)
        return len(buffer)

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes."""
        data = os.pread(self._descriptor, size, self._position)
        self._position += len(data)
        return data

    def write(self, data: memoryview) -> int:
        """Write `data`, or leave a hole."""
        beyond = len(data) >= _HOLE and self._position >= self._end
        if not beyond or np.frombuffer(data, np.uint8).any():
            _write_all(self._descriptor, data, self._position)
            self._end = max(self._end, self._position + len(data))
        self._position += len(data)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        """Set the file's length."""
        size = self._position if size is None else size
        os.ftruncate(self._descriptor, size)
        return size

    def flush(self) -> None:
        """Do nothing: every write has already gone to the descriptor."""


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)


@contextmanager
def allocating(descriptor: int) -> Iterator[h5py.File]:
    """Open the file behind `descriptor` to create data sets in it; an empty one is begun."""
    mode = "r+" if os.fstat(descriptor).st_size else "w"
    with h5py.File(SparseFile(descriptor), mode) as file:
        yield file
