"""Random projections of a sample's gradient to a few numbers that keep inner products on average.

Matrices of independent entries are drawn a tile at a time and kept while they fit. Raw random bits
select each entry from a table. So the table determines mean and variance, and the same bits give
the same matrix on every device. Each tile of 16 rows and up to 4,096 columns has a separate stream
and is filled row by row. So an entry depends only on seed, use, name, its position and the number
of columns. For a sparse matrix, the positions of its entries are kept as well.
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
Project = Callable[[str, Block], Tensor]  # (parameter name, block) -> T(g) (n, dim)
Tile = tuple[slice, slice, Tensor]  # rows, columns, entries
Piece = tuple[slice, slice, Tensor]  # samples, entries, values

_LARGEST = 2**24  # the largest dim
_ROWS, _COLUMNS = 16, 4096  # size of a stream's tile: a change of these changes every matrix
_CHUNKS = 16  # entries that a tile adds to a dim, and tiles that are summed before float64
_PATTERN = 2**19  # entries in a tile of a sparse matrix, if it is not wider
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

    Over random P, E⟨Pg, Ph⟩/dim = ⟨g, h⟩ (Johnson & Lindenstrauss 1984). P depends only on seed,
    kind, and the name and shape of each parameter. P of a smaller dim is the first rows of P of a
    larger dim (except for sjlt and kronecker). Products are computed in the gradients' precision,
    at least float32. Up to 256 MiB of P are kept for the next batch; the rest is drawn again.

    `per=parameter` projects each parameter separately with the same P: NAME (n, dim). The sum over
    all names is `project`. A parameter of at most dim entries is not projected: its result is
    NAME (n, entries), and its inner products are exact.

    These kinds have independent entries of mean 0 and variance 1:

    - gaussian: standard normal, rounded to 2^16 values of equal probability, at most ±4.3;
    - rademacher: ±1 (Achlioptas 2003), the fastest to draw;
    - sparse: ±√3 with probability 1/6 each, else 0 (Achlioptas 2003), rounded to 16 bits: ±1.73202
      with probability 10923/65536 each.

    These kinds have mostly zeros, or products, as entries:

    - sjlt: sparse Johnson-Lindenstrauss (Dasgupta et al. 2010, arXiv:1004.4240). The dims are split
      into `nonzeros` (default 1) parts of size w = dim/nonzeros. Each entry of g is added to one
      dim of every part with a random sign (Kane & Nelson 2014, arXiv:1012.1577). The sums are
      divided by √nonzeros. Entry j of a parameter is added to dim (j + r) mod w of a part. r is
      uniform and drawn for each part and each run of w entries. Two entries of the same run never
      share a dim; two entries of different runs share a dim with probability 1/w. The variance
      of ⟨Tg, Th⟩ is at most the variance with rademacher. The cost is `nonzeros` additions an entry
      instead of dim;
    - kronecker: P = A ⊗ C for each parameter as a matrix. The matrix has the parameter's first axes
      as rows and its last axes as columns, split so that rows + columns are fewest. A (a, r) and
      C (b, c) are normal, with a·b = dim and a, b as close as dim's divisors allow. Then
      P Σₜ bₜ⊗aₜ = Σₜ (A bₜ)(C aₜ)ᵀ, and the gradient of an outer block is never formed (Choe et al.
      2024, arXiv:2405.13954, "LoGra"). The variance is larger for gradients of low rank.
    """
    if not 1 <= dim <= _LARGEST:
        raise ValueError(f"dim must be from 1 to {_LARGEST:,}, not {dim:,}")
    projected = _bound(dim, kind, seed, nonzeros)
    size = sqrt(nonzeros or 1) if kind == "sjlt" else sqrt(dim)  # the norm of a column of P

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
    """Return the function that projects a block with a matrix of this kind."""
    if kind == "sjlt":
        count = 1 if nonzeros is None else nonzeros
        if not 1 <= count <= dim or dim % count:
            raise ValueError(f"nonzeros must divide dim, but {count} does not divide {dim}")
        return _added(SparseMatrices(dim, count, seed))
    if nonzeros is not None:
        raise ValueError(f"nonzeros is an option of kind=sjlt only, and kind is {kind}")
    return _two_sided(dim, seed) if kind == "kronecker" else _full(dim, kind, seed)


def _full(dim: int, kind: str, seed: int) -> Project:
    """Return the function that multiplies a block by its matrix (dim, entries), tile by tile."""
    matrices = RandomMatrices(dim, kind, seed, f"project {kind}")

    def projected(name: str, block: Block) -> Tensor:
        size = prod(block.shape)
        found = torch.zeros(
            block.n, dim, dtype=wider(block.dtype, block.device), device=block.device
        )
        for samples, part, values in block.pieces():
            for rows, columns, entries in matrices.tiles(name, size, part, block.device):
                inside = slice(columns.start - part.start, columns.stop - part.start)
                # a tile's product has the gradients' dtype, the sum over tiles is in float64
                found[samples, rows].add_(values[:, inside] @ entries.to(values.dtype).mT)
        return found

    return projected


def _added(matrices: "SparseMatrices") -> Project:
    """Return the function that adds the entries of a block to their dims."""
    tile = max(_COLUMNS, matrices.width, min(_CHUNKS * matrices.width, _PATTERN))  # entries

    def projected(name: str, block: Block) -> Tensor:
        size, dtype = prod(block.shape), wider(block.dtype, block.device)
        found = torch.empty(block.n, matrices.rows, dtype=dtype, device=block.device)
        step = max(1, TILE_BYTES // (4 * tile * block.dtype.itemsize))  # samples of a tile
        for start in range(0, block.n, step):
            some = block if step >= block.n else block.select(slice(start, start + step))
            total = torch.zeros(matrices.rows, some.n, dtype=dtype, device=block.device)
            near = torch.zeros_like(total, dtype=block.dtype)  # the sum of the last tiles
            for k, (samples, part, values) in enumerate(_cut(some.pieces(), tile), 1):
                pattern = matrices.part(name, size, part, block.device)
                near[:, samples].add_(pattern.of(values.mT))  # += would make one more copy
                if k % _CHUNKS == 0:
                    total += near
                    near.zero_()
            found[start : start + step] = total.add_(near).mT
        return found

    return projected


def _cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
    """Cut pieces of more than `most` entries at multiples of `most`."""
    for samples, part, values in pieces:
        if part.stop - part.start <= most:
            yield samples, part, values
            continue
        inner = range(part.start - part.start % most + most, part.stop, most)
        for start, stop in pairwise([part.start, *inner, part.stop]):
            yield samples, slice(start, stop), values[:, start - part.start : stop - part.start]


def _two_sided(dim: int, seed: int) -> Project:
    """Return the function that projects a block from both sides."""
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
    """Return the numbers of rows and columns of a parameter as a matrix, with the least sum."""
    cuts = range(1, max(2, len(shape)))
    return min(((prod(shape[:cut]), prod(shape[cut:])) for cut in cuts), key=sum)


@cache
def table(kind: str) -> np.ndarray:
    """Return the entries (2^bits, m), float32, for each value of a few random bits."""
    if kind == "rademacher":  # a byte gives eight signs
        values = np.unpackbits(np.arange(256, dtype=np.uint8).reshape(-1, 1), axis=1) * 2.0 - 1.0
    elif kind == "sparse":  # ±c at nearly 2^16 / 6 places each, variance 1
        count = round(2**16 / 6)
        values = np.zeros((2**16, 1))
        values[:count], values[-count:] = (sign * sqrt(2**16 / (2 * count)) for sign in (-1, 1))
    else:  # standard normal quantiles at the middle of 2^16 equal parts, variance 1
        parts = (torch.arange(2**15, dtype=torch.float64) + 0.5) / 2**16
        half = torch.special.ndtri(parts).numpy()
        values = np.concatenate([half, -half]).reshape(-1, 1)
        values /= sqrt(np.square(values).mean())
    return values.astype(np.float32)


class _Place(NamedTuple):
    """A tile of a matrix: its name, first row, first column and device."""

    name: str
    top: int
    first: int
    device: torch.device


class RandomMatrices:
    """Matrices (rows, columns), one for each name.

    This object keeps tiles, up to `kept_bytes` over all names. The remaining tiles are drawn again
    on each use, by as many threads as torch uses.
    """

    def __init__(
        self,
        rows: int,
        kind: str,  # of entries: gaussian, rademacher or sparse
        seed: int,
        use: str,  # the use of the random numbers
        *,
        tile_rows: int = 1024,  # a tile of 16 MiB stays in the cache for the product
        kept_bytes: int = _KEPT,  # the most bytes to keep for the next batch
    ) -> None:
        self.rows, self._table, self._seed, self._use = rows, table(kind), seed, use
        self._tile_rows, self._left = tile_rows, kept_bytes
        self._kept: dict[_Place, Tensor] = {}
        self._last: dict[_Place, Tensor] = {}  # at most one
        self._buffer = np.empty(0, np.float32)  # fresh pages cost as much as the drawing

    def tiles(self, name: str, columns: int, part: slice, device: torch.device) -> Iterator[Tile]:
        """Yield (rows, columns, entries), float32, which cover all rows of the columns `part`.

        Entries are valid until the next iteration.
        """
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # starts threads on first use
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
        if kept is not None and kept.shape == (self.rows, columns):  # the tile is the whole matrix
            return kept
        found = torch.empty(self.rows, columns, device=device)
        for rows, part, entries in self.tiles(name, columns, slice(0, columns), device):
            found[rows, part] = entries
        return found

    def _tile(self, place: _Place, size: tuple[int, int], pool: ThreadPoolExecutor) -> Tensor:
        """Return a kept tile, the last tile (two parts may share a tile), or draw a new tile."""
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
        """Fill `values`; `place` has their first row and column."""

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
        else:  # a share of rows for each thread: passing on single streams costs more than drawing
            cuts = [k * len(rows) // threads for k in range(threads + 1)]
            shares = [rows[start:stop] for start, stop in pairwise(cuts)]
            list(pool.map(fill, shares))  # the list raises what a thread raised


def _looked_up(values: np.ndarray, table: np.ndarray, words: Callable[[int], np.ndarray]) -> None:
    """Fill `values` (s,) with rows of `table`, selected by the words' bits, lowest bits first."""
    bits, together = len(table).bit_length() - 1, table.shape[1]
    count = ceil(values.size / together)
    draws = words(ceil(count * bits / 64)).astype("<u8", copy=False).view(f"<u{bits // 8}")
    index = draws[:count].astype(np.intp)  # numpy's own conversion is slower
    if values.size % together:
        values[:] = table[index].reshape(-1)[: values.size]
    else:  # every index is in the table, and "wrap" skips the check
        np.take(table, index, 0, out=values.reshape(-1, together), mode="wrap")


class Pattern(NamedTuple):
    """Columns of a sparse matrix: the entries to add to each row, and their signs."""

    entries: Tensor  # (m,) int32, sorted by row
    first: Tensor  # (rows,) int32, the index of each row's first entry
    signs: Tensor  # (m,) float32

    def of(self, values: Tensor) -> Tensor:
        """Return the products (rows, n) with `values` (entries, n), summed in their dtype."""
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

    The rows are split into `nonzeros` parts of `width` rows. A column has an entry in each part.
    Column j has it in row (j + r) mod width, where r is word j // width of the part's stream,
    modulo width. A stream has 4,096 words. The signs are a separate matrix (nonzeros, columns). Up
    to `kept_bytes` are kept for the next batch.
    """

    def __init__(self, rows: int, nonzeros: int, seed: int, *, kept_bytes: int = _KEPT) -> None:
        self.rows, self.nonzeros, self.width = rows, nonzeros, rows // nonzeros
        self._seed, self._left = seed, kept_bytes
        self._signs = RandomMatrices(
            nonzeros, "rademacher", seed, "project sjlt signs", kept_bytes=0
        )
        self._kept: dict[tuple[str, int, int, torch.device], Pattern] = {}

    def part(self, name: str, columns: int, part: slice, device: torch.device) -> Pattern:
        """Return the columns `part` of a matrix with that many `columns`."""
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
        """Return the shifts r (chunks,) of each chunk of columns, for part `row` of the rows."""
        first = chunks.start - chunks.start % _COLUMNS
        found = [
            random.words(self._seed, "project sjlt places", name, row, start, _COLUMNS)
            for start in range(first, chunks.stop, _COLUMNS)
        ]
        words = np.concatenate(found)[chunks.start - first : chunks.stop - first]
        return torch.from_numpy((words % np.uint64(self.width)).astype(np.int64))
