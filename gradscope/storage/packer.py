"""Writing compressed chunks, through HDF5.

How large a compressed chunk is shows when it is there, so its place cannot be known beforehand.
HDF5 finds one, and its structure changes with every chunk: what a run needs to go on is the
structure as it was at the last commit, and chunks that are complete are never written again.
Their checksums are taken when HDF5 hands them over to be written.
"""

from contextlib import AbstractContextManager
from math import prod
from typing import Any

import h5py
import numpy as np

from gradscope.core.shortage import require_memory
from gradscope.storage.checks import RECORD
from gradscope.storage.editing import Written, editing
from gradscope.storage.places import Place
from gradscope.storage.stream import Piece


class Packer:
    """Compresses pieces and writes them to the HDF5 file behind a descriptor.

    Attributes:
        failed: Whether something was not written: the structure is then that of the last commit
            only.
        written: Size and CRC-32C of what HDF5 has written, by offset: chunks among it.
    """

    def __init__(self, descriptor: int) -> None:
        self.failed = False
        self.written: Written = {}
        self._descriptor = descriptor
        self._editing: AbstractContextManager[h5py.File] | None = None
        self._file: h5py.File | None = None
        self._open: dict[str, h5py.Dataset] = {}

    def write(self, piece: Piece) -> None:
        """Compress one piece, which is a whole chunk, and write it.

        Raises:
            OSError: It could not be written; the file is closed.
        """
        try:
            self._write(piece)
        except BaseException as error:  # at once: HDF5 may need the memory that is kept for it
            self._close(type(error), error, error.__traceback__)
            raise

    def flush(self) -> None:
        """Return when everything is in the file.

        Raises:
            OSError: Something could not be written.
        """
        self._close(None, None, None)

    def _write(self, piece: Piece) -> None:
        if self._file is None:
            self._editing = editing(self._descriptor, self.written)
            self._file = self._editing.__enter__()
        if piece.path not in self._open:
            self._open[piece.path] = self._file[piece.path]
        dataset = self._open[piece.path]
        kind = dataset.id.get_type()
        first = np.unravel_index(piece.start // kind.get_size(), dataset.shape)
        chunk = zip(first, dataset.chunks, dataset.shape, strict=True)
        count = tuple(int(min(c, size - at)) for at, c, size in chunk)
        missing = prod(count) * kind.get_size() - len(piece.data)
        data = np.concatenate([piece.data, np.zeros(missing, np.uint8)]) if missing else piece.data
        inside = dataset.id.get_space()
        inside.select_hyperslab(tuple(int(at) for at in first), count)
        require_memory()
        dataset.id.write(h5py.h5s.create_simple(count), inside, data, kind)

    def know(self, records: np.ndarray) -> None:
        """Take over what was written before (m, 3): offset, size and CRC-32C."""
        self.written |= {offset: (size, sum_) for offset, size, sum_ in records.tolist()}

    def records(self, place: Place) -> np.ndarray:
        """Return offset, size and CRC-32C of the chunks at a place, (m, 3) int64."""
        found = [(at, *self.written[at]) for at in place.offsets.tolist()]
        records = np.array(found, np.int64).reshape(-1, RECORD)
        assert np.array_equal(records[:, 1], place.sizes)  # each was written at once
        return records

    def _close(self, *error: Any) -> None:
        """Close the file, and with it the data sets, as a context does on its exit."""
        context, self._editing, self._file = self._editing, None, None
        try:
            if context is not None:
                context.__exit__(*error)
        except BaseException:
            self.failed = True
            raise
        finally:
            self._open.clear()
