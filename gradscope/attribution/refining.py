"""Exact scores of the training samples that matter most to a query by cheaper ones.

Both runs are opened again, without projections, and the gradients of the candidates alone are
computed in full. Nothing is stored of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradscope.attribution.methods import Curved, Settings, curved, precision, products_of
from gradscope.attribution.products import Part, Tile
from gradscope.attribution.sides import Side, of_job, recorded_run, samples_at_a_time, some_of
from gradscope.core.grammar import parse
from gradscope.errors import SpecError
from gradscope.run import Job, prepare

EXACT = ("ekfac", "kfac", "diagonal", "adam", "identity")  # that need no rows of all samples
_SAME = ("checkpoint", "model", "dataset")
_PLACES = 2**24  # beyond, places are no float32 numbers, in which they may be stored


class Refined(NamedTuple):
    """Candidates of m queries.

    Attributes:
        places: Their rows in the training side (m, 2K) int64, -1 behind the last of a query.
        scores: Their exact scores (m, 2K) in float64, NaN of what has none.
    """

    places: Tensor
    scores: Tensor


def cheaply(asked: Settings) -> Settings:
    """Return what finds the candidates, on rows of whatever chain.

    Raises:
        SpecError: The curvature needs rows of all samples, which refining is to spare.
    """
    if not asked.refine:
        return asked
    if asked.refine < 0:
        raise SpecError(f"found {asked.refine}", where="--refine", remedy="Accepted: 1 or more.")
    if asked.curvature not in ("auto", *EXACT):
        raise SpecError(
            f"{asked.curvature} needs the gradients of all training samples, not of a few",
            where="--refine",
            remedy=f"Use --curvature {', '.join(EXACT)}; or leave --refine out.",
        )
    return replace(asked, curvature="identity" if asked.curvature == "identity" else "auto")


class Refining:
    """Computes the scores of candidates from full gradients.

    Args:
        sides: (training side, queries, weight), one a checkpoint.
        asked: What is asked for.

    Raises:
        SpecError: A side has no run, its rows are full gradients, or its run has changed.
    """

    def __init__(self, sides: Sequence[tuple[Side, Side, float]], asked: Settings) -> None:
        if sides[0][0].n > _PLACES:
            raise SpecError(f"places of {sides[0][0].n:,} samples are not kept", where="--refine")
        method: Any = "ekfac" if asked.curvature == "auto" else asked.curvature
        self._asked = replace(asked, curvature=method)
        self._each = [_Exact(train, query, weight, self._asked) for train, query, weight in sides]

    @property
    def record(self) -> dict[str, Any]:
        """What was chosen, for the result."""
        return {"k": self._asked.refine, "checkpoints": [one.curved.record for one in self._each]}

    def of(self, queries: slice, scores: Tensor) -> Refined:
        """Return the candidates of some queries, whose cheap scores are (m, N)."""
        places = torch.stack([candidates(row, self._asked.refine) for row in scores])
        found = torch.zeros(places.shape, dtype=torch.float64)
        for one in self._each:
            found += one.scores(queries, places)
        return Refined(places, found.masked_fill(places < 0, torch.nan))


class _Exact:
    """One checkpoint: both runs, without what was made of the gradients."""

    def __init__(self, train: Side, query: Side, weight: float, asked: Settings) -> None:
        self._train, self._query = _opened(train), _opened(query)
        self._weight = weight
        self._whole = of_job(self._train, train.facts.name)
        self._memory = asked.room(self._whole)
        self.curved: Curved = curved(self._whole, asked)
        self._finite = max(1, int(train.table()["finite"].sum()))

    def scores(self, queries: slice, places: Tensor) -> Tensor:
        """Return the scores of `places` (m, 2K) for some queries, in float64."""
        found = torch.full(places.shape, torch.nan, dtype=torch.float64)
        step = max(1, self._memory // (8 * self._whole.width))
        for start in range(0, len(places), step):
            rows = slice(start, min(start + step, len(places)))
            own = torch.arange(queries.start + rows.start, queries.start + rows.stop)
            found[rows] = self._some(own, places[rows])
        return found

    def _some(self, queries: Tensor, places: Tensor) -> Tensor:
        """Return the scores of `places` (m, 2K) for m queries."""
        union = torch.from_numpy(np.unique(places[places >= 0].numpy()))
        if not len(union):
            return torch.full(places.shape, torch.nan, dtype=torch.float64)
        parts = [
            Part(part.places, self.curved.before(part.gradients))
            for part in some_of(self._query, "queries", queries).parts()
        ]
        tile = Tile(parts, precision(self._whole, len(queries)))
        side = some_of(self._train, "candidates", union)
        products = products_of(tile, side)[""] * (self._weight / self._finite)
        products[:, ~side.table()["finite"]] = torch.nan
        found = torch.full((len(queries), len(union)), torch.nan, dtype=torch.float64)
        found[tile.places] = products
        return found.gather(1, torch.searchsorted(union, places.clamp_min(int(union[0]))))


def candidates(scores: Tensor, k: int) -> Tensor:
    """Return the places of the k best and k worst of scores (N,), and -1 behind them (2k,)."""
    known = torch.from_numpy(np.flatnonzero(np.isfinite(scores.numpy())))
    order = known[scores[known].argsort(descending=True, stable=True)]
    both = order if len(order) <= 2 * k else torch.cat([order[:k], order[-k:]])
    found = torch.full((2 * k,), -1, dtype=torch.int64)
    found[: len(both)] = both
    return found


def _opened(side: Side) -> Job:
    """Return the run of a side, without what was made of its gradients."""
    facts = side.facts
    if facts.chain == "identity":
        raise SpecError(
            "its rows are full gradients: all their scores are exact",
            where=facts.name,
            remedy="Leave --refine out, or score rows of a projection (-t project:...).",
        )
    if [stage.name for stage in parse(facts.chain)] != ["project"]:
        raise SpecError(
            f"its rows are {facts.chain!r}: they stand for full gradients only where projected",
            where=facts.name,
            remedy="Leave --refine out, or score rows of a projection alone (-t project:...).",
        )
    if facts.spec is None:
        raise SpecError("there is no run to compute full gradients by", where=facts.name)
    spec = recorded_run(facts.spec, facts.name)
    job = prepare(spec.computing(transform=("identity",), shard=None))
    changed = [what for what in _SAME if facts.digests.get(what) != job.digests.get(what)]
    if changed or len(job.rows) != side.n:
        raise SpecError(
            f"its run is not what it was: the {' and the '.join(changed or ['samples'])} changed",
            where=facts.name,
            remedy="Compute its rows again.",
        )
    return replace(job, batch_size=samples_at_a_time(job))
