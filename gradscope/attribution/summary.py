"""Summaries of scores: the training samples that helped and harmed each query most."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradscope.attribution.scores import Ranked, Scores
from gradscope.sources.opened import ShownData
from gradscope.stats.album import Album, is_wrong, sample_name, target_text
from gradscope.stats.records import Json, Plain, Record, SampleRecord, number, plain
from gradscope.stats.sections import (
    BarPicture,
    Card,
    Column,
    Displayable,
    Fact,
    Overview,
    Picture,
    Section,
    Table,
    facts_under,
    numbers,
    short,
    target_columns,
    value_text,
)
from gradscope.stats.source import token_names

HELPED = "Helped most: without them, the query's loss would be higher"
HARMED = "Harmed most: without them, the query's loss would be lower"
_SHOWN, _DRAWN = 10, 6  # the number of queries in tables and in pictures
_GROUPS = 20  # the most classes by which scores are summed by default


class Scored(SampleRecord):
    """A training sample with its score for a query."""

    prediction: Plain = None
    score: float


class QueryRow(SampleRecord):
    """A query with the training samples that matter most to it."""

    prediction: Plain = None
    loss: float | None
    helpful: tuple[Scored, ...]
    harmful: tuple[Scored, ...]
    sums: tuple[float, ...] = ()  # the sum of its scores over the samples of each group


class ScoreSummary(Record, Displayable):
    """A summary of scores: the best and the worst training samples of each query."""

    schema_: Literal["gradscope.attribute"] = "gradscope.attribute"
    version: Literal[1] = 1
    path: str | None
    queries: int
    samples: int
    left_out: int  # training samples without a score
    record: Json  # curvature, damping and sources
    rows: tuple[QueryRow, ...]
    most_influential: tuple[Scored, ...]  # by self-influence
    by: str | None = None  # the column of the training samples that makes the groups
    groups: tuple[Plain, ...] = ()  # its values
    notes: tuple[str, ...] = ()

    @property
    def noun(self) -> str:
        """The kind of row that has a score: "sample" or "token"."""
        train: Any = self.record.get("train") or {}
        return str(train.get("rows", "sample"))

    @property
    def ordered(self) -> tuple[QueryRow, ...]:
        """The queries in the order shown: predicted wrongly first, then by falling loss.

        Without predicted classes they keep their order.
        """
        if not self._predicts_classes:
            return self.rows
        return tuple(sorted(self.rows, key=lambda r: (not is_wrong(r), -(r.loss or 0.0))))

    @property
    def _predicts_classes(self) -> bool:
        return any(isinstance(r.prediction, int) and isinstance(r.target, int) for r in self.rows)

    def _order(self) -> list[Fact]:
        """Return a sentence about the order of the queries, if it differs from the data's order."""
        if not self._predicts_classes or len(self.rows) < 2:
            return []
        wrong = sum(map(is_wrong, self.rows))
        first = f"{wrong:,} of {queries(len(self.rows))} {'is' if wrong == 1 else 'are'} predicted "
        text = "wrongly and shown first. Larger losses come before smaller ones."
        return [("order", first + text if wrong else "Queries with larger losses come first.")]

    def overview(self) -> Overview:
        """Return the facts, tables and pictures to show."""
        chosen: Any = self.record.get("checkpoints") or [{}]
        noun = self.noun
        facts: list[Fact] = [
            ("scores", f"{queries(self.queries)} × {self.samples:,} {noun}s"),
            ("curvature", _curvature(chosen)),
            *_refined(self.record),
            *_truncated(self.record),
            ("unit", str(self.record.get("unit"))),
            *query_loss(self.record),
            *self._order(),
            *facts_under("note", self.notes),
        ]
        sections = [_influence(self)]
        if self.groups:
            sections.append(_sums(self))
        if self.most_influential:
            rows = self.most_influential
            columns = [
                Column(noun, [sample_name(r) for r in rows]),
                *target_columns(rows),
                numbers("self-influence", [r.score for r in rows]),
            ]
            title = f"Training {noun}s with the largest self-influence"
            sections.append(Section(title, table=Table(columns)))
        return Overview(
            paths=[self.path] if self.path else [],
            facts=facts,
            sections=sections,
            pictures=[_picture(row, noun) for row in self.ordered[:_DRAWN]],
            noun=noun,
        )


def query_loss(record: Mapping[str, Any]) -> list[Fact]:
    """Return a sentence about the loss of the queries, if it differs from the training loss."""
    query, train = ((record.get(side) or {}).get("loss") for side in ("query", "train"))
    if not isinstance(query, dict) or not isinstance(train, dict) or query == train:
        return []

    def text(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
        name = str(own.get("name")).rpartition("/")[2]  # FILE.py:LOSS without folders
        if own.get("name") != other.get("name"):
            return name
        return " ".join([name, *(f"{k}={v}" for k, v in own.items() if v != other.get(k))])

    return [("query loss", f"{text(query, train)}, not the training loss {text(train, query)}")]


def _refined(record: Mapping[str, Any]) -> list[Fact]:
    refined = record.get("refined")
    if refined is None:
        return []
    which = f"the {refined['k']} most helpful and the {refined['k']} most harmful of each query"
    return [("refined", f"{which}, with full gradients: {_curvature(refined['checkpoints'])}")]


def _truncated(record: Mapping[str, Any]) -> list[Fact]:
    found = record.get("truncation")
    if found is None:
        return []
    median, most = (_short(found[k]) for k in ("median", "max"))
    return [("query rank", f"drops {median} (median) to {most} (most) of a query's norm")]


def _curvature(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    """Return the settings at the first checkpoint: "shrunk, damping 0.1, ..."."""
    chosen = dict(checkpoints[0])
    if chosen.get("weight") == 1:
        del chosen["weight"]
    name = chosen.pop("curvature", "")
    return ", ".join([str(name), *(f"{k} {_short(v)}" for k, v in chosen.items())])


def summarize_scores(
    scores: Scores, *, top: int = 3, by: str | None = None, notes: Sequence[str] = ()
) -> ScoreSummary:
    """Return the best and worst `top` training samples of every query.

    Args:
        scores: The scores of queries with training samples.
        top: The number of best and of worst samples.
        by: A column of the training samples. A query's scores are summed for each of its values.
            The default is `target` if it has few values.
        notes: Further lines to show.

    Raises:
        SpecError: There is no such column.
    """
    by, groups, sums = _grouped(scores, by)
    rows = tuple(
        QueryRow(
            **_predicted(scores.queries, q),
            loss=number(scores.queries["loss"][q]),
            helpful=_scored(scores, scores.helpful(q, top)),
            harmful=_scored(scores, scores.harmful(q, top)),
            sums=tuple(sums[q].tolist()),
        )
        for q in range(scores.shape[0])
    )
    record = dict(scores.record)
    if "truncation" in scores.queries:
        dropped = np.asarray(scores.queries["truncation"], dtype=np.float64)
        if (known := dropped[np.isfinite(dropped)]).size:
            record["truncation"] = {"median": float(np.median(known)), "max": float(known.max())}
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
        record=record,
        rows=rows,
        most_influential=best,
        by=by,
        groups=groups,
        notes=tuple(notes),
    )


def queries(n: int) -> str:
    """Return "1 query", "40 queries"."""
    return f"{n:,} {'query' if n == 1 else 'queries'}"


def _scored(scores: Scores, ranked: Ranked) -> tuple[Scored, ...]:
    pairs = zip(ranked.places, ranked.scores, strict=True)
    return tuple(Scored(**_predicted(scores.samples, int(k)), score=float(s)) for k, s in pairs)


def _grouped(
    scores: Scores, by: str | None
) -> tuple[str | None, tuple[Plain, ...], NDArray[np.float64]]:
    """Return the column, its values (c,) and each query's sums (M, c).

    Without a column there are no groups.
    """
    known = scores.samples.get("target")
    if by is None and known is not None and known.dtype.kind in "iub":
        by = "target" if len(np.unique(known)) <= _GROUPS else None
    if by is None:
        return None, (), np.zeros((scores.shape[0], 0))
    found, sums = scores.sums(by)
    return by, tuple(map(plain, found)), sums


def _predicted(table: Any, place: int) -> dict[str, Any]:
    column = table.get("prediction")
    known = None if column is None else plain(column[place])
    return {**described(table, place), "prediction": known}


def described(table: Any, place: int) -> dict[str, Any]:
    """Return index, id and target of a row of a sample table; a token's id is SAMPLE:POSITION."""
    row = {k: table[k][place] for k in ("id", "target", "sample", "position") if k in table}
    if "position" in row:
        row["id"] = token_names(row)[0]
    own, target = (plain(row[k]) if k in row else None for k in ("id", "target"))
    return {"index": int(table["index"][place]), "id": own, "target": target}


def _influence(summary: ScoreSummary) -> Section:
    """Return a row for each of the most helpful and harmful samples of the first queries."""
    shown = summary.ordered[:_SHOWN]
    pairs = [
        (row, k, helpful, harmful)
        for row in shown
        for k, (helpful, harmful) in enumerate(zip_longest(row.helpful, row.harmful))
    ]

    def once(cell: Callable[[QueryRow], str]) -> list[str]:  # in the first row of a query
        return ["" if k else cell(row) for row, k, _, _ in pairs]

    def known(name: str, rank: int) -> list[Column]:
        if all(getattr(row, name) is None for row in shown):
            return []
        return [Column(name, once(lambda row: value_text(getattr(row, name))), rank=rank)]

    columns = [
        Column("query", once(sample_name)),
        *known("target", 1),
        *known("prediction", 2),
        Column("loss", once(lambda row: short(row.loss)), rank=3),
        Column("helped most", [_cell(helpful) for _, _, helpful, _ in pairs]),
        Column("harmed most", [_cell(harmful) for _, _, _, harmful in pairs]),
    ]
    more = len(summary.rows) - len(shown)
    labelled = any(s.target is not None for row in shown for s in (*row.helpful, *row.harmful))
    parts = "its target in parentheses, its score" if labelled else "its score"
    notes = [f"Each cell: a training {summary.noun}, {parts}."]
    if more > 0:
        notes.append(f"{queries(more)} not shown; --json lists all.")
    title = f"Training {summary.noun}s that helped and harmed each query"
    return Section(title, table=Table(columns), notes=notes, instead=True)


def _picture(row: QueryRow, noun: str) -> Picture:
    """Return the largest and smallest scores of a query, one bar per training sample."""
    bars = [*row.helpful, *reversed(row.harmful)]
    return BarPicture(
        label=f"Training {noun}s that helped and harmed query {sample_name(row)} most",
        title=f"Query {sample_name(row)}",
        across="score",
        empty="" if bars else f"no {noun} has a score",
        names=[sample_name(bar) for bar in bars],
        values=[bar.score for bar in bars],
    )


def _cell(row: Scored | None) -> str:
    if row is None:
        return ""
    target = "" if row.target is None else f" ({value_text(row.target)})"
    return f"{sample_name(row)}{target}  {short(row.score)}"


def _sums(summary: ScoreSummary) -> Section:
    """Return a row a query, a column a group."""
    shown = summary.ordered[:_SHOWN]
    columns = [
        replace(numbers(str(group), [r.sums[k] for r in shown], rank=1 + k), from_data=True)
        for k, group in enumerate(summary.groups)
    ]
    names = [sample_name(r) for r in shown]
    table = Table(columns, "query", names, wraps=len(columns) <= _GROUPS)
    return Section(f"Sums of scores by {summary.by}", table=table)


def _short(value: Any) -> str:
    if isinstance(value, dict):  # a number for each layer: the smallest and the largest
        known = sorted(v for v in value.values() if isinstance(v, float))
        ends = [known[0], known[-1]] if len(known) > 1 else known
        return " to ".join(map(short, ends)) or str(value)
    return short(value) if isinstance(value, float) else str(value)


QUERIES = 40  # on a page

Groups = Sequence[tuple[str, str, Sequence[QueryRow | Scored]]]  # heading, data set, samples


def with_samples(summary: ScoreSummary, scores: Scores) -> Overview:
    """Return the overview together with the inputs of the first queries and their samples."""
    tables = {"query": scores.queries, "train": scores.samples}
    datasets = {name: ShownData.of(scores.record.get(name) or {}, tables[name]) for name in tables}
    rows = summary.ordered[:QUERIES]
    train = dict.fromkeys(s.index for row in rows for s in (*row.helpful, *row.harmful))
    album = Album(datasets, {"query": [row.index for row in rows], "train": [*train]})
    plain, shown = summary.overview(), rows if album.contents else ()
    opened = [_query_section(row, album) for row in shown]
    tables_alone = bool(opened) and not any(section.cards for section in opened)
    kept = [section for section in plain.sections if not (tables_alone and section.instead)]
    words = {"query": "queries", "train": f"training {plain.noun}s"}
    missing = [(f"{words[k]} not shown", own.why) for k, own in datasets.items() if own.why]
    more = len(summary.rows) - len(shown)
    if shown and more:
        missing.append(("not shown", f"{queries(more)}; --json lists all"))
    return replace(
        plain,
        facts=[*plain.facts, *missing],
        sections=[*opened, *kept],
        pictures=() if shown else plain.pictures,
    )


def _query_section(row: QueryRow, album: Album) -> Section:
    """Return a query with its samples: on cards, or in a table if they are rows of numbers."""
    groups: Groups = [
        ("The query", "query", [row]),
        (HELPED, "train", row.helpful),
        (HARMED, "train", row.harmful),
    ]
    every = [(name, sample) for _, name, samples in groups for sample in samples]
    contents = [album.contents.get((name, sample.index)) for name, sample in every]
    title, found = f"Query {sample_name(row)}", [c for c in contents if c is not None]
    if not found or not all(isinstance(c, dict) for c in found):
        cards = ((heading, [_card(album, k, s) for s in some]) for heading, k, some in groups)
        return Section(title, cards=[(heading, some) for heading, some in cards if some])
    columns = [Column("sample", [sample_name(s) for _, s in every])]
    for heading, key in (("target", "target"), ("predicted", "prediction")):
        known = [(album.datasets[name], getattr(s, key)) for name, s in every]
        if any(value is not None for _, value in known):
            columns.append(Column(heading, [target_text(*pair) for pair in known]))
    scores = [sample.score if isinstance(sample, Scored) else None for _, sample in every]
    columns.append(numbers("score", scores))
    for entry in dict.fromkeys(k for c in found if isinstance(c, dict) for k in c):
        values = [c.get(entry) if isinstance(c, dict) else None for c in contents]
        columns.append(replace(numbers(entry, values), from_data=True))
    roles = [name.partition(" most")[0] for name, _, samples in groups for _ in samples]
    return Section(title, table=Table(columns, "", roles))


def _card(album: Album, dataset: str, sample: QueryRow | Scored) -> Card:
    """Return a sample with its label, the model's prediction, and its loss or score."""
    lines = []
    if isinstance(sample, Scored):
        lines.append(f"score {short(sample.score)}")
    elif sample.loss is not None:
        lines.append(f"loss {short(sample.loss)}")
    return album.card(dataset, sample, lines, "query" if dataset == "query" else "sample")
