"""Random projections of a sample's gradient to few numbers, keeping inner products on average.

Matrices of independent entries are drawn a tile at a time and kept while they fit. Every entry
is looked up in a table by raw random bits, so mean and variance are the table's, and the same bits
give the same matrix wherever it is used. A tile of 16 rows and up to 4,096 columns, counted from
the matrix's first, has a stream of its own and is laid out row by row. So an entry depends on seed,
use, name, its place and the number of columns alone. Of a sparse matrix the places are kept, too.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, reduce
from itertools import pairwise
from math import ceil, isqrt, prod, sqrt
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Block, DenseBlock, Gradients, wide
from gradscope.blocks.base import TILE_BYTES, as_rows
from gradscope.core.precision import wider
from gradscope.stages.transforms import random
from gradscope.stages.transforms.base import Transform, TransformScope, transform, widened

Kind = Literal["gaussian", "rademacher", "sparse", "sjlt", "kronecker"]
Per = Literal["sample", "parameter"]
Project = Callable[[str, Block], Tensor]  # of a parameter's name and block: T(g) (n, dim)
Tile = tuple[slice, slice, Tensor]  # rows, columns, entries
Piece = tuple[slice, slice, Tensor]  # samples, entries, values

_LARGEST = 2**24  # numbers of a projection
_ROWS, _COLUMNS = 16, 4096  # of a stream: changing these changes every matrix
_CHUNKS = 16  # entries that a tile adds to a dim, and tiles before their sum goes to float64
_PATTERN = 2**19  # entries of a sparse matrix's tile, if it is no wider
_KEPT = 2**28  # bytes of matrices kept for the next batch


@transform("project", TransformScope.LINEAR)
def project(
    dim: int,
    kind: Kind = "gaussian",
    seed: int = 0,
    nonzeros: int | None = None,
    per: Per = "sample",
) -> Transform:
    """T(g) = P g / √dim, P random: the single entry `project` (n, dim), in float64.

    Over the choice of P, E⟨Pg, Ph⟩/dim = ⟨g, h⟩ (Johnson & Lindenstrauss 1984). P depends on seed,
    kind and each parameter's name and shape alone; with a smaller dim it is the first rows of the
    larger one (but for sjlt and kronecker). Products are taken in the gradients' own precision, in
    float32 at least. Up to 256 MiB of P are kept for the next batch; what is beyond is drawn again.

    `per=parameter` projects each parameter by itself, with the same P: NAME (n, dim), whose sum
    over all names is `project`. A parameter of at most dim entries is not projected but kept,
    NAME (n, entries), so that its inner products are exact.

    The entries of P are independent of mean 0 and variance 1:

    - gaussian: standard normal, rounded to 2^16 values of equal probability, ±4.3 the outermost;
    - rademacher: ±1 (Achlioptas 2003), the fastest of these to draw;
    - sparse: ±√3 with probability 1/6 each, else 0 (Achlioptas 2003), rounded to 16 bits: ±1.73202
      with probability 10923/65536 each.

    Or most of them are 0, or they are products:

    - sjlt: sparse Johnson-Lindenstrauss (Dasgupta et al. 2010, arXiv:1004.4240). The dims are cut
      into `nonzeros` (1) equal parts of w = dim/nonzeros, and each entry of g is added to one dim
      of every part, with a random sign (Kane & Nelson 2014, arXiv:1012.1577), then all is divided
      by √nonzeros. Entry j of a parameter goes to place (j + r) mod w of a part; r is drawn
      uniformly for each part and each w entries on. So two of the same w never meet, any others
      with probability 1/w, and the variance of ⟨Tg, Th⟩ is at most that of rademacher, at a cost of
      `nonzeros` additions an entry instead of dim;
    - kronecker: P = A ⊗ C for each parameter seen as a matrix (its first axes, all others: where
      rows and columns are the fewest together), A (a, r) and C (b, c) normal with a·b = dim, as
      square as dim's divisors allow. Then P Σₜ bₜ⊗aₜ = Σₜ (A bₜ)(C aₜ)ᵀ, and no gradient of an
      outer block is formed (Choe et al. 2024, arXiv:2405.13954, "LoGra"). Its variance is larger
      for gradients of low rank.
    """
    if not 1 <= dim <= _LARGEST:
        raise ValueError(f"dim must be from 1 to {_LARGEST:,}, not {dim:,}")
    projected = _bound(dim, kind, seed, nonzeros)
    size = sqrt(nonzeros or 1) if kind == "sjlt" else sqrt(dim)  # of a column of P

    def whole(gradients: Gradients) -> dict[str, Tensor]:
        dtypes = (wider(block.dtype, block.device) for block in gradients.values())
        dtype = reduce(torch.promote_types, dtypes)
        parts = (projected(name, block).to(dtype) for name, block in gradients.items())
        return {"project": reduce(Tensor.add_, parts).div_(size)}

    def each(gradients: Gradients) -> dict[str, Tensor]:
        return {
            k: projected(k, b) / size if prod(b.shape) > dim else as_rows(wide(b).dense())
            for k, b in gradients.items()
        }

    def apply(gradients: Gradients) -> Gradients:
        found = (each if per == "parameter" else whole)(widened(gradients))
        return gradients.of({name: DenseBlock(values) for name, values in found.items()})

    return apply


def _bound(dim: int, kind: Kind, seed: int, nonzeros: int | None) -> Project:
    """Return what projects a block by a matrix of this kind."""
    if kind == "sjlt":
        count = 1 if nonzeros is None else nonzeros
        if not 1 <= count <= dim or dim % count:
            raise ValueError(f"nonzeros must divide dim, and {count} does not divide {dim}")
        return _added(SparseMatrices(dim, count, seed))
    if nonzeros is not None:
        raise ValueError(f"nonzeros is for kind=sjlt, and kind is {kind}")
    return _two_sided(dim, seed) if kind == "kronecker" else _full(dim, kind, seed)


def _full(dim: int, kind: str, seed: int) -> Project:
    """Return what multiplies a block by its projection (dim, entries), tile by tile."""
    matrices = RandomMatrices(dim, kind, seed, f"project {kind}")

    def projected(name: str, block: Block) -> Tensor:
        size = prod(block.shape)
        found = torch.zeros(
            block.n, dim, dtype=wider(block.dtype, block.device), device=block.device
        )
        for samples, part, values in block.pieces():
            for rows, columns, entries in matrices.tiles(name, size, part, block.device):
                inside = slice(columns.start - part.start, columns.stop - part.start)
                # a tile's product in the gradients' own dtype, the sum over tiles in float64
                found[samples, rows].add_(values[:, inside] @ entries.to(values.dtype).mT)
        return found

    return projected


def _added(matrices: "SparseMatrices") -> Project:
    """Return what adds the entries of a block to their dims."""
    tile = max(_COLUMNS, matrices.width, min(_CHUNKS * matrices.width, _PATTERN))  # entries

    def projected(name: str, block: Block) -> Tensor:
        size, dtype = prod(block.shape), wider(block.dtype, block.device)
        found = torch.empty(block.n, matrices.rows, dtype=dtype, device=block.device)
        step = max(1, TILE_BYTES // (4 * tile * block.dtype.itemsize))  # samples of a tile
        for start in range(0, block.n, step):
            some = block if step >= block.n else block.select(slice(start, start + step))
            total = torch.zeros(matrices.rows, some.n, dtype=dtype, device=block.device)
            near = torch.zeros_like(total, dtype=block.dtype)  # of the last tiles
            for k, (samples, part, values) in enumerate(_cut(some.pieces(), tile), 1):
                pattern = matrices.part(name, size, part, block.device)
                near[:, samples].add_(pattern.of(values.mT))  # += would copy it once more
                if k % _CHUNKS == 0:
                    total += near
                    near.zero_()
            found[start : start + step] = total.add_(near).mT
        return found

    return projected


def _cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
    """Cut pieces of more than `most` entries, where others are cut too."""
    for samples, part, values in pieces:
        if part.stop - part.start <= most:
            yield samples, part, values
            continue
        inner = range(part.start - part.start % most + most, part.stop, most)
        for start, stop in pairwise([part.start, *inner, part.stop]):
            yield samples, slice(start, stop), values[:, start - part.start : stop - part.start]


def _two_sided(dim: int, seed: int) -> Project:
    """Return what projects a block from both sides."""
    a = max(d for d in range(1, isqrt(dim) + 1) if dim % d == 0)
    left, right = (
        RandomMatrices(rows, "gaussian", seed, f"project {side}")
        for rows, side in ((a, "left"), (dim // a, "right"))
    )

    def projected(name: str, block: Block) -> Tensor:
        rows, columns = _sides(block.shape)
        found = block.two_sided(
            left.whole(name, rows, block.device), right.whole(name, columns, block.device)
        )
        return found.flatten(1).to(wider(block.dtype, block.device))

    return projected


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a parameter seen as a matrix: the fewest together."""
    cuts = range(1, max(2, len(shape)))
    return min(((prod(shape[:cut]), prod(shape[cut:])) for cut in cuts), key=sum)


@cache
def table(kind: str) -> np.ndarray:
    """Return the entries (2^bits, m), float32, that each value of a few random bits stands for."""
    if kind == "rademacher":  # the eight signs of the bits of a byte
        values = np.unpackbits(np.arange(256, dtype=np.uint8).reshape(-1, 1), axis=1) * 2.0 - 1.0
    elif kind == "sparse":  # ±c at the nearest to a sixth of 2^16 places each, variance 1
        count = round(2**16 / 6)
        values = np.zeros((2**16, 1))
        values[:count], values[-count:] = (sign * sqrt(2**16 / (2 * count)) for sign in (-1, 1))
    else:  # the standard normal's quantiles in the middle of 2^16 equal parts, variance 1
        parts = (torch.arange(2**15, dtype=torch.float64) + 0.5) / 2**16
        half = torch.special.ndtri(parts).numpy()
        values = np.concatenate([half, -half]).reshape(-1, 1)
        values /= sqrt(np.square(values).mean())
    return values.astype(np.float32)


class _Place(NamedTuple):
    """Which tile: of which matrix, from which row and column on, and where it is wanted."""

    name: str
    top: int
    first: int
    device: torch.device


class RandomMatrices:
    """Matrices (rows, columns), one for each name.

    Tiles are kept for as long as this object lives, up to `kept_bytes` over all names; the others
    are drawn again whenever they are asked for, by as many threads as torch may use.
    """

    def __init__(
        self,
        rows: int,
        kind: str,  # of entries: gaussian, rademacher or sparse
        seed: int,
        use: str,  # what the numbers are for
        *,
        tile_rows: int = 1024,  # of a tile: 16 MiB, so that it is multiplied from the cache
        kept_bytes: int = _KEPT,  # what may be kept for the next batch
    ) -> None:
        self.rows, self._table, self._seed, self._use = rows, table(kind), seed, use
        self._tile_rows, self._left = tile_rows, kept_bytes
        self._kept: dict[_Place, Tensor] = {}
        self._last: dict[_Place, Tensor] = {}  # at most one
        self._buffer = np.empty(0, np.float32)  # fresh pages cost as much as the drawing

    def tiles(self, name: str, columns: int, part: slice, device: torch.device) -> Iterator[Tile]:
        """Yield (rows, columns, entries), float32, that cover all rows of the columns `part`.

        Entries are valid until the next are asked for.
        """
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # starts none that is not used
            for first in range(part.start - part.start % _COLUMNS, part.stop, _COLUMNS):
                wide = min(_COLUMNS, columns - first)
                wanted = slice(max(first, part.start), min(first + wide, part.stop))
                inside = slice(wanted.start - first, wanted.stop - first)
                for top in range(0, self.rows, self._tile_rows):
                    high = min(self._tile_rows, self.rows - top)
                    tile = self._tile(_Place(name, top, first, device), (high, wide), pool)
                    yield slice(top, top + high), wanted, tile[:, inside]

    def whole(self, name: str, columns: int, device: torch.device) -> Tensor:
        """Return the matrix (rows, columns), float32."""
        kept = self._kept.get(_Place(name, 0, 0, device))
        if kept is not None and kept.shape == (self.rows, columns):  # it is one tile
            return kept
        found = torch.empty(self.rows, columns, device=device)
        for rows, part, entries in self.tiles(name, columns, slice(0, columns), device):
            found[rows, part] = entries
        return found

    def _tile(self, place: _Place, size: tuple[int, int], pool: ThreadPoolExecutor) -> Tensor:
        """Return a tile that is kept, or the last one (parts meet inside of a tile), or draw it."""
        found = self._kept.get(place, self._last.get(place))
        if found is not None:
            return found
        count = prod(size)
        keep = 4 * count <= self._left
        if keep:
            self._left -= 4 * count
        elif self._buffer.size < count:
            self._buffer = np.empty(count, np.float32)
        self._last.clear()  # the buffer is about to be overwritten
        values = np.empty(size, np.float32) if keep else self._buffer[:count].reshape(size)
        self._draw(values, place, pool)
        tile = torch.from_numpy(values).to(place.device)
        (self._kept if keep else self._last)[place] = tile
        return tile

    def _draw(self, values: np.ndarray, place: _Place, pool: ThreadPoolExecutor) -> None:
        """Fill `values`, whose first row and column are at `place`."""

        def fill(rows: range) -> None:
            for row in rows:
                stream = (place.top + row, place.first)
                _looked_up(
                    values[row : row + _ROWS].reshape(-1),
                    self._table,
                    partial(random.words, self._seed, self._use, place.name, *stream),
                )

        rows, threads = range(0, len(values), _ROWS), torch.get_num_threads()
        if threads == 1 or self._table.shape[1] > 1:  # short work: threads would wait for the GIL
            fill(rows)
        else:  # shares, since a stream costs less to draw than to hand over
            cuts = [k * len(rows) // threads for k in range(threads + 1)]
            shares = [rows[start:stop] for start, stop in pairwise(cuts)]
            list(pool.map(fill, shares))  # the list raises what a thread raised


def _looked_up(values: np.ndarray, table: np.ndarray, words: Callable[[int], np.ndarray]) -> None:
    """Fill `values` (s,) with rows of `table`, by the words' bits from the lowest on."""
    bits, together = len(table).bit_length() - 1, table.shape[1]
    count = ceil(values.size / together)
    draws = words(ceil(count * bits / 64)).astype("<u8", copy=False).view(f"<u{bits // 8}")
    index = draws[:count].astype(np.intp)  # what numpy would make of it anyway, but slower
    if values.size % together:
        values[:] = table[index].reshape(-1)[: values.size]
    else:  # "wrap" checks nothing: every index is in the table
        np.take(table, index, 0, out=values.reshape(-1, together), mode="wrap")


class Pattern(NamedTuple):
    """Some columns of a sparse matrix: which entries are added to which row, with which sign."""

    entries: Tensor  # (m,) int32, those of the first row first
    first: Tensor  # (rows,) int32, where a row's begin
    signs: Tensor  # (m,) float32

    def of(self, values: Tensor) -> Tensor:
        """Return the products (rows, n) of `values` (entries, n), added in their own dtype."""
        numbers = values.contiguous()
        if values.is_complex():
            numbers = torch.view_as_real(numbers).flatten(1)
        signs = self.signs.to(numbers.dtype)
        found: Tensor = torch.embedding_bag(  # mode 0 adds
            numbers, self.entries, self.first, False, 0, False, signs
        )[0]
        if values.is_complex():
            return torch.view_as_complex(found.reshape(len(found), -1, 2))
        return found


class SparseMatrices:
    """Matrices (rows, columns) with `nonzeros` entries ±1 in each column, one for each name.

    The rows are cut into as many parts of `width`, and a column has one entry in each. Column j is
    in place (j + r) mod width, where r is word j // width of the part's stream, modulo width. A
    stream has 4,096 words. The signs are a matrix (nonzeros, columns) of their own. Up to
    `kept_bytes` are kept for the next batch.
    """

    def __init__(self, rows: int, nonzeros: int, seed: int, *, kept_bytes: int = _KEPT) -> None:
        self.rows, self.nonzeros, self.width = rows, nonzeros, rows // nonzeros
        self._seed, self._left = seed, kept_bytes
        self._signs = RandomMatrices(
            nonzeros, "rademacher", seed, "project sjlt signs", kept_bytes=0
        )
        self._kept: dict[tuple[str, int, int, torch.device], Pattern] = {}

    def part(self, name: str, columns: int, part: slice, device: torch.device) -> Pattern:
        """Return the columns `part`, of so many."""
        key = (name, part.start, part.stop, device)
        found = self._kept.get(key)
        if found is None:
            found = Pattern(*(t.to(device) for t in self._drawn(name, columns, part)))
            size = sum(t.nbytes for t in found)
            if size <= self._left:
                self._left -= size
                self._kept[key] = found
        return found

    def _drawn(self, name: str, columns: int, part: slice) -> Pattern:
        wide = self.width
        chunks = range(part.start // wide, ceil(part.stop / wide))
        places = torch.arange(wide).unsqueeze(1)
        starts = torch.arange(chunks.start, chunks.stop) * wide - part.start
        drawn = self._signs.tiles(name, columns, part, torch.device("cpu"))
        signs = torch.cat([entries.clone() for _, _, entries in drawn], 1)
        index, counts, values = [], [], []
        for row, own in enumerate(signs):
            entry = starts + (places - self._shifts(name, row, chunks)) % wide  # (width, chunks)
            inside = (entry >= 0) & (entry < part.stop - part.start)
            index.append(entry[inside])
            counts.append(inside.sum(1))
            values.append(own[index[-1]])
        before = torch.cat(counts).cumsum(0) - torch.cat(counts)
        return Pattern(torch.cat(index).int(), before.int(), torch.cat(values))

    def _shifts(self, name: str, row: int, chunks: range) -> Tensor:
        """Return what the columns of each chunk are moved by (chunks,), of a part of the rows."""
        first = chunks.start - chunks.start % _COLUMNS
        found = [
            random.words(self._seed, "project sjlt places", name, row, start, _COLUMNS)
            for start in range(first, chunks.stop, _COLUMNS)
        ]
        words = np.concatenate(found)[chunks.start - first : chunks.stop - first]
        return torch.from_numpy((words % np.uint64(self.width)).astype(np.int64))
