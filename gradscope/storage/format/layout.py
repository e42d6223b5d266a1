"""The storage of arrays in the file: chunks, filters, forms of rows, data sets, chunk offsets.

Every data set with a sample axis is fully allocated before the first row is written, unless it is
compressed. After that, only data bytes change, and the structure stays the same. A chunk has about
1 MiB and a checksum. The filters of compressed chunks are shuffle, the compression and Fletcher-32,
in this order, so the checksum covers the compressed bytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from math import ceil, prod
from typing import Any

import h5py
import numpy as np
import torch

from gradscope.blocks import Block
from gradscope.config import Compression
from gradscope.core.precision import dtype_name
from gradscope.errors import GradscopeError, ResultFileError, SpecError
from gradscope.storage.format.numbers import (
    dtype_named,
    format_of,
    h5_type,
    stored_dtype,
    unescape,
)
from gradscope.storage.plan import FilePlan

CHUNK_BYTES = 2**20
SMALL_CHUNK = 2**14  # below this, several batches share a chunk
CHECKSUM_BYTES = 4  # size of a chunk's Fletcher-32
RECORD = 3  # numbers in a record of the seal: offset, size, CRC-32C
TABLES = ("samples", "norms")
FORMAT, FORMAT_VERSION = "gradscope", 1
KEYS = "keys"  # the attribute of an owner's states: [[key, format, shape], ...]
SOURCES = "sources"  # the attribute of a file whose rows are in other files

AXES = {  # names of the factors' axes after the sample axis
    "left": ("k", "t", "r"),
    "right": ("k", "t", "c"),
    "index": ("t",),
    "rows": ("t", "d"),
}
KINDS = {"outer": ("left", "right"), "scatter": ("index", "rows")}

Shape = tuple[int, ...]
Filters = list[tuple[int, tuple[int, ...]]]  # (code, values) of each filter

_CODES = {"gzip": h5py.h5z.FILTER_DEFLATE, "zstd": 32015, "blosc2": 32026}
_NAMES = {code: name for name, code in _CODES.items()}


@dataclass(frozen=True)
class Array:
    """The specification of a data set."""

    shape: Shape
    dtype: torch.dtype
    chunks: Shape | None = None  # the shape of a chunk, or None for contiguous storage
    text: int | None = None  # bytes per entry if the entries are texts
    compression: Compression | None = None

    @property
    def pieces(self) -> int:
        """The number of chunks."""
        if self.chunks is None:
            return 0
        return prod(-(-size // c) for size, c in zip(self.shape, self.chunks, strict=True))

    @property
    def nbytes(self) -> int:
        """Its uncompressed size in the file: whole chunks and their checksums."""
        if self.chunks is None:
            return prod(self.shape) * (self.text or self.dtype.itemsize)
        return self.pieces * (prod(self.chunks) * self.dtype.itemsize + CHECKSUM_BYTES)


def rows_array(
    shape: Shape, dtype: torch.dtype, batch_size: int, compression: Compression | None = None
) -> Array:
    """Return the data set for rows (N, ...) that are written `batch_size` at a time.

    If the chunk's rows divide the batch size, rows are written without a copy.
    """
    (n, *row), itemsize = shape, dtype.itemsize
    size, chunks = prod(row) * itemsize, None
    if n and size >= CHUNK_BYTES:
        chunks = (1, *split(tuple(row), itemsize))
    elif n and 0 < batch_size * size < SMALL_CHUNK:
        chunks = (min(n, batch_size * (SMALL_CHUNK // (batch_size * size))), *row)
    elif n and size:
        fit = min(CHUNK_BYTES // size, batch_size, n)
        divisor = max(d for d in range(1, fit + 1) if batch_size % d == 0)
        chunks = (divisor if 2 * divisor >= fit else fit, *row)
    return Array(shape, dtype, chunks, compression=compression)


def result_array(shape: Shape, dtype: torch.dtype) -> Array:
    """Return the data set for an aggregate."""
    return Array(shape, dtype, split(shape, dtype.itemsize) if prod(shape) and shape else None)


def split(shape: Shape, itemsize: int) -> Shape:
    """Return a chunk shape of at most 1 MiB: one axis is cut, axes before it have size 1."""
    chunk = list(shape)
    for axis, size in enumerate(shape):
        inner = prod(shape[axis + 1 :]) * itemsize
        parts = ceil(size / max(1, CHUNK_BYTES // inner))
        chunk[axis] = max(1, ceil(size / parts))
        if inner <= CHUNK_BYTES:
            break
    return tuple(chunk)


def require_compression(compression: Compression | None) -> None:
    """Raise if the compression's library is not installed."""
    if compression is not None and compression.name != "gzip":
        _plugin(SpecError, f"the compression {compression.name}")


def compression_of(dataset: h5py.Dataset) -> Compression | None:
    """Return the compression of a data set, or None."""
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
    """Whether the filters compress the chunks."""
    return any(code in _NAMES for code, _ in filters)


def is_known(filters: Filters, name: str) -> bool:
    """Whether the filters of `name` are those that gradscope writes, in the same order."""
    codes = [code for code, _ in filters]
    first = [code for code in codes[:-1] if code != h5py.h5z.FILTER_SHUFFLE]
    is_checked = codes[-1:] == [h5py.h5z.FILTER_FLETCHER32]
    if not is_checked or len(first) > 1 or any(code not in _NAMES for code in first):
        return not codes
    if first and first[0] != h5py.h5z.FILTER_DEFLATE:
        _plugin(ResultFileError, f"{name} is compressed with {_NAMES[first[0]]}, which")
    return True


def set_compression(plist: h5py.h5p.PropDCID, compression: Compression) -> None:
    """Add the compression to the properties of a new data set."""
    if compression.name == "gzip":
        plist.set_shuffle()
        plist.set_deflate(compression.level)
        return
    library = _plugin(SpecError, f"the compression {compression.name}")
    if compression.name == "zstd":
        plist.set_shuffle()
        made = library.Zstd(clevel=compression.level)
    else:  # Blosc2 includes shuffle
        made = library.Blosc2(cname="zstd", clevel=compression.level)
    plist.set_filter(made.filter_id, 0, made.filter_options)


def _plugin(kind: type[GradscopeError], what: str) -> Any:
    """Import hdf5plugin, which registers its filters with HDF5."""
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
    """The positions of a data set's chunks in the file, in the order of the data set's bytes.

    No chunk crosses the end of a line. A line is the whole data set if chunks hold whole rows, and
    one row if rows are split into chunks. A contiguous data set has a single chunk.
    """

    offsets: np.ndarray  # (m,) int64, the position of each chunk in the file
    sizes: np.ndarray  # (m,) int64, the stored size of each chunk in bytes
    chunk: int  # bytes of a chunk; the last chunk of a line may be shorter, padded with zeros
    line: int  # bytes of a line
    size: int  # bytes of the data set
    checked: bool  # whether each chunk is uncompressed and followed by its Fletcher-32 checksum
    # whether chunks are compressed: their sizes differ, and some may not be written yet
    packed: bool = False

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> "ChunkOffsets":
        """Return the chunks of a data set."""
        plist, item = dataset.id.get_create_plist(), dataset.id.get_type().get_size()
        layout, shape = plist.get_layout(), dataset.shape
        if layout == h5py.h5d.VIRTUAL:
            none = np.empty(0, np.int64)
            return cls(none, none, 0, 0, 0, checked=False)  # the bytes are in other files
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
        """The number of chunks, including those that are not written yet."""
        if not self.line:
            return len(self.offsets)
        return -(-self.size // self.line) * -(-self.line // self.chunk)

    @property
    def extents(self) -> np.ndarray:
        """Offset and stored size of each chunk, (m, 2) int64."""
        return np.stack([self.offsets, self.sizes], 1)

    def room(self, position: int) -> int:
        """Return the number of bytes from `position` to the end of its chunk."""
        within = position % self.line
        return min(self.chunk - within % self.chunk, self.line - within)

    def number(self, position: int) -> int:
        """Return the number of the chunk that holds the byte at `position`."""
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
    """Return offset and size of each chunk, (m, 2) int64, in the order of the grid.

    `exact` is the size that each chunk must have. If None, the chunks are compressed, and the last
    chunks may be missing.
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
        raise ResultFileError(f"chunks of {dataset.name} are missing or have no checksum")
    chosen: np.ndarray = table[order, :2]
    return chosen


def datasets(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    """Yield (path, data set) for every data set in the file."""
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


DENSE = ""  # the name of the only data set of a dense column

_TEXT = h5py.string_dtype()


@dataclass(frozen=True)
class Form:
    """The storage of a column's rows: dense, or as factors of their blocks.

    kind "outer": left (N, k, t, r) and right (N, k, t, c); kind "scatter": index (N, t) and
    rows (N, t, d). Factors in half precision would be rounded twice, so they are stored in
    float32. Factors computed in bfloat16 are stored unchanged.
    """

    shape: Shape  # shape of one row
    dtype: torch.dtype  # dtype of dense rows
    kind: str | None = None  # kind of the factors, or None for dense rows
    # {name in the group: (row shape, dtype)} of each factor
    factors: Mapping[str, tuple[Shape, torch.dtype]] = field(default_factory=dict)
    text: int | None = None  # bytes per entry if the entries are texts
    compression: Compression | None = None

    @property
    def dense(self) -> "Form":
        """The form of the same rows without factors."""
        return replace(self, kind=None, factors={})

    @property
    def parts(self) -> Mapping[str, tuple[Shape, torch.dtype]]:
        """{name: (row shape, dtype)} of each data set."""
        return self.factors if self.kind else {DENSE: (self.shape, self.dtype)}


def form_of(block: Block, plan: FilePlan) -> Form:
    """Return the form for a parameter's rows, given its block of the first batch."""
    dtype = stored_dtype(block.dtype, plan.dtype)
    dense = Form(block.shape, dtype, compression=plan.compression)
    found = None if plan.layout == "dense" else block.factors()  # factors() may be expensive
    if found is None:
        return dense
    stored = {}
    for name, factor in found.tensors.items():
        kept = torch.int64
        if factor.is_floating_point() or factor.is_complex():
            kept = stored_dtype(factor.dtype, plan.dtype)
            if kept.itemsize <= 2 and not kept == factor.dtype == torch.bfloat16:
                kept = torch.float32
        stored[name] = tuple(factor.shape[1:]), kept
    size = sum(prod(shape) * kept.itemsize for shape, kept in stored.values())
    if plan.layout == "auto" and size >= prod(block.shape) * dtype.itemsize:
        return dense
    return replace(dense, kind=found.kind, factors=stored)


def stored_form(item: h5py.HLObject) -> Form:
    """Return the form of a column in a file."""
    if isinstance(item, h5py.Dataset):
        text = item.dtype.itemsize if item.dtype.kind == "S" else None
        shape = tuple(item.shape[1:])
        return Form(shape, format_of(item), text=text, compression=compression_of(item))
    kind = str(item.attrs["kind"])
    return Form(
        shape=tuple(int(s) for s in item.attrs["shape"]),
        dtype=dtype_named(str(item.attrs["dtype"])),
        kind=kind,
        factors={k: (tuple(item[k].shape[1:]), format_of(item[k])) for k in KINDS[kind]},
        compression=compression_of(item[KINDS[kind][0]]),
    )


def create(group: h5py.Group, name: str, array: Array) -> h5py.Dataset:
    """Create a data set whose chunks have checksums, allocated now unless it is compressed."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_obj_track_times(False)  # no times, so the same run writes the same bytes
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if array.chunks is not None:
        plist.set_chunk(array.chunks)
        if array.compression is not None:
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)  # chunk sizes are not known yet
            set_compression(plist, array.compression)
        plist.set_fletcher32()
    shape = array.shape
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    kind = h5_type(array.dtype)
    if array.text is not None:  # UTF-8, padded with zeros
        kind = h5py.h5t.C_S1.copy()
        kind.set_size(array.text)
        kind.set_cset(h5py.h5t.CSET_UTF8)
        kind.set_strpad(h5py.h5t.STR_NULLPAD)
    made = h5py.h5d.create(group.id, name.encode(), kind, space, plist, utf8_links())
    return h5py.Dataset(made)


@cache
def utf8_links() -> h5py.h5p.PropLCID:
    """Return HDF5 link properties that store names in UTF-8."""
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    return links


def put_attribute(item: h5py.HLObject, name: str, values: np.ndarray, kind: np.dtype) -> None:
    """Write a new attribute as `item.attrs` does, three times as fast."""
    scalar = h5py.h5s.create(h5py.h5s.SCALAR)
    space = h5py.h5s.create_simple(values.shape) if values.shape else scalar
    made = h5py.h5a.create(item.id, name.encode(), h5py.h5t.py_create(kind, logical=True), space)
    made.write(values, h5py.h5t.py_create(kind))


def columns_of(path: str, form: Form, n: int, batch_size: int) -> dict[str, Array]:
    """Return {factor: data set} of a column of n rows, written `batch_size` at a time."""
    if in_table(path):
        return {DENSE: Array((n,), form.dtype, None, form.text)}
    return {
        part: rows_array((n, *shape), dtype, batch_size, form.compression)
        for part, (shape, dtype) in form.parts.items()
    }


def create_columns(file: h5py.File, forms: Mapping[str, Form], n: int, batch_size: int) -> None:
    """Create the data sets of n rows, which are written `batch_size` at a time."""
    for path, form in forms.items():
        place, _, escaped = path.rpartition("/")
        group = file[place] if form.kind is None else factors_group(file[place], escaped, form)
        for part, array in columns_of(path, form, n, batch_size).items():
            made = create(group, part or escaped, array)
            if part == DENSE and place != "/samples":
                describe(made, unescape(escaped), "dense")


def factors_group(chain: h5py.Group, escaped: str, form: Form) -> h5py.Group:
    """Create the group for a parameter's factors."""
    group = chain.create_group(escaped)
    describe(group, unescape(escaped), "factored")
    group.attrs["kind"] = form.kind
    group.attrs["shape"] = np.array(form.shape, np.int64)
    group.attrs["dtype"] = dtype_name(form.dtype)
    return group


def describe(item: h5py.HLObject, name: str, representation: str) -> None:
    """Record the parameter's name, unless HDF5 text cannot hold it, and the representation."""
    if "\0" not in name and not any("\ud800" <= c <= "\udfff" for c in name):
        put_attribute(item, "name", np.array(name, object), _TEXT)
    put_attribute(item, "representation", np.array(representation, object), _TEXT)


def in_table(path: str) -> bool:
    """Whether a column belongs to /samples or /norms."""
    return path.split("/")[1] in TABLES
