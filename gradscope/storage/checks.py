"""The bytes of a file's data sets, compared with their checksums before anybody uses them.

A piece is compared once, when it is first read. Pieces that are not compressed are read past HDF5:
its Fletcher-32 takes longer than everything else, and misses a chunk that has become zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import h5py
import numpy as np
import torch
from crc32c import crc32c

from gradscope.core.shortage import require_memory, started
from gradscope.errors import ResultFileError
from gradscope.storage.checksum import CHECKSUM_BYTES, fletcher32
from gradscope.storage.formats import as_numpy, format_of, h5_type, read_rows
from gradscope.storage.places import Place, datasets, place_of
from gradscope.storage.whole import read_into

RECORD = 3  # numbers: offset, size, CRC-32C
NONE = np.empty((0, RECORD), np.int64)
REMEDY = "Take another copy of the file, or compute it again."

_SEALED = -1  # in place of a checksum: the seal itself covers the piece
_STEP, _THREADS, _RUN = 2**20, 2, 2**24  # bytes read at a time; who reads, bytes that are worth it


@dataclass(frozen=True)
class Known:
    """What is known of one data set.

    Attributes:
        place: Where its bytes lie.
        sums: (m,) int64, the checksum of each piece.
        seen: (m,) bool, the pieces that need not be compared any more.
        direct: Whether its bytes are read without HDF5.
    """

    place: Place
    sums: np.ndarray
    seen: np.ndarray
    direct: bool


class Checks:
    """The data of an open file and their checksums.

    Args:
        descriptor: Returns the file's descriptor; raises where it is closed.
        table: (m, 3) int64: offset, size and CRC-32C of each piece, by offset; or (m, 2) without
            the last, for a file whose chunks have Fletcher-32 only.
    """

    def __init__(self, descriptor: Callable[[], int], table: np.ndarray) -> None:
        self._descriptor, self._strong = descriptor, table.shape[1] == RECORD
        self._ends = np.append(0, table[:, :2].sum(1))  # of what is before each piece
        last = [np.iinfo(np.int64).max, 0, _SEALED][: table.shape[1]]
        self._table = np.append(table, [last], 0)
        self._known: dict[str, Known] = {}

    def rows(self, dataset: h5py.Dataset, start: int, stop: int) -> np.ndarray:
        """Return rows start:stop (n, *shape); bfloat16 as float32.

        Raises:
            ResultFileError: They are not what was written.
        """
        known, shape = self.known(dataset), (stop - start, *dataset.shape[1:])
        row = prod(shape[1:]) * dataset.id.get_type().get_size()
        if not known.direct:
            self._look(dataset, known, start * row, stop * row)
            require_memory()
            return read_rows(dataset, start, stop)
        halves = format_of(dataset) == torch.bfloat16
        made = np.empty(shape, np.int16 if halves else dataset.dtype)
        self._fill(dataset, known, start * row, made.reshape(-1).view(np.uint8))
        return as_numpy(torch.from_numpy(made).view(torch.bfloat16)) if halves else made

    def whole(self, dataset: h5py.Dataset) -> np.ndarray:
        """Return all numbers, also of a data set without axes.

        Raises:
            ResultFileError: They are not what was written.
        """
        if dataset.shape:
            return self.rows(dataset, 0, dataset.shape[0])
        self._look(dataset, self.known(dataset), 0, 1)
        return np.asarray(dataset[()])

    def stored(self, dataset: h5py.Dataset, number: int) -> np.ndarray:
        """Return a piece (m,) uint8 as it lies in the file.

        Raises:
            ResultFileError: It is not what was written.
        """
        known = self.known(dataset)
        found = np.empty(int(known.place.sizes[number]), np.uint8)
        data = known.place.room(known.place.start(number))
        self._read(int(known.place.offsets[number]), found)
        self._compare(dataset, known, number, found[:data], found[data:])
        return found

    def known(self, dataset: h5py.Dataset) -> Known:
        """Return where a data set lies, and its checksums.

        Raises:
            ResultFileError: The checksums are of other bytes.
        """
        name = str(dataset.name)
        if name not in self._known:
            place = place_of(dataset)
            sums = self._sums(place, name)
            self._known[name] = Known(place, sums, sums == _SEALED, _is_plain(dataset, place))
        return self._known[name]

    def _sums(self, place: Place, name: str) -> np.ndarray:
        """Return the checksum of each piece (m,)."""
        if not self._strong:  # HDF5 compares what is compressed
            return np.full(len(place.offsets), 0 if place.checked else _SEALED, np.int64)
        at = np.searchsorted(self._table[:-1, 0], place.offsets)
        offsets, sizes, sums = self._table[at].T
        exact = (offsets == place.offsets) & (sizes == place.sizes)
        apart = (self._ends[at] <= place.offsets) & (place.offsets + place.sizes <= offsets)
        if not (exact | apart).all():
            raise ResultFileError(f"the checksums are of other bytes than those of {name}")
        return np.where(exact, sums, _SEALED)

    def _look(self, dataset: h5py.Dataset, known: Known, start: int, stop: int) -> None:
        """Compare the pieces that hold bytes start:stop of a data set."""
        last = min(known.place.number(stop - 1) + 1, len(known.seen)) if stop > start else 0
        for number in range(known.place.number(start), last):
            if not known.seen[number]:
                self.stored(dataset, number)

    def _fill(self, dataset: h5py.Dataset, known: Known, position: int, out: np.ndarray) -> None:
        """Read the bytes of a data set from `position` on into `out` (m,) uint8."""
        place = known.place
        while len(out):
            number = place.number(position)
            start, offset = place.start(number), int(place.offsets[number])
            data = place.room(start)
            part, out = np.split(out, [start + data - position])
            if known.seen[number]:
                self._read(offset + position - start, part)
            elif len(part) == data:
                rest = np.empty(int(place.sizes[number]) - data, np.uint8)
                self._read(offset, part)
                self._read(offset + data, rest)
                self._compare(dataset, known, number, part, rest)
            else:
                part[:] = self.stored(dataset, number)[position - start :][: len(part)]
            position += len(part)

    def _read(self, offset: int, out: np.ndarray) -> None:
        """Fill `out` with the bytes from `offset` on."""
        if read_into(self._descriptor(), out.data, offset) < len(out):
            raise ResultFileError("the file is cut short", remedy=REMEDY)

    def _compare(
        self, dataset: h5py.Dataset, known: Known, number: int, data: np.ndarray, rest: np.ndarray
    ) -> None:
        """Compare a piece, of its numbers and what is behind them, with its checksum."""
        if known.seen[number]:
            return
        if not self._strong:
            right = fletcher32(data, known.place.piece) == rest[-CHECKSUM_BYTES:].tobytes()
        else:
            right = crc32c(rest.data, crc32c(data.data)) == known.sums[number]
        if not right:
            where = _rows_text(dataset, known.place, number)
            raise ResultFileError(
                f"its data are damaged (the checksum of {where} is wrong)", remedy=REMEDY
            )
        known.seen[number] = True


def damaged(descriptor: int, table: np.ndarray) -> np.ndarray:
    """Return the offsets (k,) of those pieces in `table` (m, 3) whose bytes are not as they were.

    Raises:
        OSError: They cannot be read.
    """
    cuts = np.flatnonzero(np.diff(np.cumsum(table[:, 1]) // _RUN)) + 1
    runs = np.split(table, cuts)
    if len(runs) < 2:
        return _damaged(descriptor, table)
    with started(_THREADS, "gradscope-check") as pool:
        return np.concatenate(list(pool.map(lambda run: _damaged(descriptor, run), runs)))


def damage_text(file: h5py.File, offsets: np.ndarray) -> str:
    """Return what begins at these places of a file: rows and data sets."""
    found = []
    for path, dataset in datasets(file):
        place = place_of(dataset)
        for number in np.flatnonzero(np.isin(place.offsets, offsets)).tolist():
            found.append(f"{_rows_text(dataset, place, number)} of {path}")
    more = f", and {len(found) - 3:,} more places" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more


def _damaged(descriptor: int, table: np.ndarray) -> np.ndarray:
    buffer, wrong = np.empty(_STEP, np.uint8), []
    for offset, size, wanted in table.tolist():
        found = 0
        for at in range(0, size, _STEP):
            part = buffer[: min(_STEP, size - at)]
            part = part[: read_into(descriptor, part.data, offset + at)]
            found = crc32c(part.data, found)
        if found != wanted:
            wrong.append(offset)
    return np.array(wrong, np.int64)


def _rows_text(dataset: h5py.Dataset, place: Place, number: int) -> str:
    """Return which rows lie in a piece."""
    if not dataset.shape:
        return "the number"
    row = max(1, place.size // dataset.shape[0])
    start = place.start(number)
    first, last = start // row, (start + place.room(start) - 1) // row
    return f"row {first:,}" if first == last else f"rows {first:,} to {last:,}"


def _is_plain(dataset: h5py.Dataset, place: Place) -> bool:
    """Whether the bytes in the file are the numbers as they are in memory."""
    try:
        kind = h5_type(format_of(dataset))
    except (TypeError, ValueError):  # none of our formats
        return False
    here = place.size == 0 or len(place.offsets) > 0
    return here and not place.packed and bool(dataset.id.get_type().equal(kind))
