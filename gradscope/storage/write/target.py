"""The unfinished file, which HDF5 writes through a Python file object.

HDF5 does not recover from a write error: it keeps the file open, tries again at the end of the
process, and crashes. So the file object hides errors from HDF5 and raises them after HDF5 returns.
A memory reserve lets HDF5 finish after a shortage. HDF5 also fills allocated space
with zeros, which would double the writing. The file object leaves a hole in a sparse file instead;
it reads as zeros and is a valid chunk.

Uncompressed chunks are allocated when the file is laid out. They are written without HDF5, each
with its checksum, so the file's structure does not change. Compressed chunks go through HDF5's
filters, and each of them changes the structure.
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
_RUN_BYTES = 2**21  # bytes per task of a thread
_AT_ONCE = 2**18  # fewer bytes are written without threads
_HOLE = 4096  # shorter runs of zeros are written
_ROW = 1024  # 32-bit numbers in a table row, two 16-bit words each
_TILE = 64  # rows per tile, which fits into the CPU cache with its parts
_LOW, _HALF = np.uint32(0xFFFF), np.uint32(16)
_PLACES = np.arange(2 * _ROW, dtype=np.int64)
_own = threading.local()


class _SilentFile:
    """A file object over a descriptor for h5py; it never raises."""

    def __init__(self, descriptor: int) -> None:
        self.error: BaseException | None = None  # the first error; later writes are ignored
        self.sums: dict[int, int] | None = None  # {offset: CRC-32C} of each write, if not None
        self.closed = False  # if True, later calls from HDF5 do not access the file
        self._descriptor, self._position = descriptor, 0
        self._end = os.fstat(descriptor).st_size

    def check(self) -> None:
        """Raise the first error."""
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
        """Fill `buffer`; bytes beyond the end of the file are zero."""
        count = 0
        with self._holding():
            if not self.closed:
                count = read_into(self._descriptor, buffer, self._position)
        buffer[count:] = bytes(len(buffer) - count)
        self._position += len(buffer)
        return len(buffer)

    def read(self, size: int) -> bytes:
        """Return `size` bytes; h5py recognizes a file object by this method."""
        found = bytearray(size)
        self.readinto(memoryview(found))
        return bytes(found)

    def write(self, data: memoryview) -> int:
        """Write `data`, or leave a hole for zeros; do nothing after an error."""
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
        """Do nothing, because writes are not buffered."""


class Target:
    """The HDF5 file of a descriptor; it is opened when first needed."""

    def __init__(self, descriptor: int) -> None:
        # whether a write failed, so that the disk lacks data that HDF5 has written
        self.failed = False
        self.descriptor = descriptor
        self._driver: _SilentFile | None = None
        self._file: h5py.File | None = None
        self._datasets: dict[str, h5py.Dataset] = {}
        self._reserve = bytearray()
        self._pool: Executor | None = None  # started for large writes only

    @contextmanager
    def editing(self) -> Iterator[h5py.File]:
        """Open the file to change its structure, or create it if empty; close it afterwards."""
        self.close()
        try:
            yield self._open_file()
        finally:
            self.close()

    def write_chunks(self, places: np.ndarray, chunks: Sequence[np.ndarray]) -> list[int]:
        """Write chunks at `places`, offset and size (m, 2); return the CRC-32C of each chunk.

        Several threads write the chunks, which is faster than HDF5's single thread.
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
        wait(begun)  # even after an error, because the rows' memory is reused
        sums = [sum_ for one in begun for sum_ in one.result()]
        begin_writeback(self.descriptor, int(places[:, 0].min()), int(places.sum(1).max()))
        return sums

    def pack_chunk(self, path: str, start: int, data: np.ndarray) -> tuple[int, int, int]:
        """Compress and write the chunk that begins at byte `start` of a data set, with HDF5.

        Returns the chunk's offset, stored size and CRC-32C.
        """
        with self._closing_on_error():
            require_memory()
            if path not in self._datasets:
                self._datasets[path] = self._open_file()[path]
            dataset, driver = self._datasets[path], self._driver
            assert driver is not None  # the file is open
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
        """Pass all written data to the operating system."""
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
        """Close the file after an error; HDF5 may need the reserved memory for that."""
        try:
            yield
            assert self._driver is not None  # the file is open
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
        access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)  # older: KiB per data set
        access.set_sieve_buf_size(0)  # no buffers and no chunk cache in memory
        slots, _, _, preemption = access.get_cache()
        access.set_cache(slots, 0, 0, preemption)
        access.set_fileobj_driver(fileobj_driver, driver)
        creation = h5p.create(h5p.FILE_CREATE)
        creation.set_obj_track_times(False)  # no times, so the same run writes the same bytes
        try:
            if os.fstat(self.descriptor).st_size:
                made = h5f.open(b"result", h5f.ACC_RDWR, fapl=access)
            else:
                made = h5f.create(b"result", h5f.ACC_TRUNC, creation, access)
        except BaseException:
            driver.closed = True
            driver.check()  # its error is more precise than HDF5's
            raise
        finally:
            access.close()  # if left open, it crashes the process at exit
        self._file, self._driver = h5py.File(made), driver
        return self._file


def _write_run(descriptor: int, run: Sequence[tuple[list[int], np.ndarray]]) -> list[int]:
    """Write ((offset, size), data) of each chunk with its Fletcher-32; return each CRC-32C."""
    sums = []
    for (offset, size), data in run:
        length = size - CHECKSUM_BYTES
        end = bytes(length - len(data)) + fletcher32(data, length)
        sums.append(crc32c(end, crc32c(data.data)))  # from memory, not from the disk
        write(descriptor, data.data, offset)
        write(descriptor, end, offset + len(data))
    return sums


def fletcher32(data: np.ndarray, length: int) -> bytes:
    """Return HDF5's Fletcher-32 checksum of `data` (m,) uint8 and zeros up to `length`.

    For the n 16-bit words wᵢ of a chunk, the checksum is Σ wᵢ and Σ (n − i) wᵢ, modulo 65535. HDF5
    adds one word at a time. Here the words form a table, and both sums follow from the sums of its
    columns and rows. No sum overflows for chunks of up to 128 MiB.

    Source: Fletcher 1982, doi:10.1109/TCOM.1982.1095369; `H5_checksum_fletcher32` of HDF5.
    """
    columns = np.zeros((2, _ROW), np.uint32)  # sums of the even words, and of the odd words
    rows = [np.zeros(0, np.uint32)]
    if not hasattr(_own, "scratch"):  # reused by this thread, because new pages are slow
        _own.scratch = np.empty((2, _TILE, _ROW), np.uint32)
    cut = len(data) // (4 * _ROW) * 4 * _ROW
    whole = data[:cut] if data.ctypes.data % 4 == 0 else data[:cut].copy()
    table = whole.view("<u4").reshape(-1, _ROW)
    tiles = [table[at : at + _TILE] for at in range(0, len(table), _TILE)]
    if cut < len(data):  # the last row is padded with zeros
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
    """Return a sum of words modulo 65535, for HDF5's byte order of words.

    Swapping a word's bytes multiplies it by 256 modulo 65535. HDF5 returns 65535 instead of 0,
    unless all words are 0.
    """
    return value and (value * 256 % 65535 or 65535)
