"""Where the bytes of a data set lie in the file.

Everything is allocated before the first row is written, so the places are known from then on, and
rows go there without HDF5. A data set's bytes, in their order, are cut into pieces: one for each
chunk, which has a checksum behind it. A piece never goes on beyond the end of a line: all bytes
of a data set cut along its rows, or one row where rows themselves are cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import h5py
import numpy as np

from gradscope.errors import ResultFileError
from gradscope.storage.checksum import CHECKSUM_BYTES
from gradscope.storage.compression import filters_of, is_compressed


@dataclass(frozen=True)
class Place:
    """Where the bytes of one data set lie.

    Attributes:
        offsets: (m,) int64, where each piece begins in the file, in the order of the bytes.
        sizes: (m,) int64, the bytes it takes there.
        piece: Bytes of a piece; the last one of a line may be shorter, with zeros after it.
        line: Bytes of a line.
        size: Bytes of the data set.
        checked: Whether each piece has a Fletcher-32 checksum behind it.
        packed: The pieces are compressed: of any size, anywhere, and perhaps not all are there.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    piece: int
    line: int
    size: int
    checked: bool
    packed: bool = False

    @property
    def extents(self) -> np.ndarray:
        """Offset and stored size of each piece, (m, 2) int64."""
        return np.stack([self.offsets, self.sizes], 1)

    def room(self, position: int) -> int:
        """Return how many bytes from `position` on lie in the same piece."""
        within = position % self.line
        return min(self.piece - within % self.piece, self.line - within)

    def number(self, position: int) -> int:
        """Return which piece holds the byte at `position`."""
        if not self.line:
            return 0
        line, within = divmod(position, self.line)
        return line * -(-self.line // self.piece) + within // self.piece

    def start(self, number: int) -> int:
        """Return the position of the first byte of a piece."""
        line, within = divmod(number, -(-self.line // self.piece))
        return line * self.line + within * self.piece

    def offset(self, position: int) -> int:
        """Return where in the file the piece begins that holds the byte at `position`."""
        return int(self.offsets[self.number(position)])


def place_of(dataset: h5py.Dataset) -> Place:
    """Return where a data set lies.

    Raises:
        ResultFileError: Its chunks are not one for each place of the grid, with its checksum.
    """
    plist, item = dataset.id.get_create_plist(), dataset.id.get_type().get_size()
    layout, shape = plist.get_layout(), dataset.shape
    if layout == h5py.h5d.VIRTUAL:
        none = np.empty(0, np.int64)
        return Place(none, none, 0, 0, 0, checked=False)  # elsewhere
    if layout != h5py.h5d.CHUNKED:
        size, offset = dataset.id.get_storage_size(), dataset.id.get_offset()
        found = [] if offset is None else [(offset, size)]
        offsets, sizes = np.array(found, np.int64).reshape(-1, 2).T
        return Place(offsets, sizes, size, size, size, checked=False)
    chunks, packed = plist.get_chunk(), is_compressed(filters_of(plist))
    cut = next((axis for axis, c in enumerate(chunks) if c > 1), len(chunks) - 1)
    inner = prod(shape[cut + 1 :]) * item
    exact = None if packed else prod(chunks) * item + CHECKSUM_BYTES
    offsets, sizes = _stored(dataset, shape, chunks, exact).T
    piece, line, size = chunks[cut] * inner, shape[cut] * inner, prod(shape) * item
    return Place(offsets, sizes, piece, line, size, not packed, packed)


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


def _stored(
    dataset: h5py.Dataset, shape: tuple[int, ...], chunks: tuple[int, ...], exact: int | None
) -> np.ndarray:
    """Return offset and size of each chunk (m, 2), in the order of the grid.

    Args:
        dataset: In chunks.
        shape: Of all of it.
        chunks: Of a chunk.
        exact: The bytes of each chunk; None where they are compressed, and where the last ones may
            not be there yet.
    """
    found: list[tuple[int, ...]] = []
    dataset.id.chunk_iter(
        lambda c: found.append((c.byte_offset, c.size, c.filter_mask, *c.chunk_offset))
    )
    table = np.array(found, np.int64).reshape(-1, 3 + len(shape))
    grid = [-(-size // c) for size, c in zip(shape, chunks, strict=True)]
    places = table[:, 3:] // np.array(chunks)
    numbers = places @ np.array([prod(grid[axis + 1 :]) for axis in range(len(grid))])
    order = np.argsort(numbers)
    sound = np.array_equal(numbers[order], np.arange(len(table))) and not table[:, 2].any()
    sound = sound and bool(((places >= 0) & (places < grid)).all())
    if exact is not None:
        sound = sound and len(table) == prod(grid) and bool((table[:, 1] == exact).all())
    if not sound:
        raise ResultFileError(f"chunks of {dataset.name} are missing or unchecked")
    chosen: np.ndarray = table[order, :2]
    return chosen
