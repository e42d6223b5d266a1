"""The rows of one data set as they come, cut into pieces that are written as a whole.

Rows that do not fill a piece yet are held back: on the disk a piece is either missing or whole,
and what is held back is saved with the progress.
"""

from dataclasses import dataclass, field, replace

import h5py
import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from gradscope.storage.checks import NONE
from gradscope.storage.formats import as_bytes, format_of
from gradscope.storage.places import Place, place_of


@dataclass(frozen=True)
class Piece:
    """Bytes to be written.

    Attributes:
        offset: Where in the file.
        data: (m,) uint8; it stays as it is until it is written.
        length: Bytes of the whole chunk, zeros after the data.
        checked: Whether a Fletcher-32 goes behind it.
        sums: (k,) uint32, to keep the CRC-32C of what is written; None where it is known.
        number: Where in `sums`.
        path: Of the data set, where HDF5 is to compress the piece and find a place for it.
        start: Where in the bytes of the data set it begins.
    """

    offset: int
    data: np.ndarray
    length: int
    checked: bool
    sums: np.ndarray | None = None
    number: int = 0
    path: str = ""
    start: int = 0


@dataclass(frozen=True)
class Mark:
    """Where a stream stands.

    Attributes:
        position: Bytes it has taken.
        tail: (m,) uint8, those of them that do not fill a piece yet.
        overflowed: Numbers so far that were finite but are too large for the stored format.
        sum: The CRC-32C of these bytes, where they lie in one piece.
    """

    position: int = 0
    tail: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    overflowed: int = 0
    sum: int = 0


class Stream:
    """One data set that is written from its beginning to its end.

    Attributes:
        shape: (N, *shape).
        dtype: The stored format.
        place: Where the bytes lie.
        sums: (m,) uint32, the CRC-32C of each chunk that is written.
        mark: Where it stands; set it to go back.
    """

    def __init__(self, dataset: h5py.Dataset, mark: Mark | None = None) -> None:
        self.shape = tuple(int(s) for s in dataset.shape)
        self.dtype: torch.dtype = format_of(dataset)
        self.place: Place = place_of(dataset)
        self.sums = np.zeros(len(self.place.offsets), np.uint32)
        self._path = str(dataset.name)
        self.mark = Mark() if mark is None else mark

    @property
    def together(self) -> int:
        """The rows that share a piece."""
        row = self.place.size // self.shape[0] if self.shape and self.shape[0] else 0
        return max(1, self.place.piece // row) if row else 1

    def add(self, values: Tensor) -> list[Piece]:
        """Take the next rows (n, *shape), in the stored format; return the pieces that are whole.

        The pieces may share the memory of `values`.
        """
        data, found = as_bytes(values), []
        position, tail, sum_ = self.mark.position, self.mark.tail, self.mark.sum
        if not (self.place.checked or self.place.packed):
            sum_ = crc32c(data.data, sum_)
        while len(data):
            room = self.place.room(position)
            part, data = data[:room], data[room:]
            whole = np.concatenate([tail, part]) if len(tail) else part
            if len(part) == room or not (self.place.checked or self.place.packed):
                found.append(self._piece(position - len(tail), whole))
                tail = whole[:0]
            else:
                tail = whole.copy()
            position += len(part)
        self.mark = replace(self.mark, position=position, tail=tail, sum=sum_)
        return found

    def held_back(self) -> list[Piece]:
        """Return what does not fill a piece yet, for those who read before it does."""
        mark = self.mark
        return [self._piece(mark.position - len(mark.tail), mark.tail)] if len(mark.tail) else []

    def records(self, mark: Mark) -> np.ndarray:
        """Return offset, size and CRC-32C of what is complete at a mark, (k, 3) int64.

        What is compressed is known to the one who has compressed it.
        """
        place = self.place
        if place.packed or not mark.position:
            return NONE
        if not place.checked:
            return np.array([[place.offsets[0], mark.position, mark.sum]], np.int64)
        count = place.number(mark.position - len(mark.tail))
        return np.column_stack([place.extents[:count], self.sums[:count]])

    def _piece(self, start: int, data: np.ndarray) -> Piece:
        place = self.place
        if place.packed:
            return Piece(-1, data, place.piece, checked=False, path=self._path, start=start)
        if not place.checked:
            return Piece(place.offset(start) + start, data, place.piece, checked=False)
        number = place.number(start)
        offset = int(place.offsets[number])
        return Piece(offset, data, place.piece, checked=True, sums=self.sums, number=number)
