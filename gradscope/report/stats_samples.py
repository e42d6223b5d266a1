"""Sections about samples: those that stand out, and those that are alike."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from gradscope.report.layout import Column, numbers
from gradscope.report.sections import Section, Table
from gradscope.report.text import NONE, count, fit_names, short, visible
from gradscope.stats import SampleRow, Summary
from gradscope.stats.alike import Pair
from gradscope.stats.difference import Moved

_WIDEST_TARGET = 24
_MOST_PAIRS = 10


def samples(summary: Summary) -> list[Section]:
    """List the largest losses, the most opposed, and last the largest norms."""
    lists = [
        ("Samples with the largest losses", summary.largest_losses),
        ("Samples most opposed to the mean gradient", summary.most_opposed or ()),
        ("Samples with the largest gradients", summary.samples),
    ]
    return [Section(title, "samples", table=sample_table(rows)) for title, rows in lists if rows]


def alike(summary: Summary) -> list[Section]:
    """List duplicates, where there are any."""
    found = summary.duplicates
    if found is None or not (found.same or found.near):
        return []
    by_norms = found.source == "norms"
    what = "with equal norms and losses" if by_norms else "of equal gradients"
    notes = _pairs(f"{count(len(found.same), 'pair')} {what}", found.same)
    if found.near:
        notes += _pairs(f"{count(len(found.near), 'pair')} nearly so", found.near)
    if not found.complete:
        notes.append(Text("There may be more: not all pairs were compared.", style="dim"))
    return [Section("Duplicates", "duplicates", notes=notes)]


def neighbours(summary: Summary) -> list[Section]:
    """List the neighbours of one sample, if asked for."""
    near = summary.nearest
    if near is None:
        return []
    about = "" if near.exact else f", approximately, from {near.source}"
    return [
        Section(
            f"{word} aligned with sample {near.index}{about}", "nearest", table=sample_table(rows)
        )
        for word, rows in (("Most", near.aligned), ("Least", near.opposed))
        if rows
    ]


def _pairs(title: str, pairs: Sequence[Pair]) -> list[str | Text]:
    lines: list[str | Text] = [Text(title)]
    for pair in pairs[:_MOST_PAIRS]:
        apart = "" if pair.distance is None else f", {short(pair.distance)} apart"
        first, second = (_named(*of) for of in _ends(pair))
        line = Text(f"  {first} and {second}{apart}")
        if pair.same_target is False:
            line.append(", different targets", style="bold yellow")
        lines.append(line)
    if len(pairs) > _MOST_PAIRS:
        lines.append(Text(f"  and {len(pairs) - _MOST_PAIRS:,} more (--json has all)"))
    return lines


def _ends(pair: Pair) -> tuple[tuple[int, int | str | None], tuple[int, int | str | None]]:
    return (pair.first, pair.first_id), (pair.second, pair.second_id)


def _named(index: int, name: int | str | None) -> str:
    return str(index) if name is None else f"{index} ({visible(str(name))})"


def sample_table(rows: Sequence[SampleRow]) -> Table:
    """Return a row a sample."""
    columns = [
        *index_columns(rows),
        numbers("norm", [r.norm for r in rows]),
        numbers("times median", [r.times_median for r in rows], rank=1),
        numbers("loss", [r.loss for r in rows]),
    ]
    if any(r.cosine is not None for r in rows):
        columns.append(numbers("cosine", [r.cosine for r in rows], rank=3))
    if any(r.target is not None for r in rows):
        columns.append(target_column([r.target for r in rows]))
    return Table(columns)


def index_columns(rows: Sequence[SampleRow] | Sequence[Moved]) -> list[Column]:
    """Return positions in a data set, which can be copied as they are, and own names."""
    index = [row.index for row in rows]
    columns = [Column("index", [str(k) for k in index], values=index)]
    names = [row.id for row in rows]
    if any(name is not None for name in names):
        cells = fit_names([NONE if name is None else str(name) for name in names], _WIDEST_TARGET)
        columns.append(Column("id", cells, rank=1, justify="left"))
    return columns


def target_column(targets: Sequence[Any]) -> Column:
    """Return targets as text, numbers among them to sort by."""
    cells = fit_names([_target(t) for t in targets], _WIDEST_TARGET)
    known = any(isinstance(t, int | float) for t in targets)
    values = [t if isinstance(t, int | float) else None for t in targets] if known else None
    return Column("target", cells, rank=2, values=values)


def _target(value: Any) -> str:
    if value is None:
        return short(None)
    return short(value) if isinstance(value, float) else str(value)
