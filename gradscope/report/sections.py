"""A result in sections, each answering one question: the same for a terminal and for a page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from gradscope.report.bars import print_histogram, sparkline
from gradscope.report.layout import Column, facts, heading, names_table, plain_table
from gradscope.stats import Histogram

_SPARK = 40


@dataclass(frozen=True)
class Spark:
    """Numbers shown as a line of small bars where there is no picture."""

    values: Sequence[float | None]


Fact = tuple[str, str | Text | Spark]


@dataclass(frozen=True)
class Table:
    """Columns, the first of which may hold names.

    Attributes:
        columns: Of equal length.
        title: Of the names.
        names: One a row; None where there are none.
    """

    columns: Sequence[Column]
    title: str = ""
    names: Sequence[str] | None = None


@dataclass(frozen=True)
class Section:
    """One question and its answer.

    Attributes:
        title: The question, in short.
        key: Whose formulas explain it.
        facts: Labels with their values.
        pairs: Short titles, each with a value under it.
        histogram: Shown as bars on a terminal.
        table: One row a parameter, class, sample or step.
        notes: Lines that follow.
    """

    title: str
    key: str = ""
    facts: Sequence[Fact] = ()
    pairs: Sequence[tuple[str, str]] = ()
    histogram: Histogram | None = None
    table: Table | None = None
    notes: Sequence[str | Text] = ()


def print_sections(sections: Sequence[Section], console: Console) -> None:
    """Print one section after the other."""
    for section in sections:
        heading(console, section.title)
        if section.facts:
            facts(console, [(label, _shown(value, console)) for label, value in section.facts])
        if section.pairs:
            _print_pairs(section.pairs, console)
        if section.histogram is not None:
            print_histogram(console, section.histogram)
        if section.table is not None:
            print_table(section.table, console)
        for note in section.notes:
            console.print(note if isinstance(note, Text) else Text(note, style="dim"))


def print_table(table: Table, console: Console) -> None:
    """Print a table that fits the width."""
    if table.names is None:
        plain_table(console, table.columns)
    else:
        names_table(console, table.title, table.names, table.columns)


def _print_pairs(pairs: Sequence[tuple[str, str]], console: Console) -> None:
    """Print titles with a value under each, in as many lines as the width needs."""
    cell = max(max(map(len, pair)) for pair in pairs) + 2
    lines = math.ceil(len(pairs) / max(1, (console.width + 2) // cell))
    step = math.ceil(len(pairs) / lines)
    for start in range(0, len(pairs), step):
        part = pairs[start : start + step]
        for texts, style in zip(zip(*part, strict=True), ("dim", ""), strict=True):
            line = "".join(f"{text:>{cell}}" for text in texts)[2:]
            console.print(Text(line, style=style), soft_wrap=True)


def _shown(value: str | Text | Spark, console: Console) -> str | Text:
    if not isinstance(value, Spark):
        return value
    width = min(_SPARK, max(8, console.width - 24))
    return Text(sparkline(value.values, width, console.options.ascii_only), style="cyan")
