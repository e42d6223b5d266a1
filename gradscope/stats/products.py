"""Products of gradients with each other and with their mean, from whatever a file has.

From stored rows, a chain `gram`, or a chain `cosine:to=mean`, in this order; projections serve the
neighbours of a sample and the spectrum, approximately. Rows are walked through one parameter at a
time, summed in float64. Products with the mean need the mean first: where no chain `mean` is
stored, what was read is kept up to a limit and the rest is read again.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from math import prod
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from gradscope.process.memory import slices
from gradscope.process.shortage import thread_pool
from gradscope.stats.records import Floats, Mask, Positions, number, spread, wide
from gradscope.stats.source import (
    Arrays,
    Samples,
    Source,
    chain_of,
    gram_of,
    in_half,
    mean_of,
    projections_of,
    rows_of,
    rows_unusable,
)

SKETCH = 16  # numbers a sample by which near duplicates are found
_CLASSES = 100  # more distinct targets than these are not taken for classes
_PAIRED = 2000  # samples compared pairwise
_WORK = 4e10  # multiplications for it: m² P
_HELD = 2**25  # numbers of a parameter that are held for it: m p
_GROUP_BYTES = 2**28  # for the sums of all classes in one parameter
_NOISELESS = 1e-12  # of E[g²]: a variance below it is a rounding error
_PARTS = 16  # blocks that a row is at least made of: each has its place in a sketch
_APART = 2**21  # numbers of an array whose rows are compared, in work at a time

Tile = tuple[Positions, NDArray[Any]]  # places among the samples (b,), rows (b, w)


@dataclass(frozen=True)
class Limits:
    """How much of a parameter's rows is in work at a time."""

    tile: int = 2**27  # bytes: many rows, so that sums over them are written seldom
    piece: int = 2**22  # bytes read at a time, whose memory the allocator uses again
    kept: int = 2**29  # bytes that are kept for a second walk
    block: int = 2**19  # bytes that are summed at a time, which stay in the cache
    # bytes of all rows from which on blocks are summed as stored, not in float64: the errors of
    # many short sums, added in float64, average out
    long: int = 2**28
    widest: int = 4096  # columns of a block, where there are rows enough to fill it


class Tiles:
    """The rows of the finite samples of an array (N, *shape), in tiles.

    The parts of complex numbers are own entries. `reader` reads the next tile while one is in work.
    """

    def __init__(self, array: Any, samples: Samples, reader: Executor, limits: Limits) -> None:
        parts = 2 if np.issubdtype(array.dtype, np.complexfloating) else 1
        self.width = prod(array.shape[1:]) * parts  # the entries of a row, w
        self._array, self._samples, self._reader, self._limits = array, samples, reader, limits
        self._places = np.full(array.shape[0], -1)
        self._places[samples.rows] = np.arange(samples.n)
        a_row = max(1, prod(array.shape[1:]) * array.dtype.itemsize)
        step = max(1, limits.tile // a_row)
        self._piece = max(1, limits.piece // a_row)
        self._slices = [slice(k, k + step) for k in range(0, array.shape[0], step)]
        self._kept: list[Tile] = []
        tall = min(step, array.shape[0])
        real = np.empty(0, array.dtype).real.dtype
        self._tiles = [np.empty((tall, self.width), real) for _ in self._slices[:2]]
        self.long = a_row * array.shape[0] > limits.long  # too large for memory
        self.dtype = real if self.long and real.itemsize >= 4 else np.dtype(np.float64)
        numbers = limits.block // self.dtype.itemsize
        self.columns = min(max(limits.widest, numbers // tall), max(16, -(-self.width // _PARTS)))
        self.height = max(1, numbers // self.columns)  # with `columns` the size of a block

    @classmethod
    def walked(cls, array: Any, samples: Samples) -> Iterator[Tile]:
        """Yield the tiles of one parameter once, none of them to be kept."""
        with thread_pool(1, "gradscope-reader") as reader:
            yield from cls(array, samples, reader, Limits()).walk(keep=False)

    def walk(self, keep: bool) -> Iterator[Tile]:
        """Yield the tiles of all samples, in the file's order; keep what fits for `again`."""
        room = self._limits.kept if keep else 0
        for places, values in self._read(self._slices):
            if values.nbytes <= room:
                room -= values.nbytes
                self._kept.append((places, values.copy()))
            else:
                room = 0  # what is kept is a beginning
            yield places, values

    def again(self) -> Iterator[Tile]:
        """Yield the same tiles; those kept are not read again."""
        yield from chain(self._kept, self._read(self._slices[len(self._kept) :]))

    def row(self, place: int) -> NDArray[Any]:
        """Return the row (w,) of the sample at `place`."""
        return flat(self._array[self._samples.rows[[place]]]).astype(self.dtype).reshape(-1)

    def blocks(
        self, values: NDArray[Any], order: Positions | None = None
    ) -> Iterator[tuple[slice, slice, NDArray[Any]]]:
        """Yield (rows, columns, block) of a tile (b, w), its rows in `order` (b,) if given."""
        for top in range(0, len(values), self.height):
            rows: Any = slice(top, min(top + self.height, len(values)))
            for left in range(0, self.width, self.columns):
                columns = slice(left, min(left + self.columns, self.width))
                piece = values[rows if order is None else order[rows], columns]
                yield rows, columns, piece.astype(self.dtype, copy=False)

    def _read(self, slices: list[slice]) -> Iterator[Tile]:
        """Read ahead: the next tile while one is in work."""
        tasks = iter(enumerate(slices))
        waiting = [self._reader.submit(self._one, *task) for task in islice(tasks, 1)]
        while waiting:
            tile = waiting.pop().result()
            waiting += [self._reader.submit(self._one, *task) for task in islice(tasks, 1)]
            yield tile

    def _one(self, number: int, part: slice) -> Tile:
        """Read a tile into one of two buffers, the other one being in work."""
        tile, filled = self._tiles[number % 2], 0
        for start in range(part.start, min(part.stop, len(self._places)), self._piece):
            piece = slice(start, min(start + self._piece, part.stop))
            rows, finite = flat(self._array[piece]), self._places[piece] >= 0
            end = filled + int(finite.sum())
            tile[filled:end] = rows if finite.all() else rows[finite]
            filled = end
        places = self._places[part]
        return places[places >= 0], tile[:filled]


def flat(values: NDArray[Any]) -> NDArray[Any]:
    """Return (b, ...) as real rows (b, w)."""
    rows = np.ascontiguousarray(values).reshape(len(values), prod(values.shape[1:]))
    return rows.view(rows.real.dtype) if np.iscomplexobj(rows) else rows


@dataclass(frozen=True)
class Groups:
    """Which class each sample is of: the k classes, sorted, and positions in them (n,)."""

    targets: NDArray[Any]
    of: Positions


def groups(samples: Samples) -> Groups | None:
    """Return the classes if the targets are some: whole numbers or text, few, each more than once.

    At most 100 distinct ones, and on average at least two samples of each.
    """
    target = samples.target
    if target is None or target.ndim != 1 or target.dtype.kind not in "biuSUO" or not samples.n:
        return None
    found, of = np.unique(target, return_inverse=True)
    few = 2 <= len(found) <= min(_CLASSES, samples.n // 2)
    return Groups(found, of) if few else None


@dataclass(frozen=True)
class Entries:
    """How many entries of a parameter vary, how many do not, and Σⱼ Gⱼ² / Varⱼ over the former."""

    noisy: int
    noiseless: int
    signal: float

    @classmethod
    def of(cls, mean: Floats, second: Floats) -> "Entries":
        """Sum over entries with E[g] `mean` and E[g²] `second`, both of one shape."""
        square = np.square(mean)
        variance = second - square
        noisy = variance > _NOISELESS * second
        signal = float((square[noisy] / variance[noisy]).sum())
        return cls(int(noisy.sum()), int(noisy.size - noisy.sum()), signal)

    @property
    def mean_ratio(self) -> float | None:
        """The mean over the noisy entries of Gⱼ² / (E[gⱼ²] − Gⱼ²)."""
        return number(self.signal / self.noisy) if self.noisy else None


@dataclass(frozen=True)
class Totals:
    """What a walk found in one parameter: mean‖gᵢ‖², ‖G‖², share of ⟨gᵢ, G⟩ < 0, its entries."""

    mean_square: float
    mean_squared: float
    opposing: float
    entries: Entries


@dataclass(frozen=True)
class Products:
    """What a file's chains give; None where they do not."""

    source: str = ""  # where `dots` are from: rows, gram or cosine:to=mean
    dots: Floats | None = None  # ⟨gᵢ, G⟩ (n,)
    pairs: str = ""  # where `gram` and `probed` are from: rows, gram or a chain `project`
    gram: Floats | None = None  # ⟨gᵢ, gⱼ⟩ of some samples, evenly spread (m, m)
    among: Mask | None = None  # which samples these are (n,)
    whole: Floats | None = None  # ⟨gᵢ, gⱼ⟩ of all samples (n, n), from a chain `gram`
    probed: Floats | None = None  # ⟨gᵢ, g⟩ with the sample asked for (n,)
    group_squares: Floats | None = None  # ‖G_c‖² of each class's mean gradient (k,)
    squares: Floats = field(default_factory=lambda: np.empty(0))  # ‖gᵢ‖² (n,), from rows
    # a random projection of each gradient (n, SKETCH), from rows, to find duplicates
    sketch: Floats = field(default_factory=lambda: np.empty((0, SKETCH)))
    # what rows gave of each parameter; empty without them
    parts: dict[str, Totals] = field(default_factory=dict)
    # whether they are more exact than the recorded norms, as all but half precision is
    exact: bool = False
    unusable: str | None = None  # why stored rows gave nothing

    @property
    def mean_squared(self) -> float:
        """‖G‖² over all parameters, from rows."""
        return sum(part.mean_squared for part in self.parts.values())


class _Walk:
    """The sums under way in one parameter: those by sample are added to `found`."""

    def __init__(
        self, name: str, tiles: Tiles, found: Products, groups: Positions, probe: int | None
    ) -> None:
        self.tiles, self.found, self.groups = tiles, found, groups
        self.dots = np.zeros(len(groups))
        self.sums = np.zeros((int(groups.max()) + 1, tiles.width))
        self.squares = np.zeros(tiles.width)
        self.picked: NDArray[Any] | None = None  # the rows to be compared pairwise
        self.scratch = np.empty(tiles.height * tiles.columns, tiles.dtype)
        self.ones = np.ones(tiles.columns, tiles.dtype)
        random = np.random.default_rng(crc32(name.encode("utf-8", "surrogatepass")))
        self.bucket = int(random.integers(SKETCH))
        self.signs = random.integers(0, 2, tiles.width, dtype=np.int8) * 2 - 1
        self.probe = None if probe is None else tiles.row(probe)

    def run(self, stored: Floats | None) -> Totals:
        known, n = None, len(self.dots)  # the mean, where the first walk can multiply by it
        if stored is not None and self.tiles.long:
            known = flat(np.asarray(stored)[None])[0].astype(self.tiles.dtype)
        for places, values in self.tiles.walk(keep=known is None):
            self._add(places, values, known)
        mean = self.sums.sum(0) / n
        if known is None:
            known = mean.astype(self.tiles.dtype)
            for places, values in self.tiles.again():
                for rows, columns, block in self.tiles.blocks(values):
                    self.dots[places[rows]] += block @ known[columns]
        found: Any = self.found
        found.dots[:] += self.dots
        if self.picked is not None:
            for left in range(0, self.tiles.width, self.tiles.columns):
                block = wide(self.picked[:, left : left + self.tiles.columns])
                found.gram[:] += block @ block.T
        if found.group_squares is not None:
            sizes = zip(self.sums, np.bincount(self.groups), strict=True)
            found.group_squares[:] += [s @ s / c**2 for s, c in sizes]
        return Totals(
            mean_square=float(self.squares.sum()) / n,
            mean_squared=float(mean @ mean),
            opposing=float(np.mean(self.dots < 0)),
            entries=Entries.of(mean, self.squares / n),
        )

    def _add(self, places: Positions, values: NDArray[Any], mean: Floats | None) -> None:
        found: Any = self.found
        chosen = found.among[places]
        if chosen.any():
            if self.picked is None:
                self.picked = np.empty((found.among.sum(), self.tiles.width), values.dtype)
            self.picked[np.cumsum(found.among)[places[chosen]] - 1] = values[chosen]
        groups, order = self.groups[places], None
        if len(self.sums) > 1:  # one class after the other
            order = np.argsort(groups, kind="stable")
            places, groups = places[order], groups[order]
        for rows, columns, block in self.tiles.blocks(values, order):
            if columns.start == 0:
                here, group, ones = places[rows], groups[rows], np.ones(len(block), block.dtype)
                edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(block)]
            for start, stop in pairwise(edges):  # of equal class
                self.sums[group[start], columns] += ones[start:stop] @ block[start:stop]
            bucket = (self.bucket + columns.start // self.tiles.columns) % SKETCH
            found.sketch[here, bucket] += block @ self.signs[columns].astype(block.dtype)
            if self.probe is not None:
                found.probed[here] += block @ self.probe[columns]
            if mean is not None:
                self.dots[here] += block @ mean[columns]
            squares = np.square(block, out=self.scratch[: block.size].reshape(block.shape))
            self.squares[columns] += ones @ squares
            found.squares[here] += squares @ self.ones[: squares.shape[1]]


def products(
    file: Source,
    samples: Samples,
    big: float | None,
    members: Groups | None,
    place: int | None,
    limits: Limits | None,
) -> Products:
    """Take products from the best that `file` has; without `limits` rows are left alone.

    `big` is ‖G‖², `members` are the samples' classes, `place` is that of the sample whose products
    with all others are wanted.
    """
    if not samples.n:
        return Products()
    arrays = rows_of(file)
    unusable = rows_unusable(file) if limits else None
    if limits and arrays is not None and unusable is None:
        found = _from_rows(file, arrays, samples, members, place, limits)
        if np.isfinite(found.squares).all():
            return found  # in half precision they may overflow where their norms do not
        unusable = "stored rows are not finite where their norms are: compute with --dtype float32"
    gram = gram_of(file, samples.n)
    if gram is not None:
        squares, among = None, picked(samples, 1)
        if members is not None:
            one = (members.of == np.arange(len(members.targets))[:, None]) * 1.0  # (k, n)
            squares = np.einsum("kn,kn->k", one @ gram, one) / np.square(one.sum(1))
        return Products(
            source="gram",
            dots=gram.mean(1),
            pairs="gram",
            gram=gram[np.ix_(among, among)],
            among=among,
            whole=gram,
            probed=None if place is None else gram[place],
            group_squares=squares,
            unusable=unusable,
        )
    found = Products(unusable=unusable)
    cosines = chain_of(file, "cosine:to=mean")
    if cosines is not None and big is not None:
        dots = wide(cosines["cosine"][...])[samples.rows] * samples.norm * np.sqrt(big)
        found = replace(found, source="cosine:to=mean", dots=dots)
    projected = projections_of(file)
    if projected is None:
        return found
    values = projected[1][samples.rows]
    among = picked(samples, values.shape[1])
    probed = None if place is None else values @ values[place]
    gram = values[among] @ values[among].T
    return replace(found, pairs=projected[0], gram=gram, among=among, probed=probed)


def picked(samples: Samples, entries: int, widest: int = 1) -> Mask:
    """Choose the samples to compare pairwise (n,): all, or as many as is affordable, evenly spread.

    At most 2,000, and so that m² P is at most 4·10¹⁰ for P entries, and m p at most 2²⁵ for the
    p entries of the largest parameter.
    """
    affordable = min(int(np.sqrt(_WORK / max(1, entries))), _HELD // max(1, widest))
    m = max(min(samples.n, _PAIRED, affordable), min(samples.n, 2))
    chosen: Mask = np.zeros(samples.n, dtype=bool)
    chosen[spread(samples.n, m)] = True
    return chosen


def distances(pairs: Iterable[tuple[Any, Any]], first: Positions, second: Positions) -> Floats:
    """Return ‖aᵢ − bᵢ‖ (m,) over all pairs of arrays (N, *shape), a few rows at a time.

    aᵢ and bᵢ are the rows `first` (m,) of one array and `second` (m,) of the other.
    """
    squares = np.zeros(len(first))
    for pair in pairs:
        for part in slices(len(squares), prod(pair[0].shape[1:]), _APART):
            a, b = (
                np.asarray(array[rows[part]], np.result_type(array.dtype, np.float64))
                for array, rows in zip(pair, (first, second), strict=True)
            )
            squares[part] += np.square(np.abs(b - a)).reshape(len(a), -1).sum(1)
    return wide(np.sqrt(squares))


def _from_rows(
    file: Source,
    arrays: Arrays,
    samples: Samples,
    members: Groups | None,
    place: int | None,
    limits: Limits,
) -> Products:
    """Walk through {name: (N, *shape)}, all rows of a parameter after those of another."""
    sizes, n = [prod(shape) for shape in file.parameters.values()], samples.n
    width = max(sizes, default=0)
    if members is not None and len(members.targets) * width * 8 > _GROUP_BYTES:
        members = None
    among, mean = picked(samples, sum(sizes), width), mean_of(file)
    m = int(among.sum())
    found = Products(
        source="rows",
        dots=np.zeros(n),
        pairs="rows",
        gram=np.zeros((m, m)),
        among=among,
        probed=None if place is None else np.zeros(n),
        group_squares=None if members is None else np.zeros(len(members.targets)),
        squares=np.zeros(n),
        sketch=np.zeros((n, SKETCH)),
        exact=not in_half(file),
    )
    groups = np.zeros(n, np.int64) if members is None else members.of
    with thread_pool(1, "gradscope-reader") as reader:
        for name, array in arrays.items():
            one = _Walk(name, Tiles(array, samples, reader, limits), found, groups, place)
            found.parts[name] = one.run(None if mean is None else mean[name])
    return found
