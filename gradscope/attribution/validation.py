"""Validation: how well scores predict the losses of models retrained without some samples.

The measure is the linear datamodeling score (Park et al. 2023, arXiv:2303.14186, section 2): for
each query q, the rank correlation between -Σ_{i in S} s(q, i) and the loss of q, over models
trained on random subsets S.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradscope.attribution.lds import agreement
from gradscope.attribution.retraining import (
    Mask,
    Retraining,
    Retrainings,
    identity_of,
    seed_of,
    subset,
    without,
)
from gradscope.attribution.scores import Scores, open_scores
from gradscope.attribution.sources import recorded_run
from gradscope.attribution.summary import described, queries
from gradscope.core.texts import count
from gradscope.errors import GradscopeError, SpecError
from gradscope.sources.data import open_dataset
from gradscope.stats.album import sample_name
from gradscope.stats.records import Floats, Interval, Record, SampleRecord
from gradscope.stats.sections import (
    Column,
    Fact,
    Overview,
    Section,
    Table,
    count_column,
    facts_under,
    interval_text,
    numbers,
)

FOLDER = ".validation"  # replaces the suffix of the score file
_LEAST = 3  # the least number of retrainings for a rank correlation
_QUERIES, _SEEDS = 3, 3  # --removal: the number of queries, and of trainings of each
_FIRST_REMOVAL = 2**31  # seed numbers of removals start here, far from the subsets' numbers
_READ = 256  # the number of inputs read at a time
_SHOWN = 10  # the number of queries in a table

Predicted = NDArray[np.float64]  # (M, S), predictions of each query's loss, up to a constant


@dataclass(frozen=True)
class ValidationSettings:
    """The settings of a validation."""

    retrainings: int = 50  # the number of random subsets, at least 3
    fraction: float = 0.5  # the share of the training samples in each subset
    seed: int = 0  # the seed of subsets and trainings
    width: float = 0.02  # an interval's width; the result estimates the retrainings for it
    removal: int = 0  # the most helpful samples of a query that are removed at most; 0 for none

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise SpecError(
                f"found {self.fraction}",
                where="--fraction",
                remedy="Accepted: a number between 0 and 1.",
            )
        if self.retrainings < _LEAST:
            raise SpecError(
                f"{count(self.retrainings, 'retraining')} are too few for a rank correlation",
                where="--retrainings",
                remedy=f"Give at least {_LEAST}.",
            )
        if not 0 < self.width < 2:
            raise SpecError(
                f"found {self.width}", where="--width", remedy="Accepted: above 0, below 2."
            )


class LdsRow(Record):
    """How well one kind of scores predicts the losses after retraining."""

    scores: str
    lds: float
    interval: Interval


class QueryLds(SampleRecord):
    """The rank correlation of one query."""

    lds: float


class Removal(SampleRecord):
    """The rise of a query's loss when k training samples are left out."""

    k: int
    predicted: float  # the sum of the scores of the k most helpful samples
    helpful: tuple[float, ...]  # the rise without the k most helpful samples, one for each seed
    drawn: tuple[float, ...]  # the rise without k random samples, one for each seed


class Validation(Record):
    """How well scores predict the losses after retraining."""

    schema_: Literal["gradscope.validate"] = "gradscope.validate"
    version: Literal[1] = 1
    path: str
    folder: str
    queries: int
    samples: int
    retrainings: int
    fraction: float
    seed: int
    rows: tuple[LdsRow, ...]  # the file's own scores first
    by_query: tuple[QueryLds, ...]
    width: float
    needed: int  # retrainings for an interval of that width
    removal: tuple[Removal, ...] = ()
    notes: tuple[str, ...] = ()

    def overview(self) -> Overview:
        """Return the facts and tables to show."""
        share = f"{self.fraction:.0%}"
        facts: list[Fact] = [
            ("scores", f"{queries(self.queries)} × {self.samples:,} samples"),
            ("retrained", f"{self.retrainings:,} times, each on {share} of the samples"),
            ("kept in", self.folder),
            *facts_under("note", self.notes),
        ]
        sections = [_scores_section(self), _queries_section(self.by_query)]
        if self.removal:
            sections.append(_removal_section(self.removal))
        return Overview(paths=[self.path], facts=facts, sections=sections, pictures=())


class ValidationRun:
    """Runs a validation: retrainings one by one, then the comparison with the scores.

    Args:
        path: The score file.
        fit: The function FIT(indices, seed), as FILE.py:NAME or package.module:NAME. `indices`
            (n,) int64 are positions of training samples in their data set, `seed` is an int. FIT
            returns the trained torch.nn.Module, in the mode for its evaluation.
        asked: The settings.
        folder: The folder of the retrainings; by default next to the score file.
        overwrite: Delete the retrainings in the folder first.

    Raises:
        InputError: A file cannot be read.
        SpecError: An option does not fit.
        OutputError: The folder cannot be written, or holds other retrainings.
    """

    def __init__(
        self,
        path: Path,
        fit: str,
        asked: ValidationSettings,
        folder: Path | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        self.path, self.asked = path, asked
        self.folder = path.with_suffix(FOLDER) if folder is None else folder
        with open_scores(path) as scores:
            columns = {*scores.samples, *scores.queries}
            for column, noun in (("position", "tokens"), ("size", "groups")):
                if column in columns:
                    raise SpecError(
                        f"the scores are for {noun}, but retraining leaves out single samples",
                        where=str(path),
                        remedy="Compute the scores with rows of samples.",
                    )
            n = scores.shape[1]
            _require_sizes(path, n, asked)
            form = scores.record.get("score", "influence")
            if asked.removal and form != "influence":
                raise SpecError(
                    f"the scores are {form}, which do not predict the size of a change of the loss",
                    where="--removal",
                    remedy="Leave --removal out, or score with gradscope attribute "
                    "--score influence.",
                )
            found = identity_of(scores, fit, asked.seed, asked.fraction)
            self._known = np.flatnonzero(scores.queries["finite"])
            if not len(self._known):
                raise SpecError(
                    "no query has a score, because the gradients of all queries are not finite",
                    where=str(path),
                )
            self._curve = _Removals.of(scores, self._known, asked) if asked.removal else None
        self._work = Retrainings(self.folder, path, fit, found)
        self._work.begin(overwrite=overwrite)
        self._subsets = [subset(asked.seed, k, n, asked.fraction) for k in range(asked.retrainings)]

    @property
    def total(self) -> int:
        """The number of retrainings, done or not."""
        return len(self._asked)

    @property
    def _asked(self) -> list[Retraining]:
        more = [] if self._curve is None else self._curve.retrainings()
        return list({one.name: one for one in [*self._subsets, *more]}.values())

    def remaining(self, workers: int = 1) -> Iterator[Retraining]:
        """Do the retrainings that are not done yet; yield each retraining once it is done."""
        return self._work.remaining(self._asked, workers)

    def finish(self) -> Validation:
        """Compare the scores with the retrainings. All retrainings must be done."""
        asked, known = self.asked, self._known
        losses = np.stack([self._work.losses(one) for one in self._subsets])[:, known]  # (S, M)
        held = np.stack([one.kept for one in self._subsets])  # (S, N)
        with open_scores(self.path) as scores:
            every, notes = _predictions(scores, known, held, asked.seed)
            found = {k: agreement(values, losses, seed=asked.seed) for k, values in every.items()}
            own = next(iter(found.values()))
            by_query = [
                QueryLds(**described(scores.queries, int(q)), lds=float(value))
                for q, value in zip(known, own.by_query, strict=True)
            ]
            curve = () if self._curve is None else tuple(self._curve.rows(scores, self._work))
            m, n = scores.shape
        return Validation(
            path=str(self.path),
            folder=str(self.folder),
            queries=m,
            samples=n,
            retrainings=asked.retrainings,
            fraction=asked.fraction,
            seed=asked.seed,
            rows=tuple(
                LdsRow(scores=name, lds=one.mean, interval=Interval(low=one.low, high=one.high))
                for name, one in found.items()
            ),
            by_query=tuple(by_query),
            width=asked.width,
            needed=own.subsets_for(asked.width / 2),
            removal=curve,
            notes=notes,
        )


def validate(
    scores: str | Path,
    fit: str,
    asked: ValidationSettings | None = None,
    *,
    folder: str | Path | None = None,
    workers: int = 1,
) -> Validation:
    """Retrain, and return how well the scores predict the new losses; see `ValidationRun`.

    The generators of Python, NumPy and torch are seeded before each training.

    Args:
        scores: The score file.
        fit: The function that trains, as FILE.py:NAME or package.module:NAME.
        asked: The settings.
        folder: The folder of the retrainings; by default next to the score file.
        workers: The number of processes that train at once.
    """
    place = None if folder is None else Path(folder)
    under_way = ValidationRun(Path(scores), fit, asked or ValidationSettings(), place)
    list(under_way.remaining(workers))
    return under_way.finish()


def _require_sizes(path: Path, n: int, asked: ValidationSettings) -> None:
    if n < 2:
        raise SpecError(
            "the scores have a single training sample",
            where=str(path),
            remedy="Score at least 2 training samples: retraining leaves some out.",
        )
    if not 0 <= asked.removal < n:
        raise SpecError(
            f"{asked.removal:,} of {n:,} training samples cannot be removed",
            where="--removal",
            remedy=f"Give 0 to {n - 1:,}.",
        )


def _predictions(
    scores: Scores, known: NDArray[np.int64], held: Mask, seed: int
) -> tuple[dict[str, Predicted], tuple[str, ...]]:
    """Return the predictions of the file's scores and of simple baselines, and notes."""
    n, weights, notes = scores.shape[1], held.astype(np.float64), []
    draw = np.random.default_rng(seed).standard_normal
    loss = np.nan_to_num(np.asarray(scores.samples["loss"], dtype=np.float64))
    found = {
        "the file's": np.stack([-(weights @ np.nan_to_num(scores.row(int(q)))) for q in known]),
        "random": np.stack([-(weights @ draw(n)) for _ in known]),
        "training loss": np.tile(-(weights @ loss), (len(known), 1)),
    }
    try:
        found["inner products of inputs"] = -_input_products(scores, weights)[known]
    except GradscopeError as error:
        notes.append(f"the baseline 'inner products of inputs' is missing: {error.head}")
    if len(known) < scores.shape[0]:
        notes.append(f"{queries(scores.shape[0] - len(known))} without scores are left out")
    missing = int((~scores.samples["finite"].astype(bool)).sum())
    if missing:
        notes.append(f"{count(missing, 'training sample')} without scores count as 0")
    return found, tuple(notes)


def _input_products(scores: Scores, weights: Floats) -> Floats:
    """Return Σ_{i in S} ⟨x_q, x_i⟩ (M, S) of inputs x, for subsets with weights (S, N)."""
    sums: Tensor | None = None
    start = 0
    for part in _inputs(scores, "train"):
        some = torch.from_numpy(weights[:, start : start + len(part)]) @ part
        sums, start = some if sums is None else sums + some, start + len(part)
    assert sums is not None  # there are training samples
    rows = []
    for part in _inputs(scores, "query"):
        if part.shape[1] != sums.shape[1]:
            raise SpecError("inputs of queries and of training samples differ in size")
        rows.append(part @ sums.mT)
    return torch.cat(rows).numpy()


def _inputs(scores: Scores, side: str) -> Iterator[Tensor]:
    """Yield the inputs of a side as rows (n, entries) in float64, some at a time.

    Raises:
        GradscopeError: Inputs cannot be read, or are not one array of floating-point numbers.
    """
    record: Any = scores.record[side]
    where = None if scores.file is None else str(scores.file.path)
    spec = recorded_run(record.get("spec"), where)
    data = open_dataset(spec.dataset, samples=spec.compute.samples)
    rows = data.rows(spec.compute.samples)
    table = scores.samples if side == "train" else scores.queries
    if not np.array_equal(table["index"], np.arange(rows.start, rows.stop)):
        raise SpecError("the data have changed since they were scored", where=side)
    for start in range(0, len(rows), _READ):
        inputs = data.batch(rows[start : start + _READ]).inputs
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise SpecError("the inputs are not one array of floating-point numbers")
        yield inputs.flatten(1).double()


@dataclass(frozen=True)
class _Removals:
    """Trainings without the most helpful samples of some queries, and without random ones."""

    n: int
    seed: int
    helpful: Mapping[int, NDArray[np.int64]]  # {query: training samples, most helpful first}
    steps: Sequence[int]

    @classmethod
    def of(cls, scores: Scores, known: NDArray[np.int64], asked: ValidationSettings) -> "_Removals":
        k = asked.removal
        places = np.unique(np.linspace(0, len(known) - 1, min(len(known), _QUERIES)).round())
        helpful = {int(q): scores.helpful(int(q), k).places for q in known[places.astype(np.int64)]}
        most = min(len(places) for places in helpful.values())
        steps = sorted({max(1, round(most * part)) for part in (0.25, 0.5, 1.0)})
        return cls(scores.shape[1], asked.seed, helpful, steps)

    def retrainings(self) -> list[Retraining]:
        """Return all retrainings; compared retrainings share their seed."""
        return [
            one
            for repeat in range(_SEEDS)
            for one in (
                self._whole(repeat),
                *(self._random(k, repeat) for k in self.steps),
                *(self._helpful(q, k, repeat) for q in self.helpful for k in self.steps),
            )
        ]

    def rows(self, scores: Scores, work: Retrainings) -> Iterator[Removal]:
        """Yield the effect of each removal."""
        for q in self.helpful:
            own = scores.row(q)
            for k in self.steps:
                pairs = [(self._helpful(q, k, r), self._random(k, r)) for r in range(_SEEDS)]
                before = [work.losses(self._whole(r))[q] for r in range(_SEEDS)]
                rises = [
                    [float(work.losses(one)[q] - b) for one, b in zip(some, before, strict=True)]
                    for some in zip(*pairs, strict=True)
                ]
                yield Removal(
                    **described(scores.queries, q),
                    k=k,
                    predicted=float(own[self.helpful[q][:k]].sum()),
                    helpful=tuple(rises[0]),
                    drawn=tuple(rises[1]),
                )

    def _whole(self, repeat: int) -> Retraining:
        return self._without("whole", np.empty(0, dtype=np.int64), repeat)

    def _helpful(self, query: int, k: int, repeat: int) -> Retraining:
        return self._without(f"without-{k}-of-{query}", self.helpful[query][:k], repeat)

    def _random(self, k: int, repeat: int) -> Retraining:
        draw = np.random.default_rng([self.seed, _FIRST_REMOVAL + repeat])
        return self._without(f"without-{k}-random", draw.permutation(self.n)[:k], repeat)

    def _without(self, name: str, left_out: NDArray[np.int64], repeat: int) -> Retraining:
        return without(name, left_out, self.n, seed_of(self.seed, _FIRST_REMOVAL + repeat))


def _scores_section(found: Validation) -> Section:
    rows = found.rows
    columns = [
        Column("scores", [row.scores for row in rows], justify="left"),
        numbers("LDS", [row.lds for row in rows]),
        Column("95% interval", [interval_text(row.interval) for row in rows]),
    ]
    note = (
        f"An interval of width {found.width:g} needs about {found.needed:,} retrainings "
        f"(--retrainings). The {found.retrainings:,} finished ones are reused."
    )
    return Section(
        "Rank correlation of predicted with true losses (1: always in the true order)",
        table=Table(columns),
        notes=[note],
        formulas=["LDS = mean over q of Spearman over S of (-Σ_{i in S} s(q, i), loss of q)"],
    )


def _queries_section(rows: Sequence[QueryLds]) -> Section:
    shown = sorted(rows, key=lambda row: row.lds)[:_SHOWN]
    columns = [
        Column("query", [sample_name(row) for row in shown]),
        Column("target", [str(row.target) for row in shown], rank=1),
        numbers("LDS", [row.lds for row in shown]),
    ]
    more = len(rows) - len(shown)
    notes = [f"{queries(more)} not shown; --json lists all."] if more > 0 else []
    return Section("Queries predicted worst", table=Table(columns), notes=notes)


def _removal_section(rows: Sequence[Removal]) -> Section:
    columns = [
        Column("query", [sample_name(row) for row in rows]),
        Column("target", [str(row.target) for row in rows], rank=2),
        count_column("removed", [row.k for row in rows]),
        numbers("predicted rise", [row.predicted for row in rows]),
        numbers("without the most helpful", [float(np.mean(row.helpful)) for row in rows]),
        numbers("without random ones", [float(np.mean(row.drawn)) for row in rows]),
    ]
    note = f"Rise of the query's loss, mean of {_SEEDS} trainings against {_SEEDS} on all samples."
    return Section("Removing training samples", table=Table(columns), notes=[note])
