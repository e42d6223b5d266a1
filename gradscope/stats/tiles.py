"""The stored rows of one parameter, a bounded number of bytes at a time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.stats.base import Floats
from gradscope.stats.table import Positions, Table

_TILE = 2**22  # bytes read at a time
_KEPT = 2**30  # bytes of a parameter that are kept for a second walk
_BLOCK = 2**16  # numbers in work at a time: 512 KiB, which stays in the cache
_WIDEST = 4096  # columns of a block

Tile = tuple[Positions, NDArray[Any]]


class Tiles:
    """The rows of the finite samples; the parts of complex numbers are entries of their own.

    Args:
        array: (N, *shape), as stored.
        table: The finite samples.
        reader: Reads the next tile while one is in work.

    Attributes:
        width: The entries of a row, w.
        columns: How many of them are in work at a time.
    """

    def __init__(self, array: Any, table: Table, reader: ThreadPoolExecutor) -> None:
        complex_ = np.issubdtype(array.dtype, np.complexfloating)
        self.width = prod(array.shape[1:]) * (2 if complex_ else 1)
        self.columns = min(_WIDEST, max(16, -(-self.width // 16)))
        self._array, self._table, self._reader = array, table, reader
        self._places = np.full(array.shape[0], -1)
        self._places[table.rows] = np.arange(table.n)
        bytes_a_row = max(1, prod(array.shape[1:]) * array.dtype.itemsize)
        step = max(1, _TILE // bytes_a_row)
        self._slices = [slice(k, k + step) for k in range(0, array.shape[0], step)]
        self._kept: list[Tile] = []
        self._height = max(1, _BLOCK // max(1, min(self.width, self.columns)))
        self._buffer = np.empty((self._height, self.columns))

    def walk(self, keep: bool) -> Iterator[Tile]:
        """Yield (places in the table (b,), rows (b, w)) of all samples, in the file's order.

        Args:
            keep: Hold on to what fits into memory, for `again`.
        """
        room = _KEPT if keep else 0
        for tile in self._read(self._slices):
            if len(self._kept) < len(self._slices) and tile[1].nbytes <= room:
                room -= tile[1].nbytes
                self._kept.append(tile)
            else:
                room = 0  # what is kept is a beginning
            yield tile

    def again(self) -> Iterator[Tile]:
        """Yield the same tiles; those kept are not read again."""
        yield from chain(self._kept, self._read(self._slices[len(self._kept) :]))

    def rows(self, places: Positions) -> Floats:
        """Return the rows (m, w) of the samples at `places` in the table, in float64."""
        return _flat(self._array[self._table.rows[places]]).astype(np.float64)

    def blocks(self, values: NDArray[Any]) -> Iterator[tuple[slice, slice, Floats]]:
        """Yield (rows, columns, block) of a tile in float64; a block may be overwritten."""
        for top in range(0, len(values), self._height):
            for left in range(0, self.width, self.columns):
                piece = values[top : top + self._height, left : left + self.columns]
                block = self._buffer[: piece.shape[0], : piece.shape[1]]
                np.copyto(block, piece)
                yield (
                    slice(top, top + len(piece)),
                    slice(left, left + piece.shape[1]),
                    block,
                )

    def _read(self, slices: list[slice]) -> Iterator[Tile]:
        waiting = [self._reader.submit(self._one, part) for part in slices[:1]]
        for part in [*slices[1:], None]:
            if not waiting:
                return
            tile = waiting.pop().result()
            if part is not None:
                waiting.append(self._reader.submit(self._one, part))
            yield tile

    def _one(self, part: slice) -> Tile:
        places, values = self._places[part], _flat(self._array[part])
        finite = places >= 0
        if finite.all():
            return places, values
        return places[finite], values[finite]


def _flat(values: NDArray[Any]) -> NDArray[Any]:
    """Return (b, ...) as real rows (b, w)."""
    rows = np.ascontiguousarray(values).reshape(len(values), prod(values.shape[1:]))
    if np.iscomplexobj(rows):
        return rows.view(rows.real.dtype)
    return rows
