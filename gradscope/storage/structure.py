"""The structure of an unfinished file: all its bytes that are not rows.

Appending rows never changes it. What does (completing the file, giving a parameter another
layout) can be stopped halfway; so a copy is saved with the progress, and a run that goes on
begins by putting it back.
"""

import os
from dataclasses import dataclass

import numpy as np

from gradscope.storage import integrity
from gradscope.storage.whole import read, write


@dataclass(frozen=True)
class Structure:
    """A copy of the structure.

    Attributes:
        size: The file's bytes.
        pieces: (m, 2) int64, where each piece of it begins and ends in the file.
        data: uint8, the pieces one behind the other.
    """

    size: int
    pieces: np.ndarray
    data: np.ndarray

    @classmethod
    def of(cls, descriptor: int, extents: np.ndarray) -> "Structure":
        """Copy what lies between `extents` (m, 2), the offsets and sizes of rows."""
        size = os.fstat(descriptor).st_size
        pieces = list(integrity.gaps(extents, size))
        data = b"".join(read(descriptor, stop - start, start).data for start, stop in pieces)
        return cls(size, np.array(pieces, np.int64), np.frombuffer(data, np.uint8))

    def put_back(self, descriptor: int) -> None:
        """Make the file's structure what it was."""
        position = 0
        for start, stop in self.pieces.tolist():
            part = self.data[position : position + stop - start]
            write(descriptor, [part.data], start)
            position += stop - start
        os.ftruncate(descriptor, self.size)
