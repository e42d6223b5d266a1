"""HDF5's Fletcher-32 checksum, computed many words at a time.

Over the n 16-bit words wᵢ of a chunk, it is Σ wᵢ and Σ (n − i) wᵢ, modulo 65535. HDF5 adds one
word after the other, holding its lock; here the words are a table, and the sums over its columns
and rows give both. Several threads can do it at once.

Source: Fletcher 1982, doi:10.1109/TCOM.1982.1095369; `H5_checksum_fletcher32` of HDF5.
"""

import threading
from collections.abc import Iterator

import numpy as np

CHECKSUM_BYTES = 4

_ROW = 1024  # 32-bit numbers a row of the table, two words each
_TILE = 64  # rows at a time: they and their parts stay in the cache
_LOW, _HALF = np.uint32(0xFFFF), np.uint32(16)
_own = threading.local()
_PLACES = np.arange(2 * _ROW, dtype=np.int64)


def fletcher32(data: np.ndarray, length: int) -> bytes:
    """Return the checksum of a chunk, as HDF5 puts it behind the chunk.

    Args:
        data: (m,) uint8, contiguous; at most 128 MiB, so that no sum overflows.
        length: The chunk's bytes, m or more: zeros follow the data.
    """
    columns = np.zeros((2, _ROW), np.uint32)  # of the even words, and of the odd ones
    rows = [np.zeros(0, np.uint32)]
    for tile in _tiles(data):
        even, odd = _scratch()[:, : len(tile)]
        np.bitwise_and(tile, _LOW, out=even)
        np.right_shift(tile, _HALF, out=odd)
        columns[0] += np.add.reduce(even, 0, np.uint32)
        columns[1] += np.add.reduce(odd, 0, np.uint32)
        even += odd
        rows.append(np.add.reduce(even, 1, np.uint32))
    along = np.concatenate(rows).astype(np.int64)
    total = int(along.sum())
    placed = 2 * _ROW * int(np.arange(len(along)) @ along) + int(_PLACES @ columns.T.ravel())
    first, second = _folded(total), _folded(-(-length // 2) * total - placed)
    return (second << 16 | first).to_bytes(CHECKSUM_BYTES, "little")


def _scratch() -> np.ndarray:
    """Return memory (2, rows, columns) of this thread: fresh pages would take most of the time."""
    if not hasattr(_own, "scratch"):
        _own.scratch = np.empty((2, _TILE, _ROW), np.uint32)
    scratch: np.ndarray = _own.scratch
    return scratch


def _tiles(data: np.ndarray) -> Iterator[np.ndarray]:
    """Yield `data` (m,) as tables of 32-bit numbers; zeros fill up the last row."""
    cut = len(data) // (4 * _ROW) * 4 * _ROW
    whole = data[:cut] if data.ctypes.data % 4 == 0 else data[:cut].copy()
    table = whole.view("<u4").reshape(-1, _ROW)
    for at in range(0, len(table), _TILE):
        yield table[at : at + _TILE]
    if cut < len(data):
        last = np.zeros(4 * _ROW, np.uint8)
        last[: len(data) - cut] = data[cut:]
        yield last.view("<u4").reshape(1, _ROW)


def _folded(value: int) -> int:
    """Return a sum modulo 65535 of words that HDF5 reads the other way round.

    Swapping a word's bytes is a product with 256 modulo 65535. HDF5 folds carries in and so ends
    with 65535 instead of 0, unless all words are 0.
    """
    return value and (value * 256 % 65535 or 65535)
