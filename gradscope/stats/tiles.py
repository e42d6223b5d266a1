"""The stored rows of one parameter, a bounded number of bytes at a time."""

from collections.abc import Iterator
from concurrent.futures import Executor
from itertools import chain, islice
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.stats.base import Floats
from gradscope.stats.table import Positions, Table

_TILE = 2**27  # bytes in work at a time: many rows, so that sums over them are written seldom
_PIECE = 2**22  # bytes read at a time, whose memory the allocator uses again
_KEPT = 2**29  # bytes of a parameter that are kept for a second walk
_BLOCK = 2**19  # bytes that are summed at a time, which stay in the cache
_LONG = 2**28  # bytes of a parameter from which on blocks are summed as stored, not in float64
_WIDEST = 4096  # columns of a block, where there are rows enough to fill it
_PARTS = 16  # blocks that a row is at least made of: each has its place in a sketch

Tile = tuple[Positions, NDArray[Any]]


class Tiles:
    """The rows of the finite samples; the parts of complex numbers are entries of their own.

    Args:
        array: (N, *shape), as stored.
        table: The finite samples.
        reader: Reads the next tile while one is in work.

    Attributes:
        width: The entries of a row, w.
        long: Whether the parameter is too large for memory.
        dtype: In which blocks of it are summed.
        columns: How many of them are in work at a time.
        most: The numbers of a block at most.
    """

    def __init__(self, array: Any, table: Table, reader: Executor) -> None:
        complex_ = np.issubdtype(array.dtype, np.complexfloating)
        self.width = prod(array.shape[1:]) * (2 if complex_ else 1)
        self._array, self._table, self._reader = array, table, reader
        self._places = np.full(array.shape[0], -1)
        self._places[table.rows] = np.arange(table.n)
        a_row = max(1, prod(array.shape[1:]) * array.dtype.itemsize)
        step = max(1, _TILE // a_row)
        self._piece = max(1, _PIECE // a_row)
        self._slices = [slice(k, k + step) for k in range(0, array.shape[0], step)]
        self._kept: list[Tile] = []
        tall = min(step, array.shape[0])
        real = np.empty(0, array.dtype).real.dtype
        self._tiles = [np.empty((tall, self.width), real) for _ in self._slices[:2]]
        self.long = a_row * array.shape[0] > _LONG
        self.dtype = real if self.long and real.itemsize >= 4 else np.dtype(np.float64)
        numbers = _BLOCK // self.dtype.itemsize
        self.columns = min(max(_WIDEST, numbers // tall), max(16, -(-self.width // _PARTS)))
        self._height = max(1, numbers // self.columns)
        self.most = self._height * self.columns

    def walk(self, keep: bool) -> Iterator[Tile]:
        """Yield (places in the table (b,), rows (b, w)) of all samples, in the file's order.

        Args:
            keep: Hold on to what fits into memory, for `again`.
        """
        room = _KEPT if keep else 0
        for places, values in self._read(self._slices):
            if values.nbytes <= room:
                room -= values.nbytes
                self._kept.append((places, values.copy()))
            else:
                room = 0  # what is kept is a beginning
            yield places, values

    def again(self) -> Iterator[Tile]:
        """Yield the same tiles; those kept are not read again."""
        yield from chain(self._kept, self._read(self._slices[len(self._kept) :]))

    def rows(self, places: Positions) -> Floats:
        """Return the rows (m, w) of the samples at `places` in the table, in float64."""
        return _flat(self._array[self._table.rows[places]]).astype(np.float64)

    def blocks(
        self, values: NDArray[Any], order: Positions | None = None
    ) -> Iterator[tuple[slice, slice, NDArray[Any]]]:
        """Yield (rows, columns, block) of a tile.

        Blocks are in float64, but of float32 where a parameter takes over 256 MiB: the errors of
        its many short sums, added in float64, average out.

        Args:
            values: Of the tile (b, w).
            order: In which its rows come (b,); as they are if None.
        """
        for top in range(0, len(values), self._height):
            rows: Any = slice(top, min(top + self._height, len(values)))
            for left in range(0, self.width, self.columns):
                columns = slice(left, min(left + self.columns, self.width))
                piece = values[rows if order is None else order[rows], columns]
                yield rows, columns, piece.astype(self.dtype, copy=False)

    def _read(self, slices: list[slice]) -> Iterator[Tile]:
        """Read ahead: the next tile while one is in work."""
        tasks = iter(enumerate(slices))
        waiting = [self._reader.submit(self._one, *task) for task in islice(tasks, 1)]
        while waiting:
            tile = waiting.pop().result()
            waiting += [self._reader.submit(self._one, *task) for task in islice(tasks, 1)]
            yield tile

    def _one(self, number: int, part: slice) -> Tile:
        """Read a tile into one of two places, the other one being in work."""
        tile, filled = self._tiles[number % 2], 0
        for start in range(part.start, min(part.stop, len(self._places)), self._piece):
            piece = slice(start, min(start + self._piece, part.stop))
            rows, finite = _flat(self._array[piece]), self._places[piece] >= 0
            end = filled + int(finite.sum())
            tile[filled:end] = rows if finite.all() else rows[finite]
            filled = end
        places = self._places[part]
        return places[places >= 0], tile[:filled]


def _flat(values: NDArray[Any]) -> NDArray[Any]:
    """Return (b, ...) as real rows (b, w)."""
    rows = np.ascontiguousarray(values).reshape(len(values), prod(values.shape[1:]))
    if np.iscomplexobj(rows):
        return rows.view(rows.real.dtype)
    return rows
