"""What scores say: of each query, who helped and who harmed."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from gradscope.attribution.scores import Ranked, Scores
from gradscope.stats.records import Json, Plain, Record, number, plain
from gradscope.stats.sections import (
    Column,
    Fact,
    Overview,
    Section,
    Table,
    listed,
    numbers,
    short,
)

_SHOWN = 20  # queries in a text


class Scored(Record):
    """A training sample with its score for a query."""

    index: int
    id: int | str | None = None
    target: Plain
    score: float


class QueryRow(Record):
    """A query with the training samples that matter most to it."""

    index: int
    id: int | str | None = None
    target: Plain
    loss: float | None
    helpful: tuple[Scored, ...]
    harmful: tuple[Scored, ...]


class ScoreSummary(Record):
    """What scores say."""

    schema_: Literal["gradscope.attribute"] = "gradscope.attribute"
    version: Literal[1] = 1
    path: str | None
    queries: int
    samples: int
    left_out: int  # training samples without a score
    record: Json  # what was chosen
    rows: tuple[QueryRow, ...]
    most_influential: tuple[Scored, ...]  # by self-influence
    notes: tuple[str, ...] = ()

    def overview(self) -> Overview:
        """Return what is shown."""
        chosen: Any = self.record.get("checkpoints") or [{}]
        facts: list[Fact] = [
            ("scores", f"{queries(self.queries)} × {self.samples:,} samples"),
            ("curvature", " ".join(f"{k}={_short(v)}" for k, v in chosen[0].items())),
            *_refined(self.record),
            ("unit", str(self.record.get("unit"))),
            *listed("note", self.notes),
        ]
        sections = [
            _section("Helped most (positive: its loss would be higher without)", self, "helpful"),
            _section("Harmed most (negative: its loss would be lower without)", self, "harmful"),
        ]
        if self.most_influential:
            rows = self.most_influential
            columns = [
                Column("sample", [name_of(r) for r in rows]),
                Column("target", [str(r.target) for r in rows]),
                numbers("self-influence", [r.score for r in rows]),
            ]
            sections.append(Section("Most influential on themselves", table=Table(columns)))
        return Overview(
            paths=[self.path] if self.path else [], facts=facts, sections=sections, pictures=()
        )


def _refined(record: Mapping[str, Any]) -> list[Fact]:
    refined = record.get("refined")
    if refined is None:
        return []
    chosen = " ".join(f"{k}={_short(v)}" for k, v in refined["checkpoints"][0].items())
    told = f"the {refined['k']} most helpful and harmful of each query, by full gradients: {chosen}"
    return [("refined", told)]


def summarize_scores(scores: Scores, *, top: int = 3, notes: Sequence[str] = ()) -> ScoreSummary:
    """Return the best and worst `top` training samples of every query."""
    rows = []
    for q in range(scores.shape[0]):
        known = described(scores.queries, q)
        rows.append(
            QueryRow(
                **known,
                loss=number(scores.queries["loss"][q]),
                helpful=_scored(scores, scores.helpful(q, top)),
                harmful=_scored(scores, scores.harmful(q, top)),
            )
        )
    own = scores.samples.get("self_influence")
    best: tuple[Scored, ...] = ()
    if own is not None:
        finite = np.flatnonzero(np.isfinite(own))
        order = finite[np.argsort(-own[finite], kind="stable")][: max(10, top)]
        best = _scored(scores, Ranked(order, own[order]))
    return ScoreSummary(
        path=None if scores.file is None else str(scores.file.path),
        queries=scores.shape[0],
        samples=scores.shape[1],
        left_out=int((~scores.samples["finite"].astype(bool)).sum()),
        record=dict(scores.record),
        rows=tuple(rows),
        most_influential=best,
        notes=tuple(notes),
    )


def queries(n: int) -> str:
    """Return "1 query", "40 queries"."""
    return f"{n:,} {'query' if n == 1 else 'queries'}"


def _scored(scores: Scores, ranked: Ranked) -> tuple[Scored, ...]:
    pairs = zip(ranked.places, ranked.scores, strict=True)
    return tuple(Scored(**described(scores.samples, int(k)), score=float(s)) for k, s in pairs)


def described(table: Any, place: int) -> dict[str, Any]:
    """Return index, id and target of a row of a sample table."""

    def of(name: str) -> Any:
        column: NDArray[Any] | None = table.get(name)
        return None if column is None else plain(column[place])

    return {"index": int(table["index"][place]), "id": of("id"), "target": of("target")}


def _section(title: str, summary: ScoreSummary, which: str) -> Section:
    shown = summary.rows[:_SHOWN]
    cells = [
        ", ".join(f"{name_of(s)} ({short(s.score)})" for s in getattr(r, which)) for r in shown
    ]
    columns = [
        Column("query", [name_of(r) for r in shown]),
        Column("target", [str(r.target) for r in shown], rank=1),
        numbers("loss", [r.loss for r in shown], rank=2),
        Column("training samples (score)", cells, justify="left"),
    ]
    more = len(summary.rows) - len(shown)
    notes = [f"and {queries(more)} more: --json has all"] if more > 0 else []
    return Section(title, table=Table(columns), notes=notes)


class Named(Protocol):
    """A row about a sample."""

    @property
    def index(self) -> int:
        """Its position in the data set."""

    @property
    def id(self) -> int | str | None:
        """Its own name."""


def name_of(row: Named) -> str:
    """Return what a sample is called in a table."""
    return str(row.index if row.id is None else row.id)


def _short(value: Any) -> str:
    return short(value) if isinstance(value, float) else str(value)
