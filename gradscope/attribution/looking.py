"""Scores with the samples that they are about, as they are: pictures, texts, rows of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradscope.attribution.scores import Scores
from gradscope.attribution.summary import INFLUENCE, QueryRow, Scored, ScoreSummary, queries
from gradscope.sources.opened import Opened
from gradscope.stats.looking import Album, label, name_of
from gradscope.stats.sections import Card, Column, Overview, Section, Shown, Table, short

QUERIES = 40  # on a page
_SIDES = {"query": "queries", "train": "training samples"}

Groups = Sequence[tuple[str, str, Sequence[QueryRow | Scored]]]  # heading, side, samples


@dataclass(frozen=True)
class Looked(Shown):
    """A summary of scores with its samples, each of them opened."""

    summary: ScoreSummary
    album: Album

    def overview(self) -> Overview:
        """Return what is shown: each query with its most helpful and harmful samples."""
        plain = self.summary.overview()
        shown = self.summary.rows[:QUERIES] if self.album.contents else ()
        kept = [s for s in plain.sections if not (shown and s.title == INFLUENCE)]
        missing = [
            (f"{_SIDES[side]} not shown", opened.why)
            for side, opened in self.album.sides.items()
            if opened.why
        ]
        more = len(self.summary.rows) - len(shown)
        if shown and more:
            missing.append(("not shown", f"{queries(more)} more: --json has all"))
        sections = [self._section(row) for row in shown]
        facts, pictures = [*plain.facts, *missing], () if shown else plain.pictures
        return replace(plain, facts=facts, sections=[*sections, *kept], pictures=pictures)

    def _section(self, row: QueryRow) -> Section:
        groups: Groups = [
            ("The query", "query", [row]),
            ("Helped most: its loss would be higher without", "train", row.helpful),
            ("Harmed most: its loss would be lower without", "train", row.harmful),
        ]
        every = (self.album.contents.get((side, r.index)) for side, r in self._named(groups))
        found = [content for content in every if content is not None]
        title = f"Query {name_of(row)}"
        if found and all(isinstance(c, dict) for c in found):
            return Section(title, table=self._table(groups))
        cards = [
            (name, [self._card(side, sample) for sample in samples])
            for name, side, samples in groups
            if samples
        ]
        return Section(title, cards=cards)

    @staticmethod
    def _named(groups: Groups) -> list[tuple[str, QueryRow | Scored]]:
        return [(side, sample) for _, side, samples in groups for sample in samples]

    def _card(self, side: str, sample: QueryRow | Scored) -> Card:
        """Return a sample with its label, the model's prediction, and its loss or score."""
        lines = []
        if isinstance(sample, Scored):
            lines.append(f"score {short(sample.score)}")
        elif sample.loss is not None:
            lines.append(f"loss {short(sample.loss)}")
        return self.album.card(side, sample, lines, "query" if side == "query" else "sample")

    def _table(self, groups: Groups) -> Table:
        """Return a row a sample, a column an entry."""
        rows, sides = self._named(groups), self.album.sides
        roles = [name.partition(" most")[0] for name, _, samples in groups for _ in samples]
        found = [self.album.contents.get((side, r.index)) for side, r in rows]
        entries = dict.fromkeys(k for c in found if isinstance(c, dict) for k in c)
        scores = [r.score if isinstance(r, Scored) else None for _, r in rows]
        columns = [
            Column("sample", [name_of(r) for _, r in rows]),
            Column("target", [label(sides[side], r.target) for side, r in rows]),
            Column("predicted", [label(sides[side], r.prediction) for side, r in rows]),
            Column("score", [short(s) for s in scores], values=scores),
        ]
        for entry in entries:
            values = [c.get(entry) if isinstance(c, dict) else None for c in found]
            columns.append(Column(entry, [short(v) for v in values], values=values))
        return Table(columns, "", roles)


def looked(summary: ScoreSummary, scores: Scores) -> Looked:
    """Open the samples of a summary's first queries, and of who helped and harmed them."""
    sides = {side: Opened.of(scores.record.get(side) or {}) for side in _SIDES}
    rows = summary.rows[:QUERIES]
    train = dict.fromkeys(s.index for row in rows for s in (*row.helpful, *row.harmful))
    return Looked(summary, Album(sides, {"query": [row.index for row in rows], "train": [*train]}))
