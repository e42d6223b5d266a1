"""Scores of every query with every training sample, a tile of queries at a time.

The score `influence` is s(q, i) = (1/N) g_qᵀ (H + λ)⁻¹ gᵢ with N training samples. To first order,
it is the rise of the loss of query q if sample i is left out of the training. A positive score
helps, a negative score harms. The score of a group is the sum (or mean) of its samples' scores.
Source: Koh & Liang 2017, arXiv:1703.04730, equation 2 (sign, ε = −1/N).

`relative` is s(q, i) / √s(i, i): samples that change every prediction, such as outliers, lose their
lead. Source: Barshan, Brunet & Dziugaite 2020, arXiv:2003.11630, ℓ-RelatIF. `cosine` is
s(q, i) / √(s(q, q) s(i, i)), the cosine of H^(-1/2) g_q and H^(-1/2) gᵢ: both gradients have unit
norm after the preconditioner. Source: Chang et al. 2024, arXiv:2410.17413 (TrackStar). With several
checkpoints, the scores of each are normalised before the weighted sum, as in LESS (Xia et al. 2024,
arXiv:2402.04333). The score of a zero gradient is 0.

With `refine`, cheap scores select candidates for each query, which are scored again exactly
(`Refining`). Both runs are opened again without projections, and only the gradients of the
candidates are computed in full. These gradients are not stored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradscope.attribution.curvature import stored_numbers
from gradscope.attribution.methods import (
    AttributionSettings,
    CurvatureSteps,
    Form,
    curved,
    own_products,
    precision,
    products_of,
)
from gradscope.attribution.products import GradientBatch, Tile, row_products, sum_of, tiles
from gradscope.attribution.sources import (
    GradientSource,
    Part,
    job_source,
    projection_error,
    recorded_run,
    require_same,
    samples_at_a_time,
    selected_source,
)
from gradscope.blocks import Gradients
from gradscope.core.grammar import parse
from gradscope.errors import SpecError
from gradscope.process.memory import release_freed_memory, slices
from gradscope.run import Job, prepare

_UNITS: dict[Form, str] = {
    "influence": "the change of the query's loss if the training {0} had been left out, to first "
    "order: positive helps, negative harms",
    "relative": "the change of the query's loss if the training {0} had been left out, to first "
    "order, divided by the root of the same change of the {0}'s own loss: positive helps, negative "
    "harms",
    "cosine": "the cosine, from -1 to 1, of the gradients of the query and of the training {0}, in "
    "the metric of the inverse curvature: positive helps, negative harms",
}
_EXACT = 2**24  # the most scores that are stored in float64; more are stored in float32


class CheckpointSources(NamedTuple):
    """The training samples and the queries at one checkpoint."""

    train: GradientSource
    query: GradientSource
    weight: float = 1.0  # factor of its scores in the sum over checkpoints


class Comparing:
    """Scores at one checkpoint, with a known curvature or the training samples' curvature.

    Raises:
        SpecError: The two sources do not match, or the curvature does not fit the rows.
    """

    def __init__(
        self,
        pair: CheckpointSources,
        asked: AttributionSettings,
        known: CurvatureSteps | None = None,
    ) -> None:
        require_same(pair.train.facts, pair.query.facts)
        notes: tuple[str, ...] = ()
        self.pair, self.curved = pair, known or curved(pair.train, asked)
        self._form = asked.score
        # ‖dropped‖ / ‖H⁻¹g‖ (M,) of the queries that were prepared, NaN for other queries
        self.truncation = torch.full((pair.query.n,), torch.nan, dtype=torch.float64)
        if "without" in self.curved.record:
            why = str(self.curved.record["without"]).partition("\n")[0]
            notes += (f"the curvature is the Fisher alone, because EK-FAC failed: {why}",)
        error = projection_error(pair.train)
        if error is not None:
            self.curved.record["projection_error"] = error
            notes += (f"projection changes a product ⟨g, h⟩ by about {error:.2g} ‖g‖ ‖h‖",)
        self.notes = notes

    @property
    def finite(self) -> Tensor:
        """Whether each training sample has a finite gradient (N,)."""
        return self.pair.train.table()["finite"]

    @cached_property
    def _own(self) -> Tensor:
        """gᵢᵀ H⁻¹ gᵢ (N,), 0 for samples left out."""
        steps, train = self.curved, self.pair.train
        return own_products(train, steps.before) if steps.own is None else steps.own()

    def queries(self, start: int) -> Iterator[GradientBatch]:
        """Yield batches of queries, prepared for products unless all are in rows before `start`."""
        for batch in self.pair.query.batches():
            if not len(batch.places) or int(batch.places[-1]) < start:
                yield batch
                continue
            made, dropped = _prepared(batch, self.curved, self._form)
            if dropped is not None:
                self.truncation[batch.places] = dropped.cpu()
            del batch
            release_freed_memory()
            yield made

    def scores(self, tile: Tile, *, last: bool) -> Tensor:
        """Return the scores (m, N) of a tile of queries in float64, NaN for samples left out.

        After the `last` tile is prepared, the curvature's large tensors are released.
        """
        own = None if self._form == "influence" else self._own
        train, steps = self.pair.train, self.curved
        if last:
            self.curved = replace(steps, before=_released, truncate=None)
            steps = self.curved
            release_freed_memory()
        found = scores_of(self._form, tile, train, steps, own, train.count())
        return found.mul_(self.pair.weight)

    def self_influence(self) -> Tensor | None:
        """Return s(i, i) (N,) where it costs little, NaN of what is left out."""
        if self.curved.own is None and self._form == "influence":
            return None
        found = self._own * (self.pair.weight / self.pair.train.count())
        found[~self.finite] = torch.nan
        return found


def scores_of(
    form: Form,
    tile: Tile,
    source: GradientSource,
    steps: CurvatureSteps,
    own: Tensor | None,
    n: int,
) -> Tensor:
    """Return scores (m, k) of m queries with the k samples of a source, NaN for samples left out.

    Args:
        form: The form of the scores.
        tile: The queries, prepared for products.
        source: All training samples, or some of them.
        steps: The curvature of all training samples.
        own: gᵢᵀ H⁻¹ gᵢ (k,), which `influence` does not need.
        n: The number of all training samples, N.
    """
    products = products_of(tile, source, steps.groups)
    found = steps.after(products) / n
    if own is not None:
        found *= _inverse_root(own / n)
    if form == "cosine":
        of_query = steps.own_query(tile.own, products)
        found *= _inverse_root(of_query / n).unsqueeze(1)
    found[:, ~source.table()["finite"]] = torch.nan
    return found


def _released(rows: Gradients) -> Gradients:
    raise AssertionError("all queries are scored already")


def _prepared(
    batch: GradientBatch, steps: CurvatureSteps, form: Form
) -> tuple[GradientBatch, Tensor | None]:
    """Return queries times H⁻¹, and ‖dropped‖ / ‖H⁻¹g‖ (b,) if matrices have a low rank."""
    rows = batch.gradients
    made, dropped = (steps.before(rows), None) if steps.truncate is None else steps.truncate(rows)
    own = row_products(rows, made, steps.groups) if form == "cosine" else {}
    return GradientBatch(batch.places, made, own), dropped


def _inverse_root(squares: Tensor) -> Tensor:
    """Return 1 / √s, or 0 where s is 0: a zero gradient has the score 0."""
    return torch.where(squares > 0, squares.clamp(min=0.0).rsqrt(), 0.0)


def stored_dtype(pair: CheckpointSources) -> torch.dtype:
    """Return the dtype of stored scores."""
    few = pair.train.total * pair.query.n <= _EXACT
    return torch.float64 if few else torch.float32


class Scoring:
    """Computes rows of scores, a tile of queries at a time.

    Args:
        pairs: One pair for each checkpoint; the scores are the weighted sum over them.
        asked: The settings.
        known: The curvature of the training samples, if it is known.

    Raises:
        SpecError: Sources do not match, or the curvature does not fit the rows.
    """

    def __init__(
        self,
        pairs: Sequence[CheckpointSources],
        asked: AttributionSettings,
        known: CurvatureSteps | None = None,
    ) -> None:
        if len({(pair.train.total, pair.query.n) for pair in pairs}) > 1:
            raise SpecError(
                "the checkpoints have different numbers of training samples or queries",
                remedy="Compute all checkpoints with the same samples.",
            )
        self.pairs, self.asked, self.dtype = pairs, asked, stored_dtype(pairs[0])
        self.done = 0  # the number of queries that are scored already
        cheap = cheaply(asked, pairs[0].train.part)
        self.refining = Refining(pairs, asked) if asked.refine else None
        self._every = [Comparing(pair, cheap, known) for pair in pairs]
        first = pairs[0]
        shapes, rank = first.train.shapes().values(), asked.query_rank
        numbers = sum(stored_numbers(shape, rank) for shape in shapes)
        each = 8 * numbers + 16 * first.train.n  # rows; products, and scores
        self.step = max(1, min(first.query.n, asked.room(first.train) // each))

    @property
    def record(self) -> dict[str, Any]:
        """The settings and their values, for the result."""
        each = [{**one.curved.record, "weight": one.pair.weight} for one in self._every]
        refined = {} if self.refining is None else {"refined": self.refining.record}
        unit = _UNITS[self.asked.score].format(self.pairs[0].train.facts.rows)
        return {"score": self.asked.score, "unit": unit, "checkpoints": each, **refined}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""
        lost = int((~self._every[0].finite).sum())
        noun = self.pairs[0].train.facts.rows
        why = f"{lost:,} training {noun}s without a finite gradient are left out"
        notes = [note for one in self._every for note in one.notes]
        return tuple(dict.fromkeys([*notes, *([why] if lost else [])]))

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (queries, their scores (m, N) in float64), NaN for samples left out; once."""
        n, m = self.pairs[0].train.n, self.pairs[0].query.n
        dtypes = [precision(pair.train, m) for pair in self.pairs]
        keeps_rows = not self.asked.query_rank
        walks = [
            tiles(one.queries(self.done), m, self.step, dtype, keeps_rows=keeps_rows)
            for one, dtype in zip(self._every, dtypes, strict=True)
        ]
        for start in range(0, m, self.step):
            each = [next(walk) for walk in walks]
            queries = slice(start, min(start + self.step, m))
            if queries.stop <= self.done:
                continue
            count, found = queries.stop - start, torch.zeros(())
            for one, tile in zip(self._every, each, strict=True):
                own = one.scores(tile, last=queries.stop == m)
                if tile.n < count:
                    all_of_them = own.new_full((count, n), torch.nan)
                    all_of_them[tile.places - start] = own
                    own = all_of_them
                found = found + own if found.dim() else own
            new = slice(max(start, self.done), queries.stop)  # a resumed run may have other tiles
            yield new, found[new.start - start :]

    @property
    def truncation(self) -> Tensor | None:
        """With `query_rank`, ‖dropped‖ / ‖H⁻¹g‖ (M,) of the queries in `rows` so far, else None.

        With several checkpoints, it is the largest of all.
        """
        every = [one.truncation for one in self._every]
        return torch.stack(every).amax(0) if self.asked.query_rank else None

    def self_influence(self) -> Tensor | None:
        """Return s(i, i) (N,) where it costs little, NaN of what is left out."""
        found = [one.self_influence() for one in self._every]
        known = [own for own in found if own is not None]
        return sum_of(known) if len(known) == len(found) else None


EXACT = ("ekfac", "kfac", "diagonal", "adam", "identity")  # curvatures without rows of all samples
_SAME = ("checkpoint", "model", "dataset")
_PLACES = 2**24  # places up to this number are exact in float32, in which they may be stored


def cheaply(asked: AttributionSettings, part: Part | None) -> AttributionSettings:
    """Return the settings of the cheap scores that select candidates.

    Raises:
        SpecError: The curvature needs full gradients of all samples, or the samples are a shard.
    """
    if not asked.refine:
        return asked
    if part is not None:
        raise SpecError(
            "the candidates of a query are chosen among all training samples, and shard "
            f"{part.shard} has some of the samples",
            where="`refine`",
            remedy="Leave `refine` out, or score all samples in one process.",
        )
    if asked.refine < 0:
        raise SpecError(f"found {asked.refine}", where="`refine`", remedy="Accepted: 0 or more.")
    if asked.curvature not in ("auto", *EXACT):
        raise SpecError(
            f"the curvature {asked.curvature} needs full gradients of all training samples, and "
            "refining computes them for candidates only",
            where="`refine`",
            remedy=f"Set `curvature` to one of {', '.join(EXACT)}; or leave `refine` out.",
        )
    return replace(asked, curvature="identity" if asked.curvature == "identity" else "auto")


class Refining:
    """Computes the scores of candidates from full gradients.

    Raises:
        SpecError: A source has no run, its rows are not projections, or its run has changed.
    """

    def __init__(self, pairs: Sequence[CheckpointSources], asked: AttributionSettings) -> None:
        n = pairs[0].train.n
        if n > _PLACES:
            raise SpecError(
                f"there are {n:,} training samples, and refining supports at most {_PLACES:,}",
                where="`refine`",
                remedy="Leave `refine` out.",
            )
        method: Any = "ekfac" if asked.curvature == "auto" else asked.curvature
        self._asked = replace(asked, curvature=method)
        self._each = [_Exact(pair, self._asked) for pair in pairs]

    @property
    def record(self) -> dict[str, Any]:
        """The settings and their values, for the result."""
        return {"k": self._asked.refine, "checkpoints": [one.curved.record for one in self._each]}

    def of(self, queries: slice, scores: Tensor) -> dict[str, Tensor]:
        """Return the candidates of some queries, given their cheap scores (m, N).

        `places` (m, 2K) int64 holds their rows in the training samples, padded with -1. `scores`
        (m, 2K) holds their exact scores in float64, NaN for samples without a score.
        """
        places = torch.stack([candidates(row, self._asked.refine) for row in scores])
        found = torch.zeros(places.shape, dtype=torch.float64)
        for one in self._each:
            found += one.scores(queries, places)
        return {"places": places, "scores": found.masked_fill(places < 0, torch.nan)}


class _Exact:
    """The full gradients of both runs at one checkpoint."""

    def __init__(self, pair: CheckpointSources, asked: AttributionSettings) -> None:
        self._train, self._query = _open_job(pair.train), _open_job(pair.query)
        self._whole = job_source(self._train, pair.train.facts.name)
        self._memory = asked.room(self._whole)
        self.curved = curved(self._whole, asked)
        self._form, self._weight = asked.score, pair.weight
        self._n = pair.train.count()

    def scores(self, queries: slice, places: Tensor) -> Tensor:
        """Return the scores of `places` (m, 2K) for some queries, in float64."""
        found = torch.empty(places.shape, dtype=torch.float64)
        for rows in slices(len(places), 8 * self._whole.width, self._memory):
            own = torch.arange(queries.start + rows.start, queries.start + rows.stop)
            found[rows] = self._some(own, places[rows])
        return found

    def _some(self, queries: Tensor, places: Tensor) -> Tensor:
        """Return the scores of `places` (m, 2K) for m queries."""
        union = torch.from_numpy(np.unique(places[places >= 0].numpy()))
        if not len(union):
            return torch.full(places.shape, torch.nan, dtype=torch.float64)
        asked = selected_source(self._query, "queries", queries).batches()
        prepared = [_prepared(batch, self.curved, self._form)[0] for batch in asked]
        tile = Tile(prepared, precision(self._whole, len(queries)))
        source = selected_source(self._train, "candidates", union)
        own = None if self._form == "influence" else own_products(source, self.curved.before)
        scores = scores_of(self._form, tile, source, self.curved, own, self._n) * self._weight
        found = torch.full((len(queries), len(union)), torch.nan, dtype=torch.float64)
        found[tile.places] = scores
        return found.gather(1, torch.searchsorted(union, places.clamp_min(int(union[0]))))


def candidates(scores: Tensor, k: int) -> Tensor:
    """Return the places (2k,) of the k best and the k worst scores (N,), padded with -1."""
    known = torch.from_numpy(np.flatnonzero(np.isfinite(scores.numpy())))
    order = known[scores[known].argsort(descending=True, stable=True)]
    both = order if len(order) <= 2 * k else torch.cat([order[:k], order[-k:]])
    found = torch.full((2 * k,), -1, dtype=torch.int64)
    found[: len(both)] = both
    return found


def _open_job(source: GradientSource) -> Job:
    """Return the run of a source, with the chain `identity` instead of the projection."""
    facts = source.facts
    if facts.chain == "identity":
        raise SpecError(
            "the rows are full gradients already, so all scores are exact",
            where=facts.name,
            remedy="Leave `refine` out, or score rows of a projection (project:...).",
        )
    if [stage.name for stage in parse(facts.chain)] != ["project"]:
        raise SpecError(
            f"the rows are {facts.chain!r}; refining needs rows of a projection alone",
            where=facts.name,
            remedy="Leave `refine` out, or score rows of the chain project:...",
        )
    if facts.spec is None:
        raise SpecError(
            "there is no run that computes full gradients",
            where=facts.name,
            remedy="Leave `refine` out, or give a run file or a result file.",
        )
    spec = recorded_run(facts.spec, facts.name)
    job = prepare(spec.computing(transform=("identity",), shard=None))
    changed = [what for what in _SAME if facts.digests.get(what) != job.digests.get(what)]
    if changed or len(job.rows) != source.n:
        raise SpecError(
            f"since the rows were computed, the {' and the '.join(changed or ['samples'])} changed",
            where=facts.name,
            remedy="Compute the rows again.",
        )
    return replace(job, batch_size=samples_at_a_time(job))
