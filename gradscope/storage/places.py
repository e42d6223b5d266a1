"""Where the bytes of a data set lie in the file.

Everything is allocated before the first row is written, so the places are known from then on, and
rows go there without HDF5. A data set's bytes, in their order, are cut into pieces: one for each
chunk, which has a checksum behind it. A piece never goes on beyond the end of a line: all bytes
of a data set cut along its rows, or one row where rows themselves are cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import h5py
import numpy as np

from gradscope.errors import ResultFileError
from gradscope.storage.checksum import CHECKSUM_BYTES
from gradscope.storage.compression import is_compressed

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Place:
    """Where the bytes of one data set lie.

    Attributes:
        offsets: (m,) int64, where each piece begins in the file, in the order of the bytes.
        piece: Bytes of a piece; the last one of a line may be shorter, with zeros after it.
        line: Bytes of a line.
        size: Bytes of the data set.
        checked: Whether each piece has a checksum behind it.
        packed: The pieces are compressed: those that are there lie anywhere, of any size.
        sizes: (m,) int64, the stored bytes of each piece where they are compressed.
    """

    offsets: np.ndarray
    piece: int
    line: int
    size: int
    checked: bool
    packed: bool = False
    sizes: np.ndarray | None = None

    @property
    def extents(self) -> np.ndarray:
        """Offset and stored size of each piece, (m, 2) int64."""
        if self.sizes is not None:
            return np.stack([self.offsets, self.sizes], 1)
        stored = self.piece + (CHECKSUM_BYTES if self.checked else 0)
        return np.stack([self.offsets, np.full_like(self.offsets, stored)], 1)

    def room(self, position: int) -> int:
        """Return how many bytes from `position` on lie in the same piece."""
        within = position % self.line
        return min(self.piece - within % self.piece, self.line - within)

    def offset(self, position: int) -> int:
        """Return where in the file the piece begins that holds the byte at `position`."""
        line, within = divmod(position, self.line)
        return int(self.offsets[line * -(-self.line // self.piece) + within // self.piece])


def place_of(dataset: h5py.Dataset) -> Place:
    """Return where a data set lies.

    Raises:
        ResultFileError: Its chunks are not one for each place of the grid, with its checksum.
    """
    item, chunks = dataset.id.get_type().get_size(), dataset.chunks
    if dataset.id.get_create_plist().get_layout() == h5py.h5d.VIRTUAL:
        return Place(np.empty(0, np.int64), 0, 0, 0, checked=False)  # elsewhere
    if chunks is None:
        size = dataset.id.get_storage_size()
        offsets = np.array([dataset.id.get_offset()] if size else [], np.int64)
        return Place(offsets, size, size, size, checked=False)
    size = prod(dataset.shape) * item
    cut = next((axis for axis, c in enumerate(chunks) if c > 1), len(chunks) - 1)
    inner = prod(dataset.shape[cut + 1 :]) * item
    if is_compressed(dataset):
        line = dataset.shape[cut] * inner
        return _packed(dataset, Place(_NONE, chunks[cut] * inner, line, size, False, packed=True))
    offsets = _offsets(dataset)
    return Place(offsets, chunks[cut] * inner, dataset.shape[cut] * inner, size, checked=True)


def datasets(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    """Yield the path of every data set, and the data set."""
    pending = [("", file.id)]
    while pending:
        path, group = pending.pop()
        for name in group:
            item = h5py.h5o.open(group, name)
            inner = f"{path}/{name.decode()}"
            if isinstance(item, h5py.h5d.DatasetID):
                yield inner, h5py.Dataset(item)
            else:
                pending.append((inner, item))


def _packed(dataset: h5py.Dataset, place: Place) -> Place:
    """Return the place with those chunks that are there."""
    found: list[tuple[int, int]] = []
    dataset.id.chunk_iter(lambda chunk: found.append((chunk.byte_offset, chunk.size)))
    table = np.array(found, np.int64).reshape(-1, 2)
    return replace(place, offsets=table[:, 0], sizes=table[:, 1])


def _offsets(dataset: h5py.Dataset) -> np.ndarray:
    found: list[tuple[int, ...]] = []
    dataset.id.chunk_iter(
        lambda c: found.append((c.byte_offset, c.size, c.filter_mask, *c.chunk_offset))
    )
    table = np.array(found, np.int64).reshape(-1, 3 + dataset.ndim)
    grid = -(-np.array(dataset.shape) // np.array(dataset.chunks))
    places = table[:, 3:] // np.array(dataset.chunks)
    inside = len(table) == grid.prod() and ((places >= 0) & (places < grid)).all()
    order = np.ravel_multi_index(tuple(places.T), tuple(grid)) if inside else np.empty(0)
    stored = prod(dataset.chunks) * dataset.id.get_type().get_size() + CHECKSUM_BYTES
    sound = inside and len(np.unique(order)) == len(table)
    if not sound or table[:, 2].any() or (table[:, 1] != stored).any():
        raise ResultFileError(f"chunks of {dataset.name} are missing or unchecked")
    offsets: np.ndarray = table[np.argsort(order), 0]
    return offsets
