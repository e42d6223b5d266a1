"""Scores of every query with every training sample, a tile of queries at a time.

s(q, i) = (1/N) g_qᵀ (H + λ)⁻¹ gᵢ over N training samples: to first order, by how much the loss of
query q would be higher, had sample i been left out of the training (Koh & Liang 2017,
arXiv:1703.04730, equation 2 with its sign and ε = −1/N). Positive: it helps. Negative: it harms.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradscope.attribution.methods import (
    Curved,
    Settings,
    curved,
    precision,
    products_of,
    sum_of,
)
from gradscope.attribution.products import Part, Tile, tiles
from gradscope.attribution.refining import Refining, cheaply
from gradscope.attribution.sides import Side, projection_error, require_same
from gradscope.errors import SpecError

UNIT = (
    "the change of the query's loss if the training sample had been left out, to first order: "
    "positive helps, negative harms"
)
_EXACT = 2**24  # scores that are kept in float64; more of them in float32


@dataclass
class Pair:
    """The two sides at one checkpoint.

    Args:
        train: The training samples.
        query: The queries.
        weight: What its scores are times, where several are added.
        curvature: Of the training side; it is found when it is needed if None.
    """

    train: Side
    query: Side
    weight: float = 1.0
    curvature: Curved | None = None

    def bound(self, asked: Settings) -> "Comparing":
        """Find the curvature of the training side.

        Raises:
            SpecError: The sides do not fit each other, or the curvature does not fit the rows.
        """
        notes = require_same(self.train.facts, self.query.facts)
        if self.curvature is None:
            self.curvature = curved(self.train, asked)
        if "without" in self.curvature.record:
            why = str(self.curvature.record["without"]).partition("\n")[0]
            notes += (f"by the Fisher alone, as there is no EK-FAC: {why}",)
        error = projection_error(self.train)
        if error is not None:
            self.curvature.record["projection_error"] = error
            notes += (f"a projected product ⟨g, h⟩ is off by about {error:.2g} ‖g‖ ‖h‖",)
        return Comparing(self, self.curvature, notes)

    def asking(self, query: Side, asked: Settings) -> "Pair":
        """Return the pair for other queries; the curvature is not found again."""
        return replace(self, query=query, curvature=self.bound(asked).curved)


@dataclass(frozen=True)
class Comparing:
    """Two sides, and the curvature by which they are compared."""

    pair: Pair
    curved: Curved
    notes: tuple[str, ...]

    @property
    def finite(self) -> Tensor:
        """Which training samples are not left out (N,)."""
        return self.pair.train.table()["finite"]

    def scores(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """Return the scores (m, N) of a tile of queries in float64, NaN of what is left out."""
        parts = [Part(p.places, self.curved.before(p.gradients)) for p in tile.parts]
        products = products_of(Tile(parts, dtype), self.pair.train, self.curved.groups)
        found, finite = self.curved.after(products), self.finite
        found *= self.pair.weight / max(1, int(finite.sum()))
        found[:, ~finite] = torch.nan
        return found

    def self_influence(self) -> Tensor | None:
        """Return s(i, i) (N,) where it costs little, NaN of what is left out."""
        if self.curved.own is None:
            return None
        found, finite = self.curved.own(), self.finite
        found = found * (self.pair.weight / max(1, int(finite.sum())))
        found[~finite] = torch.nan
        return found


class Scoring:
    """An attribution under way: tiles of queries in, rows of scores out.

    Args:
        pairs: One a checkpoint; the scores are the sum over them, each by its weight.
        asked: What is asked for.
        done: Queries that are scored already.

    Raises:
        SpecError: Sides do not fit each other, or the curvature does not fit the rows.
    """

    def __init__(self, pairs: Sequence[Pair], asked: Settings, done: int = 0) -> None:
        if len({(pair.train.n, pair.query.n) for pair in pairs}) > 1:
            raise SpecError("the checkpoints are of different numbers of samples")
        self.pairs, self.asked, self.done = pairs, asked, done
        cheap = cheaply(asked)
        self.refining: Refining | None = None
        if asked.refine:
            self.refining = Refining([(p.train, p.query, p.weight) for p in pairs], asked)
        self._every = [pair.bound(cheap) for pair in pairs]
        first = pairs[0]
        each = 8 * first.train.width + 16 * first.train.n  # rows; products, and scores
        self.step = max(1, min(first.query.n, asked.room(first.train) // each))

    @property
    def dtype(self) -> torch.dtype:
        """What the scores are kept in."""
        few = self.pairs[0].train.n * self.pairs[0].query.n <= _EXACT
        return torch.float64 if few else torch.float32

    @property
    def record(self) -> dict[str, Any]:
        """What was chosen, for the result."""
        each = [{**one.curved.record, "weight": one.pair.weight} for one in self._every]
        refined = {} if self.refining is None else {"refined": self.refining.record}
        return {"unit": UNIT, "checkpoints": each, **refined}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth a line."""
        lost = int((~self._every[0].finite).sum())
        told = [f"{lost:,} training samples without a finite gradient are left out"] if lost else []
        return tuple(dict.fromkeys([*(n for one in self._every for n in one.notes), *told]))

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (queries, their scores (m, N) in float64); NaN of what is left out."""
        n, m = self.pairs[0].train.n, self.pairs[0].query.n
        dtypes = [precision(pair.train, m) for pair in self.pairs]
        walks = [
            tiles(pair.query.parts(), m, self.step, dtype)
            for pair, dtype in zip(self.pairs, dtypes, strict=True)
        ]
        for start in range(0, m, self.step):
            each = [next(walk) for walk in walks]
            queries = slice(start, min(start + self.step, m))
            if queries.stop <= self.done:
                continue
            count, found = queries.stop - start, torch.zeros(())
            for one, tile, dtype in zip(self._every, each, dtypes, strict=True):
                own = one.scores(tile, dtype)
                if tile.n < count:
                    all_of_them = own.new_full((count, n), torch.nan)
                    all_of_them[tile.places - start] = own
                    own = all_of_them
                found = found + own if found.dim() else own
            new = slice(max(start, self.done), queries.stop)  # tiles may have been of another size
            yield new, found[new.start - start :]

    def self_influence(self) -> Tensor | None:
        """Return s(i, i) (N,) where it costs little, NaN of what is left out."""
        found = [one.self_influence() for one in self._every]
        known = [own for own in found if own is not None]
        return sum_of(known) if len(known) == len(found) else None
