"""The unfinished file: HDF5 writes it, through a file object of ours.

HDF5 does not recover from a failure: it keeps the file open, tries again when the process ends,
and crashes. So it is never told of one: the error is held back and raised when HDF5 is done. Some
memory is kept for it to come to an end with. And it fills what it allocates with zeros, which would
double the work: they become a hole in a sparse file, which reads the same, and is a valid chunk.

What was allocated when the file was laid out is written to its place past HDF5, a chunk with its
checksum: the structure of the file stays as it was. Chunks that are to be compressed go through
HDF5's filters, and the structure changes with every one of them.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from itertools import pairwise
from math import prod

import h5py
import numpy as np
from crc32c import crc32c
from h5py import h5f, h5p, h5s
from h5py.h5fd import fileobj_driver

from gradscope.process.shortage import RESERVE, require_memory, thread_pool
from gradscope.storage.format.files import begin_writeback, read_into, write
from gradscope.storage.format.layout import CHECKSUM_BYTES

_THREADS = 2
_RUN_BYTES = 2**21  # what a thread takes at once
_AT_ONCE = 2**18  # less is not worth a thread
_HOLE = 4096  # shorter runs of zeros are written
_ROW = 1024  # 32-bit numbers a row of a table, two words each
_TILE = 64  # rows at a time: they and their parts stay in the cache
_LOW, _HALF = np.uint32(0xFFFF), np.uint32(16)
_PLACES = np.arange(2 * _ROW, dtype=np.int64)
_own = threading.local()


class _SilentFile:
    """A file object for h5py over a descriptor, which raises nothing."""

    def __init__(self, descriptor: int) -> None:
        self.error: BaseException | None = None  # the first; nothing is written after it
        self.sums: dict[int, int] | None = None  # CRC-32C of what was written by offset, if asked
        self.closed = False  # it has nothing to do with the file any more, whatever HDF5 asks for
        self._descriptor, self._position = descriptor, 0
        self._end = os.fstat(descriptor).st_size

    def check(self) -> None:
        """Raise the error that was held back."""
        if self.error is not None:
            raise self.error

    @contextmanager
    def _holding(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = self.error or error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        if whence == os.SEEK_END:
            with self._holding():
                self._end = os.fstat(self._descriptor).st_size
        self._position = offset + (0, self._position, self._end)[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer`; beyond the end everything is zero."""
        count = 0
        with self._holding():
            if not self.closed:
                count = read_into(self._descriptor, buffer, self._position)
        buffer[count:] = bytes(len(buffer) - count)
        self._position += len(buffer)
        return len(buffer)

    def read(self, size: int) -> bytes:
        """Return `size` bytes; h5py tells by this method that it is given a file."""
        found = bytearray(size)
        self.readinto(memoryview(found))
        return bytes(found)

    def write(self, data: memoryview) -> int:
        """Write `data`, or leave a hole of zeros; nothing where something went wrong before."""
        with self._holding():
            if self.sums is not None:
                self.sums[self._position] = crc32c(data)
            is_hole = self._position >= self._end and len(data) >= _HOLE
            if is_hole:
                cut = len(data) // 8 * 8
                is_hole = not (np.frombuffer(data[:cut], np.uint64).any() or any(data[cut:]))
            if not (self.error or self.closed or is_hole):
                write(self._descriptor, data, self._position)
                self._end = max(self._end, self._position + len(data))
        self._position += len(data)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        """Set the file's length."""
        size = self._position if size is None else size
        with self._holding():
            if not (self.error or self.closed) and size != os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, size)
        return size

    def flush(self) -> None:
        """Do nothing: every write has already gone to the descriptor."""


class Target:
    """The HDF5 file behind a descriptor, opened when it is written to."""

    def __init__(self, descriptor: int) -> None:
        # whether something was not written: what is on the disk is not all that HDF5 knew
        self.failed = False
        self.descriptor = descriptor
        self._driver: _SilentFile | None = None
        self._file: h5py.File | None = None
        self._datasets: dict[str, h5py.Dataset] = {}
        self._reserve = bytearray()
        self._pool: Executor | None = None  # none is started for small files

    @contextmanager
    def editing(self) -> Iterator[h5py.File]:
        """Open the file for changes of its structure, or begin one in an empty file; close it."""
        self.close()
        try:
            yield self._open_file()
        finally:
            self.close()

    def write_chunks(self, places: np.ndarray, chunks: Sequence[np.ndarray]) -> list[int]:
        """Write chunks that have a place, offset and size (m, 2); return the CRC-32C of each.

        They go to the disk from several threads: through HDF5 they would go from one, and a run
        that stores rows would take longer.
        """
        run = list(zip(places.tolist(), chunks, strict=True))
        if sum(map(len, chunks)) < _AT_ONCE:
            return _write_run(self.descriptor, run)
        self._pool = self._pool or thread_pool(_THREADS, "gradscope-disk")
        cuts = np.flatnonzero(np.diff(np.cumsum(places[:, 1]) // _RUN_BYTES)) + 1
        begun = [
            self._pool.submit(_write_run, self.descriptor, run[a:b])
            for a, b in pairwise([0, *cuts.tolist(), len(run)])
        ]
        wait(begun)  # all of them, also where one fails: the rows' memory is used again
        sums = [sum_ for one in begun for sum_ in one.result()]
        begin_writeback(self.descriptor, int(places[:, 0].min()), int(places.sum(1).max()))
        return sums

    def pack_chunk(self, path: str, start: int, data: np.ndarray) -> tuple[int, int, int]:
        """Have HDF5 compress the chunk that begins at byte `start` of a data set, and place it.

        What is returned is its offset, its size and its CRC-32C.
        """
        with self._closing_on_error():
            require_memory()
            if path not in self._datasets:
                self._datasets[path] = self._open_file()[path]
            dataset, driver = self._datasets[path], self._driver
            assert driver is not None  # it is open
            kind, inside = dataset.id.get_type(), dataset.id.get_space()
            first = tuple(map(int, np.unravel_index(start // kind.get_size(), dataset.shape)))
            chunk = zip(first, dataset.chunks, dataset.shape, strict=True)
            count = tuple(min(c, size - at) for at, c, size in chunk)
            whole = np.zeros(prod(count) * kind.get_size(), np.uint8)
            whole[: len(data)] = data
            inside.select_hyperslab(first, count)
            driver.sums = {}
            dataset.id.write(h5s.create_simple(count), inside, whole, kind)
            sums, driver.sums = driver.sums, None
            info = dataset.id.get_chunk_info_by_coord(first)
            return info.byte_offset, info.size, sums[info.byte_offset]

    def flush(self) -> None:
        """Return when everything is with the operating system."""
        if self._file is not None:
            with self._closing_on_error():
                self._file.flush()

    def close(self) -> None:
        """Close the file."""
        file, driver, self._file, self._driver = self._file, self._driver, None, None
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._reserve = bytearray()
        self._datasets.clear()
        if file is None or driver is None:
            return
        try:
            file.close()
            driver.check()
        except BaseException:
            self.failed = True
            raise
        finally:
            driver.closed = True

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Close the file where something goes wrong: HDF5 may need the memory that is kept."""
        try:
            yield
            assert self._driver is not None  # it is open
            self._driver.check()
        except BaseException:
            self.close()
            raise

    def _open_file(self) -> h5py.File:
        if self._file is not None:
            return self._file
        self._reserve, driver = bytearray(RESERVE), _SilentFile(self.descriptor)
        access = h5p.create(h5p.FILE_ACCESS)
        access.set_fclose_degree(h5f.CLOSE_STRONG)
        access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)  # older ones need kilobytes
        access.set_sieve_buf_size(0)  # for each data set; and neither do chunks wait in memory
        slots, _, _, preemption = access.get_cache()
        access.set_cache(slots, 0, 0, preemption)
        access.set_fileobj_driver(fileobj_driver, driver)
        creation = h5p.create(h5p.FILE_CREATE)
        creation.set_obj_track_times(False)  # the same run gives the same bytes
        try:
            if os.fstat(self.descriptor).st_size:
                made = h5f.open(b"result", h5f.ACC_RDWR, fapl=access)
            else:
                made = h5f.create(b"result", h5f.ACC_TRUNC, creation, access)
        except BaseException:
            driver.closed = True
            driver.check()  # which says more than HDF5
            raise
        finally:
            access.close()  # one that is left when the process ends crashes it
        self._file, self._driver = h5py.File(made), driver
        return self._file


def _write_run(descriptor: int, run: Sequence[tuple[list[int], np.ndarray]]) -> list[int]:
    """Write chunks, given with offset and size, and their Fletcher-32; return their CRC-32C."""
    sums = []
    for (offset, size), data in run:
        length = size - CHECKSUM_BYTES
        end = bytes(length - len(data)) + fletcher32(data, length)
        sums.append(crc32c(end, crc32c(data.data)))  # of the memory, whatever the disk makes of it
        write(descriptor, data.data, offset)
        write(descriptor, end, offset + len(data))
    return sums


def fletcher32(data: np.ndarray, length: int) -> bytes:
    """Return HDF5's Fletcher-32 checksum of `data` (m,) uint8 and zeros up to `length`.

    Over the n 16-bit words wᵢ of a chunk, it is Σ wᵢ and Σ (n − i) wᵢ, modulo 65535. HDF5 adds one
    word after the other; here the words are a table, and the sums over its columns and rows give
    both. Up to 128 MiB no sum overflows.

    Source: Fletcher 1982, doi:10.1109/TCOM.1982.1095369; `H5_checksum_fletcher32` of HDF5.
    """
    columns = np.zeros((2, _ROW), np.uint32)  # of the even words, and of the odd ones
    rows = [np.zeros(0, np.uint32)]
    if not hasattr(_own, "scratch"):  # of this thread: fresh pages would take most of the time
        _own.scratch = np.empty((2, _TILE, _ROW), np.uint32)
    cut = len(data) // (4 * _ROW) * 4 * _ROW
    whole = data[:cut] if data.ctypes.data % 4 == 0 else data[:cut].copy()
    table = whole.view("<u4").reshape(-1, _ROW)
    tiles = [table[at : at + _TILE] for at in range(0, len(table), _TILE)]
    if cut < len(data):  # zeros fill up the last row
        last = np.zeros(4 * _ROW, np.uint8)
        last[: len(data) - cut] = data[cut:]
        tiles.append(last.view("<u4").reshape(1, _ROW))
    for tile in tiles:
        even, odd = _own.scratch[:, : len(tile)]
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


def _folded(value: int) -> int:
    """Return a sum modulo 65535 of words that HDF5 reads the other way round.

    Swapping a word's bytes is a product with 256 modulo 65535. HDF5 folds carries in and so ends
    with 65535 instead of 0, unless all words are 0.
    """
    return value and (value * 256 % 65535 or 65535)
