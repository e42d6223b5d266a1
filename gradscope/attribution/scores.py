"""Scores of queries with training samples, in memory or in a file.

A score file is a result file whose samples are the queries. Chain 0 has the rows `scores` (M, N),
and chain 1 has the table of the training samples.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from gradscope import markup
from gradscope.attribution.methods import AttributionSettings
from gradscope.attribution.scoring import CheckpointSources, Scoring, stored_dtype
from gradscope.attribution.sources import COLUMNS, GradientSource, SourceFacts, Table
from gradscope.blocks import DenseBlock, Gradients
from gradscope.errors import ResultFileError, SpecError
from gradscope.sources.formats import sha256
from gradscope.storage import (
    ChainPlan,
    FilePlan,
    FinishedBatch,
    GradientFile,
    Writer,
    is_complete,
    open_file,
    open_writer,
    require_distinct,
)

# the texts of the chains of a score file; the last one needs `refine`
SCORES, TRAINING, REFINED = "scores", "training samples", "refined scores"
CERTIFICATE: dict[str, Any] = {
    "verified": False,
    "verdict": "scores: their gradients were proved where computed",
}


@dataclass(frozen=True)
class Ranked:
    """Training samples of a query with their scores, best first."""

    places: NDArray[np.int64]  # the rows of the samples in the training data (k,)
    scores: NDArray[np.float64]  # their scores (k,)


@dataclass(frozen=True)
class Scores:
    """Scores of M queries with N training samples.

    Attributes:
        values: The scores (M, N); float32 if there are many. NaN marks samples left out. The
            values of a file are read row by row, on access.
        queries: {column: (M,)}, the sample table of the queries. With `query_rank`, `truncation`
            has the share of the norm of each query's row H⁻¹g that was dropped.
        samples: {column: (N,)}, the sample table of the training samples, with `self_influence`
            if known.
        record: The settings and their values: curvature, damping, unit, digests.
        refined: With `refine`, {"places", "scores"}, each (M, 2K): the samples that are scored
            again with full gradients, as rows of the training data (-1: none), and their scores.
    """

    values: Any
    queries: Mapping[str, NDArray[Any]]
    samples: Mapping[str, NDArray[Any]]
    record: Mapping[str, Any]
    refined: Mapping[str, Any] = field(default_factory=dict)
    file: GradientFile | None = field(default=None, repr=False)

    def _repr_html_(self) -> str:
        """Return the settings, for a notebook; `summarize_scores` lists the samples."""
        m, n = self.shape
        chosen = (self.record.get("checkpoints") or [{}])[0]
        rows = [
            ("scores", f"{m:,} queries × {n:,} training {self.noun}s"),
            ("curvature", ", ".join(f"{k} = {v}" for k, v in chosen.items())),
            ("unit", str(self.record.get("unit"))),
        ]
        return markup.document("gradscope.Scores", markup.facts(rows))

    @property
    def noun(self) -> str:
        """The kind of row that has a score: sample or token."""
        return str((self.record.get("train") or {}).get("rows", "sample"))

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        m, n = self.values.shape
        return int(m), int(n)

    def row(self, query: int) -> NDArray[np.float64]:
        """Return the scores (N,) of the query in row `query`, in float64.

        Raises:
            SpecError: There is no such query.
        """
        if not 0 <= query < self.shape[0]:
            raise SpecError(
                f"there is no query {query}", remedy=f"Give 0 to {self.shape[0] - 1:,}."
            )
        return np.asarray(self.values[query], dtype=np.float64)

    def helpful(self, query: int, k: int = 10) -> Ranked:
        """Return the k training samples without which the query's loss would rise most.

        With `refine`, only refined scores are used, and k is at most `refine`.
        """
        return self._best(query, k, -1.0)

    def harmful(self, query: int, k: int = 10) -> Ranked:
        """Return the k training samples without which the query's loss would fall most."""
        return self._best(query, k, 1.0)

    def _best(self, query: int, k: int, sign: float) -> Ranked:
        row = self.row(query)
        if not self.refined:
            return _ranked(row, k, sign)
        places, scores = (np.asarray(self.refined[name][query]) for name in ("places", "scores"))
        found = _ranked(scores.astype(np.float64), min(k, len(scores) // 2), sign)
        return Ranked(places.astype(np.int64)[found.places], found.scores)

    def sums(self, column: str | NDArray[Any] = "target") -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the distinct values (c,) of a column, and the sums of scores (M, c) for each.

        Args:
            column: A column of the training samples, or one value for each training sample (N,).

        Raises:
            SpecError: There is no such column, or the number of values is not N.
        """
        if isinstance(column, str) and column not in self.samples:
            known = ", ".join(self.samples)
            raise SpecError(f"no column {column!r}", remedy=f"Columns: {known}.")
        by = np.asarray(self.samples[column] if isinstance(column, str) else column)
        if by.shape != (self.shape[1],):
            raise SpecError(
                f"`column` has the shape {by.shape}",
                remedy=f"Give one value for each training sample: ({self.shape[1]},).",
            )
        found, of = np.unique(by, return_inverse=True)
        member = np.zeros((len(by), len(found)))
        member[np.arange(len(by)), of] = 1.0
        rows = (np.nan_to_num(self.row(q)) @ member for q in range(self.shape[0]))
        return found, np.stack(list(rows))

    def close(self) -> None:
        """Close the file, if the scores are in a file."""
        if self.file is not None:
            self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()

    @classmethod
    def of(cls, file: GradientFile) -> Self:
        """Return the scores in an open score file.

        Raises:
            ResultFileError: The file holds no scores.
        """
        if not is_scores(file):
            raise ResultFileError(
                "the file holds no scores",
                where=str(file.path),
                remedy="Give the file that gradscope attribute -o wrote.",
            )
        stored = {k: torch.from_numpy(np.asarray(v[...])) for k, v in file.chains[1].items()}
        samples = _plain(stored)
        return cls(
            values=file.chains[0]["scores"],
            queries=file.samples,
            samples=samples,
            record=file.run["attribution"],
            refined=file.chains[2] if len(file.chains) > 2 else {},
            file=file,
        )


def is_scores(file: GradientFile) -> bool:
    """Whether a result file holds scores."""
    return (
        [chain.text for chain in file.chains] in ([SCORES, TRAINING], [SCORES, TRAINING, REFINED])
        and isinstance(file.run.get("attribution"), dict)
        and "scores" in file.chains[0]
        and "index" in file.chains[1]
    )


def open_scores(path: str | Path) -> Scores:
    """Open a score file; use it in a `with` statement.

    Raises:
        ResultFileError: The file cannot be read, or holds no scores.
    """
    file = open_file(path)
    try:
        return Scores.of(file)
    except BaseException:
        file.close()
        raise


def in_memory(scoring: Scoring) -> Scores:
    """Compute all scores and return them."""
    found, refined = [], []
    for part, rows in scoring.rows():
        found.append(rows.to(scoring.dtype))
        if scoring.refining is not None:
            refined.append(scoring.refining.of(part, rows))
    first = scoring.pairs[0]
    names = refined[0] if refined else ()
    return Scores(
        values=torch.cat(found).numpy(),
        refined={name: torch.cat([one[name] for one in refined]).numpy() for name in names},
        queries=_plain(_with_truncation(first.query.table(), scoring)),
        samples=_plain(_training(scoring)),
        record={**scoring.record, **_facts(scoring.pairs)},
    )


class ScoreWriter:
    """Writes scores to a file, a tile of queries at a time."""

    def __init__(self, scoring: Scoring, writer: Writer, run: dict[str, Any]) -> None:
        self.scoring, self._writer, self._run = scoring, writer, run

    def remaining(self) -> Iterator[slice]:
        """Write one tile after another; yield the queries of each."""
        query = self.scoring.pairs[0].query
        self._run["attribution"] |= self.scoring.record  # before the first write
        for part, scores in self.scoring.rows():
            table = _with_truncation(query.table(part.stop), self.scoring)
            rows = self._rows({"scores": scores})
            refined: tuple[Gradients, ...] = ()
            if self.scoring.refining is not None:
                refined = (self._rows(self.scoring.refining.of(part, scores)),)
            samples = {name: table[name][part] for name in COLUMNS if name in table}
            self._writer.append(FinishedBatch(samples, chains=(rows, None, *refined)))
            yield part

    def _rows(self, columns: Mapping[str, torch.Tensor]) -> Gradients:
        return Gradients({k: DenseBlock(v.to(self.scoring.dtype)) for k, v in columns.items()})

    def finish(self) -> None:
        """Complete the file."""
        self._writer.finish({1: packed(_training(self.scoring))}, CERTIFICATE)


@contextmanager
def writing_scores(
    scoring: Scoring, path: Path, *, overwrite: bool = False, resume: bool = False
) -> Iterator[ScoreWriter]:
    """Open a score file for writing; yield its writer.

    Raises:
        OutputError: The file cannot be written, exists already, or belongs to another attribution.
    """
    plan = score_plan(scoring.pairs, scoring.asked, path)
    with open_writer(path, plan, overwrite=overwrite, resume=resume) as writer:
        scoring.done = writer.completed
        yield ScoreWriter(scoring, writer, plan.run)


def is_finished(
    pairs: Sequence[CheckpointSources],
    asked: AttributionSettings,
    path: Path,
    *,
    overwrite: bool = False,
) -> bool:
    """Whether the score file at `path` is complete.

    Raises:
        OutputError: The file belongs to another attribution, and may not be overwritten.
    """
    return is_complete(path, score_plan(pairs, asked, path), overwrite=overwrite)


def score_plan(
    pairs: Sequence[CheckpointSources], asked: AttributionSettings, path: Path
) -> FilePlan:
    """Return the plan of the score file at `path`.

    Raises:
        OutputError: `path` is the file of the factors.
    """
    facts = _facts(pairs)
    own = {k: str(getattr(asked, k)) for k in ("curvature", "damping", "refine", "score")}
    if asked.query_rank:
        own["query_rank"] = str(asked.query_rank)
    if asked.factors is not None:
        with open_file(asked.factors) as file:
            require_distinct(path, [file.path])
            own["factors"] = sha256(file.path)
    train, query = pairs[0][:2]
    return FilePlan(
        run={"attribution": dict(facts), "digests": facts["query"]["digests"]},
        fingerprint={**own, **json.loads(json.dumps(facts, default=str)), **_place(train)},
        attributes={},
        n=query.n,
        parameters={},
        chains=(
            ChainPlan(SCORES, False),
            ChainPlan(TRAINING, True),
            *([ChainPlan(REFINED, False)] if asked.refine else []),
        ),
        dtype=stored_dtype(pairs[0]),
        layout="dense",
    )


def _place(train: GradientSource) -> dict[str, Any]:
    """Return the samples of a shard, as `gradscope merge` reads them; {} for all samples."""
    part = train.part
    if part is None:
        return {}
    own = {"index": part.shard.index, "count": part.shard.count, "members": part.members}
    return {
        "samples": [part.start, part.start + train.n],
        "shard": {**own, "samples": [0, part.total]},
    }


def _with_truncation(table: Table, scoring: Scoring) -> Table:
    """Return the table of queries (M,) or of the first of them, with the column of `query_rank`."""
    if scoring.truncation is None:
        return table
    return table | {"truncation": scoring.truncation[: len(table["index"])]}


def _training(scoring: Scoring) -> Table:
    table = dict(scoring.pairs[0].train.table())
    own = scoring.self_influence()
    return table if own is None else table | {"self_influence": own}


def _facts(pairs: Sequence[CheckpointSources]) -> dict[str, Any]:
    first, *rest = pairs
    found: dict[str, Any] = {
        "train": _source_record(first.train.facts),
        "query": _source_record(first.query.facts),
    }
    return found | ({"more": [_source_record(pair.train.facts) for pair in rest]} if rest else {})


def _source_record(facts: SourceFacts) -> dict[str, Any]:
    return {
        "source": facts.name,
        "chain": facts.chain,
        "digests": dict(facts.digests),
        "loss": dict(facts.loss),
        "spec": facts.spec,
        **({} if facts.rows == "sample" else {"rows": facts.rows}),
    }


def packed(table: Table) -> Table:
    """Return a table in the dtypes of a file."""
    return {k: v.to(torch.uint8) if v.dtype == torch.bool else v for k, v in table.items()}


def _plain(table: Table) -> dict[str, NDArray[Any]]:
    found = {}
    for name, column in table.items():
        values = column.numpy()
        if values.ndim == 2:  # texts, padded with zeros
            encoded = np.ascontiguousarray(values).view(f"S{values.shape[1]}")[:, 0]
            values = np.char.decode(encoded, "utf-8")
        found[name] = values
    return found


def _ranked(scores: NDArray[np.float64], k: int, sign: float) -> Ranked:
    keys = np.where(np.isfinite(scores), sign * scores, np.inf)
    k = min(k, int(np.isfinite(scores).sum()))
    best = np.argpartition(keys, k - 1)[:k] if 0 < k < len(keys) else np.arange(len(keys))[:k]
    best = best[np.lexsort((best, keys[best]))][:k]
    return Ranked(best.astype(np.int64), scores[best])
