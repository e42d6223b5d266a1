"""What needs every sample's own gradient, from one walk through the stored rows.

A parameter at a time, summed in float64. Products with the mean need the mean first: where no chain
`mean` is stored, what was read is kept up to a limit and the rest is read again.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from gradscope.core.shortage import started
from gradscope.stats.base import Floats, Mask, wide
from gradscope.stats.entries import Entries
from gradscope.stats.stored import Arrays
from gradscope.stats.table import Positions, Table
from gradscope.stats.tiles import Tile, Tiles

SKETCH = 16  # numbers a sample by which near duplicates are found


@dataclass(frozen=True)
class Wanted:
    """What the walk is to find beside the sums.

    Attributes:
        groups: The class of each sample (n,), counted from 0; all 0 without classes.
        picked: Which samples are compared pairwise (n,).
        probe: The sample whose products with all others are wanted, as a place in the table.
        mean: {name: G}, where it is stored.
    """

    groups: Positions
    picked: Mask
    probe: int | None = None
    mean: Arrays | None = None


@dataclass(frozen=True)
class Part:
    """What was found in one parameter.

    Attributes:
        mean_square: mean‖gᵢ‖².
        mean_squared: ‖G‖².
        opposing: The share of samples with ⟨gᵢ, G⟩ < 0.
        entries: Signal and noise by entry.
    """

    mean_square: float
    mean_squared: float
    opposing: float
    entries: Entries


@dataclass(frozen=True)
class Sweep:
    """What was found over all parameters together.

    Attributes:
        dots: ⟨gᵢ, G⟩ (n,).
        squares: ‖gᵢ‖² (n,).
        sketch: A random projection of each gradient (n, SKETCH), for finding what is alike.
        gram: ⟨gᵢ, gⱼ⟩ of the picked samples (m, m).
        probed: ⟨gᵢ, g_probe⟩ (n,); zeros without a probe.
        group_squares: ‖G_c‖² of each class's mean (k,).
        parts: By parameter.
    """

    dots: Floats
    squares: Floats
    sketch: Floats
    gram: Floats
    probed: Floats
    group_squares: Floats
    parts: dict[str, Part]

    @property
    def mean_squared(self) -> float:
        """‖G‖² over all parameters."""
        return sum(part.mean_squared for part in self.parts.values())

    @property
    def finite(self) -> bool:
        """Whether all rows are, as their norms are: in half precision they may overflow."""
        return bool(np.isfinite(self.squares).all())


def sweep(rows: Arrays, table: Table, wanted: Wanted) -> Sweep:
    """Walk through {name: (N, *shape)} over the samples of `table`, at least one."""
    n, m = table.n, int(wanted.picked.sum())
    found = Sweep(
        dots=np.zeros(n),
        squares=np.zeros(n),
        sketch=np.zeros((n, SKETCH)),
        gram=np.zeros((m, m)),
        probed=np.zeros(n),
        group_squares=np.zeros(int(wanted.groups.max()) + 1),
        parts={},
    )
    with started(1, "gradscope-reader") as reader:
        for name, array in rows.items():
            walk = _Walk(name, Tiles(array, table, reader), wanted, found)
            found.parts[name] = walk.run(None if wanted.mean is None else wanted.mean[name])
    return found


class _Walk:
    """The sums under way in one parameter."""

    def __init__(self, name: str, tiles: Tiles, wanted: Wanted, found: Sweep) -> None:
        self.tiles, self.wanted, self.found = tiles, wanted, found
        self.sums = np.zeros((len(found.group_squares), tiles.width))
        self.squares = np.zeros(tiles.width)
        self.dots = np.zeros(len(wanted.groups))
        self.among = np.cumsum(wanted.picked) - 1
        self.picked: NDArray[Any] | None = None
        self.scratch = np.empty(tiles.most, tiles.dtype)
        self.ones = np.ones(tiles.columns, tiles.dtype)
        random = np.random.default_rng(crc32(name.encode("utf-8", "surrogatepass")))
        self.bucket = int(random.integers(SKETCH))
        self.signs = random.integers(0, 2, tiles.width, dtype=np.int8) * 2 - 1
        self.probe = None
        if wanted.probe is not None:
            self.probe = tiles.rows(np.array([wanted.probe]))[0].astype(tiles.dtype)

    def run(self, stored: Floats | None) -> Part:
        known = (
            None
            if stored is None or not self.tiles.long
            else _real(stored).astype(self.tiles.dtype)
        )
        for tile in self.tiles.walk(keep=known is None):
            self._add(tile, known)
        n = len(self.dots)
        mean = self.sums.sum(0) / n
        if known is None:
            known = mean.astype(self.tiles.dtype)
            for places, values in self.tiles.again():
                for rows, columns, block in self.tiles.blocks(values):
                    self.dots[places[rows]] += block @ known[columns]
        self.found.dots[:] += self.dots
        self.found.gram[:] += self._gram()
        sizes = np.bincount(self.wanted.groups)
        self.found.group_squares[:] += [s @ s / c**2 for s, c in zip(self.sums, sizes, strict=True)]
        return Part(
            mean_square=float(self.squares.sum()) / n,
            mean_squared=float(mean @ mean),
            opposing=float(np.mean(self.dots < 0)),
            entries=Entries.of(mean, self.squares / n),
        )

    def _add(self, tile: Tile, mean: Floats | None) -> None:
        places, values = tile
        self._pick(places, values)
        groups, order = self.wanted.groups[places], None
        if len(self.sums) > 1:  # one class after the other
            order = np.argsort(groups, kind="stable")
            places, groups = places[order], groups[order]
        for rows, columns, block in self.tiles.blocks(values, order):
            if columns.start == 0:
                here, ones = places[rows], np.ones(len(block), block.dtype)
                runs = _runs(groups[rows])
            for group, start, stop in runs:
                self.sums[group, columns] += ones[start:stop] @ block[start:stop]
            bucket = (self.bucket + columns.start // self.tiles.columns) % SKETCH
            self.found.sketch[here, bucket] += block @ self.signs[columns].astype(block.dtype)
            if self.probe is not None:
                self.found.probed[here] += block @ self.probe[columns]
            if mean is not None:
                self.dots[here] += block @ mean[columns]
            squares = np.square(block, out=self.scratch[: block.size].reshape(block.shape))
            self.squares[columns] += ones @ squares
            self.found.squares[here] += squares @ self.ones[: squares.shape[1]]

    def _pick(self, places: Positions, values: NDArray[Any]) -> None:
        """Keep the rows that are compared pairwise."""
        chosen = self.wanted.picked[places]
        if chosen.any():
            if self.picked is None:
                self.picked = np.empty((len(self.found.gram), self.tiles.width), values.dtype)
            self.picked[self.among[places[chosen]]] = values[chosen]

    def _gram(self) -> Floats | float:
        if self.picked is None:
            return 0.0
        gram = np.zeros_like(self.found.gram)
        for left in range(0, self.tiles.width, self.tiles.columns):
            block = wide(self.picked[:, left : left + self.tiles.columns])
            gram += block @ block.T
        return gram


def _runs(groups: Positions) -> list[tuple[int, int, int]]:
    """Return (class, start, stop) of each run of equal classes among sorted ones."""
    if groups[0] == groups[-1]:
        return [(int(groups[0]), 0, len(groups))]
    edges = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
    return [(int(groups[a]), a, b) for a, b in pairwise(edges)]


def _real(values: Floats) -> Floats:
    flat = np.ravel(values)
    return flat.view(np.float64) if np.iscomplexobj(flat) else wide(flat)
