"""Writing pieces with their checksums, past HDF5 and on threads.

Neither a checksum nor a write needs the interpreter's lock, so one thread's checksums go on while
the other's bytes are copied by the operating system.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from functools import reduce

from crc32c import crc32c

from gradscope.core.shortage import started
from gradscope.storage.checksum import fletcher32
from gradscope.storage.linux import begin_writeback
from gradscope.storage.packer import Packer
from gradscope.storage.stream import Piece
from gradscope.storage.whole import write

THREADS = 2
RUN_BYTES = 2**21  # what a thread takes at once
_AT_ONCE = 2**18  # less is not worth a thread


class Disk:
    """Writes pieces to a file, in the background; those to be compressed, at once.

    Attributes:
        packer: What compresses.
    """

    def __init__(self, descriptor: int) -> None:
        self.packer = Packer(descriptor)
        self._descriptor = descriptor
        self._pool: Executor | None = None  # none is started for small files
        self._last: list[Future[None]] = []

    def write(self, pieces: Sequence[Piece]) -> None:
        """Begin to write `pieces`; return when those of the call before are written.

        Raises:
            OSError: Something could not be written.
        """
        before, self._last = self._last, []
        for piece in pieces:
            if piece.path:
                self.packer.write(piece)
        pieces = [piece for piece in pieces if not piece.path]
        if sum(len(piece.data) for piece in pieces) < _AT_ONCE:
            for run in _runs(pieces):
                _write_run(self._descriptor, run)
        else:
            self._pool = self._pool or started(THREADS, "gradscope-disk")
            for run in _runs(pieces):
                self._last.append(self._pool.submit(_write_large, self._descriptor, run))
        _finish(before)

    def wait(self) -> None:
        """Return when everything is written.

        Raises:
            OSError: Something could not be written.
        """
        last, self._last = self._last, []
        try:
            _finish(last)
        finally:
            self.packer.flush()

    def close(self) -> None:
        """Let what was begun come to its end, whatever becomes of it."""
        if self._pool is not None:
            self._pool.shutdown()


def _finish(futures: Sequence[Future[None]]) -> None:
    wait(futures)
    for future in futures:
        future.result()


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces together, up to a size that is worth handing to a thread."""
    run: list[Piece] = []
    size = 0
    for piece in pieces:
        run.append(piece)
        size += len(piece.data)
        if size >= RUN_BYTES:
            yield run
            run, size = [], 0
    if run:
        yield run


def _write_large(descriptor: int, run: Sequence[Piece]) -> None:
    """Write a run that is not to wait in memory for the next `fsync`."""
    _write_run(descriptor, run)
    stop = max(piece.offset + piece.length for piece in run)
    begin_writeback(descriptor, min(piece.offset for piece in run), stop)


def _write_run(descriptor: int, run: Sequence[Piece]) -> None:
    for piece in run:
        parts: list[bytes | memoryview] = [piece.data.data]
        if piece.checked:
            zeros = bytes(piece.length - len(piece.data))
            parts += [zeros, fletcher32(piece.data, piece.length)]  # the data are in the cache now
        if piece.sums is not None:
            piece.sums[piece.number] = reduce(lambda found, part: crc32c(part, found), parts, 0)
        write(descriptor, parts, piece.offset)
