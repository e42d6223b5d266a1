"""Tables that fit the width there is, and use more of it when there is more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradscope.report.text import fit_names, short, visible

_GAP = 2
_NARROW = 40
_NARROWEST_NAME = 16
_NAME_SHARE = 0.4  # of the width, before numbers are hidden for long names


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: It may break at spaces.
        cells: One a row, already safe to show.
        rank: 0 always stays; the others are hidden highest first when the width is short.
        justify: Numbers go right.
        values: The numbers behind the cells, to sort by; None where they are words.
    """

    title: str
    cells: Sequence[str | Text]
    rank: int = 0
    justify: Literal["left", "right"] = "right"
    values: Sequence[float | None] | None = None

    @property
    def width(self) -> int:
        """The cells it needs."""
        texts = [c.plain if isinstance(c, Text) else c for c in self.cells]
        return max(map(cell_len, [*self.title.split(), *texts]), default=1)


def numbers(
    title: str,
    values: Sequence[float | None],
    rank: int = 0,
    show: Callable[[float | None], str] = short,
) -> Column:
    """Return a column of numbers, shown by `show`."""
    return Column(title, [show(value) for value in values], rank, values=values)


def whole(title: str, values: Sequence[int], rank: int = 0) -> Column:
    """Return a column of whole numbers."""
    return Column(title, [f"{value:,}" for value in values], rank, values=values)


def heading(console: Console, title: str) -> None:
    """Print an empty line and a title."""
    console.print()
    console.print(Text(title, style="bold"))


def facts(console: Console, rows: Sequence[tuple[str, str | Text]]) -> None:
    """Print labels with their values, which wrap; strings are made visible."""
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(no_wrap=console.width >= _NARROW, overflow="fold", style="dim")
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(Text(label), value if isinstance(value, Text) else Text(visible(value)))
    console.print(grid)


def names_table(
    console: Console, title: str, names: Sequence[str], columns: Sequence[Column]
) -> None:
    """Print a table whose first column holds names, none cut so that two look alike.

    Args:
        console: Where to.
        title: Of the first column.
        names: One a row.
        columns: The others.
    """
    shown = [visible(name) for name in names]
    wanted = max(map(cell_len, [title, *shown]))
    room = max(_NARROWEST_NAME, int(_NAME_SHARE * console.width))
    kept = _fitting(columns, console.width - min(wanted, room))
    left = console.width - sum(c.width + _GAP for c in kept)
    width = max(1, min(wanted, left))
    first = Column(title, fit_names(names, width), justify="left")
    _print(console, [first, *kept], [width, *(c.width for c in kept)])
    _tell_hidden(console, columns, kept)


def plain_table(console: Console, columns: Sequence[Column]) -> None:
    """Print a table of columns that need no cutting."""
    kept = _fitting(columns, console.width + _GAP)
    _print(console, kept, [c.width for c in kept])
    _tell_hidden(console, columns, kept)


def _fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Hide columns of the highest rank until the rest fits, each with its gap."""
    kept = list(columns)
    while sum(c.width + _GAP for c in kept) > width:
        last = max(kept, key=lambda c: c.rank, default=None)
        if last is None or last.rank == 0:
            break
        kept.remove(last)
    return kept


def _print(console: Console, columns: Sequence[Column], widths: Sequence[int]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        table.add_column(Text(column.title), justify=column.justify, width=width, overflow="fold")
    for cells in zip(*(c.cells for c in columns), strict=True):
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
    console.print(table)


def _tell_hidden(console: Console, columns: Sequence[Column], kept: Sequence[Column]) -> None:
    hidden = [c.title for c in columns if c not in kept]
    if hidden:
        console.print(Text(f"(hidden for want of width: {', '.join(hidden)})", style="dim"))
