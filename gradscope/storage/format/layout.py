"""How arrays lie in the file: chunks, filters, the creation of data sets, and chunk offsets.

Every data set with a sample axis is allocated in full before the first row is written, unless it
is compressed. From then on only data bytes change and no structure. Chunks are near 1 MiB, and
each carries a checksum. Compressed chunks go through shuffle, the compression and Fletcher-32, in
this order: the checksum is of the bytes as they are stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from math import ceil, prod
from typing import Any

import h5py
import numpy as np
import torch

from gradscope.config import Compression
from gradscope.errors import GradscopeError, ResultFileError, SpecError

CHUNK_BYTES = 2**20
SMALL_CHUNK = 2**14  # below this, several batches share a chunk
CHECKSUM_BYTES = 4  # of a chunk's Fletcher-32
RECORD = 3  # numbers of a record of the seal: offset, size, CRC-32C
TABLES = ("samples", "norms")
FORMAT, FORMAT_VERSION = "gradscope", 2
KEYS = "keys"  # the attribute of an owner's states: [[key, format, shape], ...], in their order
SOURCES = "sources"  # the attribute of a file whose rows are in other files

AXES = {  # the axes' names of factors, after the sample axis
    "left": ("k", "t", "r"),
    "right": ("k", "t", "c"),
    "index": ("t",),
    "rows": ("t", "d"),
}
KINDS = {"outer": ("left", "right"), "scatter": ("index", "rows")}

Shape = tuple[int, ...]
Filters = list[tuple[int, tuple[int, ...]]]  # code and values of each

_CODES = {"gzip": h5py.h5z.FILTER_DEFLATE, "zstd": 32015, "blosc2": 32026}
_NAMES = {code: name for name, code in _CODES.items()}


@dataclass(frozen=True)
class Array:
    """A data set as it is to be."""

    shape: Shape  # of all of it
    dtype: torch.dtype  # of its numbers
    chunks: Shape | None = None  # the shape of a chunk, None where it lies in one piece
    text: int | None = None  # the bytes of each entry where they are texts, not numbers
    compression: Compression | None = None  # of its chunks

    @property
    def pieces(self) -> int:
        """The number of chunks."""
        if self.chunks is None:
            return 0
        return prod(-(-size // c) for size, c in zip(self.shape, self.chunks, strict=True))

    @property
    def nbytes(self) -> int:
        """The bytes it takes in the file, not compressed: whole chunks and their checksums."""
        if self.chunks is None:
            return prod(self.shape) * (self.text or self.dtype.itemsize)
        return self.pieces * (prod(self.chunks) * self.dtype.itemsize + CHECKSUM_BYTES)


def rows_array(
    shape: Shape, dtype: torch.dtype, batch: int, compression: Compression | None = None
) -> Array:
    """Return the array of rows (N, ...) that come `batch` at a time.

    Rows that divide the batch need no copy.
    """
    (n, *row), itemsize = shape, dtype.itemsize
    size, chunks = prod(row) * itemsize, None
    if n and size >= CHUNK_BYTES:
        chunks = (1, *split(tuple(row), itemsize))
    elif n and 0 < batch * size < SMALL_CHUNK:
        chunks = (min(n, batch * (SMALL_CHUNK // (batch * size))), *row)
    elif n and size:
        fit = min(CHUNK_BYTES // size, batch, n)
        divisor = max(d for d in range(1, fit + 1) if batch % d == 0)
        chunks = (divisor if 2 * divisor >= fit else fit, *row)
    return Array(shape, dtype, chunks, compression=compression)


def result_array(shape: Shape, dtype: torch.dtype) -> Array:
    """Return how an aggregate of that shape is stored."""
    return Array(shape, dtype, split(shape, dtype.itemsize) if prod(shape) and shape else None)


def split(shape: Shape, itemsize: int) -> Shape:
    """Return a chunk shape of at most 1 MiB: cut along one axis, one entry of those before it."""
    chunk = list(shape)
    for axis, size in enumerate(shape):
        inner = prod(shape[axis + 1 :]) * itemsize
        parts = ceil(size / max(1, CHUNK_BYTES // inner))
        chunk[axis] = max(1, ceil(size / parts))
        if inner <= CHUNK_BYTES:
            break
    return tuple(chunk)


def require_compression(compression: Compression | None) -> None:
    """Check that a compression can be had here."""
    if compression is not None and compression.name != "gzip":
        _plugin(SpecError, f"the compression {compression.name}")


def compression_of(dataset: h5py.Dataset) -> Compression | None:
    """Return how a data set that a run has written is compressed."""
    for code, values in filters_of(dataset.id.get_create_plist()):
        if code in _NAMES:
            place = {"gzip": 0, "zstd": 0, "blosc2": 4}[_NAMES[code]]
            level = int(values[place]) if len(values) > place else 1
            return Compression(_NAMES[code], level)
    return None


def filters_of(plist: h5py.h5p.PropDCID) -> Filters:
    """Return a data set's filters."""
    found = (plist.get_filter(k) for k in range(plist.get_nfilters()))
    return [(int(code), values) for code, _, values, _ in found]


def is_compressed(filters: Filters) -> bool:
    """Whether chunks are of any size."""
    return any(code in _NAMES for code, _ in filters)


def is_known(filters: Filters, name: str) -> bool:
    """Whether the data set `name` has no other filters than these, in this order, checksum last."""
    codes = [code for code, _ in filters]
    first = [code for code in codes[:-1] if code != h5py.h5z.FILTER_SHUFFLE]
    is_checked = codes[-1:] == [h5py.h5z.FILTER_FLETCHER32]
    if not is_checked or len(first) > 1 or any(code not in _NAMES for code in first):
        return not codes
    if first and first[0] != h5py.h5z.FILTER_DEFLATE:
        _plugin(ResultFileError, f"{name} is compressed with {_NAMES[first[0]]}, which")
    return True


def set_compression(plist: h5py.h5p.PropDCID, compression: Compression) -> None:
    """Have a data set's chunks compressed."""
    if compression.name == "gzip":
        plist.set_shuffle()
        plist.set_deflate(compression.level)
        return
    library = _plugin(SpecError, f"the compression {compression.name}")
    if compression.name == "zstd":
        plist.set_shuffle()
        made = library.Zstd(clevel=compression.level)
    else:  # shuffles by itself
        made = library.Blosc2(cname="zstd", clevel=compression.level)
    plist.set_filter(made.filter_id, 0, made.filter_options)


def _plugin(kind: type[GradscopeError], what: str) -> Any:
    """Import hdf5plugin, which tells HDF5 of its filters."""
    try:
        return import_module("hdf5plugin")
    except ImportError as error:
        raise kind(
            f"{what} needs hdf5plugin, which is not installed",
            remedy="pip install 'torch-gradscope[compression]'"
            + ("; or choose gzip." if kind is SpecError else "."),
        ) from error


@dataclass(frozen=True)
class ChunkOffsets:
    """Where the bytes of one data set lie in the file, cut into chunks in the order of the bytes.

    A chunk never goes on beyond the end of a line: all bytes of a data set cut along its rows, or
    one row where rows themselves are cut. A data set that lies in one piece is one chunk.
    """

    offsets: np.ndarray  # (m,) int64, where each chunk begins in the file
    sizes: np.ndarray  # (m,) int64, the bytes it takes there
    chunk: int  # bytes of a chunk; the last one of a line may be shorter, with zeros after it
    line: int  # bytes of a line
    size: int  # bytes of the data set
    checked: bool  # whether each chunk has a Fletcher-32 checksum behind it, and is not compressed
    # the chunks are compressed: of any size, anywhere, and perhaps not all are there
    packed: bool = False

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> "ChunkOffsets":
        """Return where a data set lies."""
        plist, item = dataset.id.get_create_plist(), dataset.id.get_type().get_size()
        layout, shape = plist.get_layout(), dataset.shape
        if layout == h5py.h5d.VIRTUAL:
            none = np.empty(0, np.int64)
            return cls(none, none, 0, 0, 0, checked=False)  # elsewhere
        if layout != h5py.h5d.CHUNKED:
            size, offset = dataset.id.get_storage_size(), dataset.id.get_offset()
            found = [] if offset is None else [(offset, size)]
            offsets, sizes = np.array(found, np.int64).reshape(-1, 2).T
            return cls(offsets, sizes, size, size, size, checked=False)
        chunks, packed = plist.get_chunk(), is_compressed(filters_of(plist))
        cut = next((axis for axis, c in enumerate(chunks) if c > 1), len(chunks) - 1)
        inner = prod(shape[cut + 1 :]) * item
        exact = None if packed else prod(chunks) * item + CHECKSUM_BYTES
        offsets, sizes = _stored_chunks(dataset, shape, chunks, exact).T
        chunk, line = chunks[cut] * inner, shape[cut] * inner
        return cls(offsets, sizes, chunk, line, prod(shape) * item, not packed, packed)

    @property
    def count(self) -> int:
        """The number of chunks, also of those that are not there yet."""
        if not self.line:
            return len(self.offsets)
        return -(-self.size // self.line) * -(-self.line // self.chunk)

    @property
    def extents(self) -> np.ndarray:
        """Offset and stored size of each chunk, (m, 2) int64."""
        return np.stack([self.offsets, self.sizes], 1)

    def room(self, position: int) -> int:
        """Return how many bytes from `position` on lie in the same chunk."""
        within = position % self.line
        return min(self.chunk - within % self.chunk, self.line - within)

    def number(self, position: int) -> int:
        """Return which chunk holds the byte at `position`."""
        if not self.line:
            return 0
        line, within = divmod(position, self.line)
        return line * -(-self.line // self.chunk) + within // self.chunk

    def start(self, number: int) -> int:
        """Return the position of the first byte of a chunk."""
        line, within = divmod(number, -(-self.line // self.chunk))
        return line * self.line + within * self.chunk


def _stored_chunks(
    dataset: h5py.Dataset, shape: Shape, chunks: Shape, exact: int | None
) -> np.ndarray:
    """Return offset and size of each chunk (m, 2), in the order of the grid.

    `exact` is the size of each; None where they are compressed, and the last ones may be missing.
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
