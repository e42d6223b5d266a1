"""The parts of a shown result: sections of text, numbers, columns and pictures.

Strings are not escaped here. The renderer escapes every string, because names come from files.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from gradscope import markup
from gradscope.stats.records import Histogram, Interval, Plain

NONE = "-"
WRONG = " (wrong)"  # follows a wrong prediction
POINTS = 4000  # the most samples in a picture
_LEVELS, _ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
BARS = 40  # the most bars of a sparkline
_NAME = 24  # the widest target or sample name, in characters
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


class Styled(NamedTuple):
    """Text with a style, such as "yellow" or "bold red"; without a style it is not dimmed."""

    text: str
    style: str = ""


class Sparkline(NamedTuple):
    """Numbers shown as a line of small bars, one character for each number."""

    values: Sequence[float | None]
    label: str = ""  # shown after the bars

    def bars(self, width: int, ascii_only: bool = False) -> str:
        """Return a bar for each number, scaled from the least to the largest number.

        More than `width` numbers are thinned evenly. An unknown number is a space.
        """
        levels, values = _ASCII_LEVELS if ascii_only else _LEVELS, self.thinned(width)
        known = [value for value in values if value is not None]
        low, high = min(known, default=0.0), max(known, default=0.0)
        step = (high - low) / (len(levels) - 1) or 1.0
        return "".join(" " if v is None else levels[round((v - low) / step)] for v in values)

    def thinned(self, most: int) -> Sequence[float | None]:
        """Return at most `most` of the numbers, evenly spread."""
        values = self.values
        if len(values) > most > 1:
            values = [values[round(k * (len(values) - 1) / (most - 1))] for k in range(most)]
        return values

    @property
    def text(self) -> str:
        """The bars and the label in one line."""
        return f"{self.bars(BARS)}  {self.label}".rstrip()


Line = str | Styled
Fact = tuple[str, Line | Sparkline]  # a label and its value; an empty label continues the one above


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str  # it may break at spaces
    cells: Sequence[Line]  # one for each row
    rank: int = 0  # if the width is short, the highest ranks are hidden first; rank 0 stays
    justify: Literal["left", "right"] = "right"  # numbers are on the right
    # the numbers of the cells, to sort by, unless the cells are words
    values: Sequence[float | None] | None = None
    # longer texts are shortened in the middle to this width; by default they wrap
    widest: int | None = None
    from_data: bool = False  # whether the title comes from the user's data, not from gradscope


@dataclass(frozen=True)
class Table:
    """Columns of equal length; `names`, if given, is the first column, with the header `title`."""

    columns: Sequence[Column]
    title: str = ""
    names: Sequence[str] | None = None
    wraps: bool = False  # columns that do not fit are shown below, instead of hidden


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture with two axes."""

    label: str  # a description for screen readers
    title: str  # printed above
    across: str = ""  # the label of the horizontal axis
    up: str = ""  # the label of the vertical axis
    empty: str = ""  # the text to show if there is nothing to draw
    place: int = 100  # the position among the pictures
    height: float = 3.4  # in inches


@dataclass(frozen=True, kw_only=True)
class BarPicture(Picture):
    """A bar for each name; `mark` is a dashed line, `second` selects the second colour."""

    names: Sequence[str]
    values: Sequence[float | None]
    mark: float | None = None
    second: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "height", max(1.8, 1.0 + 0.2 * len(self.names)))


@dataclass(frozen=True, kw_only=True)
class HistogramPicture(Picture):
    """Counts between edges; `mark` is a value with its name, `split` colours both halves."""

    histogram: Histogram
    mark: tuple[float, str] | None = None
    split: bool = False


@dataclass(frozen=True, kw_only=True)
class ScatterPicture(Picture):
    """Points; `named` are labelled points (x, y, name); `diagonal` draws the line x = y."""

    x: Sequence[float]
    y: Sequence[float]
    named: Sequence[tuple[float, float, str]] = ()
    diagonal: bool = False


@dataclass(frozen=True, kw_only=True)
class CurvePicture(Picture):
    """Curves {name: [(x, y), ...]} with bands {name: [(x, low, high), ...]}.

    An upper end `high` of None means unbounded. A page draws an `interactive` picture in the
    browser.
    """

    curves: Mapping[str, Sequence[tuple[float, float]]]
    bands: Mapping[str, Sequence[tuple[float, float, float | None]]] = field(default_factory=dict)
    interactive: bool = False


@dataclass(frozen=True, kw_only=True)
class MatrixPicture(Picture):
    """Numbers between -1 and 1, as colours."""

    values: Sequence[Sequence[float]]


class Pixels(NamedTuple):
    """The pixels of a picture: uint8, grey (h, w) or red, green and blue (h, w, 3)."""

    values: Any


@dataclass(frozen=True)
class Card:
    """The input of a sample, as a picture or text, and lines about the sample."""

    title: str
    lines: Sequence[str]  # its label, prediction, loss, ...
    content: Pixels | str | None  # the input, if known
    wrong: int | None = None  # the line with a wrong prediction, which marks the card

    def captions(self, mark: str = WRONG) -> list[str]:
        """Return the lines, with a mark after a wrong prediction."""
        return [line + mark * (k == self.wrong) for k, line in enumerate(self.lines)]


@dataclass(frozen=True)
class Section:
    """A question and its answer. Neighbouring sections of the same title are joined."""

    title: str  # the question, in short
    facts: Sequence[Fact] = ()  # labels with their values
    histogram: Histogram | None = None  # shown as bars on a terminal
    table: Table | None = None  # one row for each parameter, class, sample or step
    samples: Sequence[Any] = ()  # the rows of the table, if they are samples
    cards: Sequence[tuple[str, Sequence[Card]]] = ()  # (heading, samples) for each row of cards
    notes: Sequence[Line] = ()  # lines that follow
    # the formulas of the numbers; docs/statistics.md has all formulas, with units
    formulas: Sequence[str] = ()
    instead: bool = False  # whether it is shown only if the result has no cards


@dataclass(frozen=True)
class Brief:
    """The part of a result that fits one screen of a terminal."""

    facts: Sequence[Fact]
    sections: Sequence[Section]
    more: str  # a line on how to see the rest


class Displayable(ABC):
    """A result that can be shown: on a terminal, as a page, in a notebook."""

    @abstractmethod
    def overview(self) -> "Overview":
        """Return the facts, sections and pictures to show."""

    def _repr_html_(self) -> str:
        """Return facts, warnings and sections, in the brief form if known."""
        from gradscope.stats import html

        found = self.overview()
        shown = found.brief or found
        parts = [html.facts(shown.facts), html.warnings(found)]
        for section in html.shown(shown.sections):
            parts.append(f"<p><strong>{markup.safe(section.title)}</strong></p>")
            parts.append(html.section(section, found.noun))
        return markup.document(", ".join(found.paths), *parts)


@dataclass(frozen=True)
class Overview(Displayable):
    """The content to show of a result."""

    paths: Sequence[str]  # the paths of the result files
    facts: Sequence[Fact]  # facts about the files
    sections: Sequence[Section]
    pictures: Sequence[Picture]  # sorted
    warnings: Sequence[str] = ()  # problems of the files
    records: Mapping[str, Any] | None = None  # recorded documents, by title
    brief: Brief | None = None  # the part that a terminal shows by default
    noun: str = "sample"  # the kind of row

    def overview(self) -> "Overview":
        """Return itself."""
        return self


def symbols(noun: str) -> str:
    """Return the meaning of the letters in formulas."""
    return f"gᵢ: gradient of {noun} i's own loss. G = (1/N) Σᵢ gᵢ over the N finite {noun}s."


def plain_lines(table: Table) -> list[str]:
    """Return a table as lines of plain text: titles, then one line for each row."""
    columns = [] if table.names is None else [[table.title, *table.names]]
    columns += [[c.title, *map(text_of, c.cells)] for c in table.columns]
    left = {0} | {k for k, c in enumerate(table.columns) if c.justify == "left"}
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return [
        "  ".join(
            f"{cell:{'<' if k in left else '>'}{width}}"
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def text_of(line: Line | Sparkline) -> str:
    """Return a line without its style."""
    return line if isinstance(line, str) else line.text


def bins(histogram: Histogram) -> list[tuple[str, int]]:
    """Return the edges and the count of each bin."""
    edges = zip(histogram.edges, histogram.edges[1:], strict=False)
    names = [f"{short(low)} to {short(high)}" for low, high in edges]
    zeros = [("zero", histogram.zeros)] if histogram.zeros else []
    return [*zeros, *zip(names, histogram.counts, strict=True)]


def join_sections(sections: Iterable[Section]) -> list[Section]:
    """Return the sections; neighbours with the same title are joined."""
    found: list[Section] = []
    for new in sections:
        if found and found[-1].title == new.title:
            old = found.pop()
            new = replace(
                old,
                facts=[*old.facts, *new.facts],
                notes=[*old.notes, *new.notes],
                formulas=[*old.formulas, *new.formulas],
            )
        found.append(new)
    return found


def facts_under(label: str, values: Sequence[Line]) -> list[Fact]:
    """Return several values under one label."""
    return [(label if not k else "", value) for k, value in enumerate(values)]


def short(value: float | None) -> str:
    """Return a number with three significant digits."""
    if value is None:
        return NONE
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if 1e-3 <= abs(value) < 999.5:
        return f"{value:#.3g}".rstrip(".")
    if 999.5 <= abs(value) < 99999.5:
        return f"{value:.0f}"
    return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def value_text(value: Plain) -> str:
    """Return a target or a prediction: classes and texts unchanged, floats by `short`."""
    return short(value) if value is None or isinstance(value, float) else str(value)


def percent(share: float | None) -> str:
    """Return a share of one as a percentage."""
    if share is None:
        return NONE
    return "<0.1%" if 0 < share < 0.0005 else f"{100 * share:.1f}%"


def index_and_name(index: int, own: int | str | None) -> str:
    """Return the index of a sample, without separators, and its id if it has one."""
    return str(index) if own is None else f"{index} ({own})"


def shape_text(dimensions: Sequence[int]) -> str:
    """Return "64x3x7x7", or "scalar"."""
    return "x".join(map(str, dimensions)) or "scalar"


def size(n: int | None) -> str:
    """Return a number of bytes, in powers of 1000."""
    if n is None:
        return NONE
    power, value = 0, float(n)
    while value >= 999.5 and power < len(_UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_UNITS[power]}"


def duration(seconds: float | None) -> str:
    """Return "12.3 ms", "4.56 s", "2 min 03 s", "1 h 05 min"."""
    if seconds is None:
        return NONE
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def interval_text(interval: Interval | None) -> str:
    """Return "1.2 to 3.4", "1.2 or more"."""
    if interval is None:
        return NONE
    high = "or more" if interval.high is None else f"to {short(interval.high)}"
    return f"{short(interval.low)} {high}"


def numbers(
    title: str,
    values: Sequence[float | None],
    rank: int = 0,
    show: Callable[[float | None], str] = short,
) -> Column:
    """Return a column of numbers, shown by `show`."""
    return Column(title, [show(value) for value in values], rank, values=values)


def count_column(title: str, values: Sequence[int], rank: int = 0) -> Column:
    """Return a column of whole numbers."""
    return numbers(title, values, rank, "{:,}".format)


def index_columns(rows: Sequence[Any]) -> list[Column]:
    """Return the columns of the rows' `index`, without separators, and `id` where known."""
    columns = [numbers("index", [row.index for row in rows], show=str)]
    if any(row.id is not None for row in rows):
        cells = [NONE if row.id is None else str(row.id) for row in rows]
        columns.append(Column("id", cells, rank=1, justify="left", widest=_NAME))
    return columns


def target_columns(rows: Sequence[Any]) -> list[Column]:
    """Return the columns of the rows' `target` and `prediction`, each if it is known."""
    return [*_value_column(rows, "target"), *_value_column(rows, "prediction")]


def _value_column(rows: Sequence[Any], name: str) -> list[Column]:
    """Return a column of words or numbers; an empty list if all values are unknown."""
    found = [getattr(row, name, None) for row in rows]
    if not any(value is not None for value in found):
        return []
    cells = [value_text(value) for value in found]
    known = [t if isinstance(t, int | float) else None for t in found]
    values = known if any(value is not None for value in known) else None
    return [Column(name, cells, rank=2, values=values, widest=_NAME)]
