"""Results on a terminal: tables that fit its width, and bars of text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.table import Table as Grid
from rich.text import Text

from gradscope.core.texts import visible
from gradscope.report.console import fit_names
from gradscope.stats.records import Histogram
from gradscope.stats.sections import (
    BARS,
    Card,
    Column,
    Displayable,
    Fact,
    Line,
    Pixels,
    Section,
    Sparkline,
    Table,
    bins,
)

_GAP = 2
_NARROW = 40
_NARROWEST_NAME = 16
_NAME_SHARE = 0.4  # names may take this share of the width before numbers are hidden
_WIDEST_BAR = 100
_EIGHTHS = " ▏▎▍▌▋▊▉"
_CARD = 14  # the width of a sample's picture and captions, in characters
_LINES = 3  # the most lines of a sample's text
_HALVES, _HALF = " ▄▀█", 127


def render(result: Displayable, console: Console, full: bool = True) -> None:
    """Print the facts, warnings and sections of a result.

    Without `full`, print the brief form, which fits one screen, if the result has it.
    """
    found = result.overview()
    brief = None if full else found.brief
    if len(found.paths) == 1:
        console.print(Text(visible(found.paths[0]), style="bold"), overflow="fold")
    print_facts(console, brief.facts if brief else found.facts)
    for line in found.warnings:
        console.print()
        console.print(Text(visible(line), style="bold red"))
    sections = brief.sections if brief else found.sections
    seen = any(printable(console, cards) for section in sections for _, cards in section.cards)
    for section in sections:
        if not (seen and section.instead):
            _print_section(section, console, brief=brief is not None)
    if brief is not None:
        console.print()
        console.print(Text(visible(brief.more), style="dim"), overflow="fold")


def safe(line: Line) -> Text:
    """Return a line as text, with its unprintable characters made visible."""
    return Text(visible(line)) if isinstance(line, str) else Text(visible(line.text), line.style)


def heading(console: Console, title: str) -> None:
    """Print an empty line and a title."""
    console.print()
    console.print(Text(visible(title), style="bold"))


def print_facts(console: Console, rows: Sequence[Fact]) -> None:
    """Print labels with their values, which wrap."""
    grid = Grid.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(no_wrap=console.width >= _NARROW, overflow="fold", style="dim")
    grid.add_column(overflow="fold")
    for label, value in rows:
        if isinstance(value, Sparkline):
            width = min(BARS, max(8, console.width - 24))
            line = value.bars(width, console.options.ascii_only)
            after = f"  {visible(value.label)}" if value.label else ""
            grid.add_row(safe(label), Text.assemble((line, "cyan"), after))
        else:
            grid.add_row(safe(label), safe(value))
    console.print(grid)


def print_table(console: Console, table: Table) -> None:
    """Print a table. Columns that do not fit are hidden; shortened names stay distinct."""
    columns = [_SafeColumn.of(column) for column in table.columns]
    if table.names is None:
        kept = _fitting(columns, console.width + _GAP)
        _print(console, kept)
    else:
        wanted = max(map(cell_len, [table.title, *map(visible, table.names)]))
        room = max(_NARROWEST_NAME, int(_NAME_SHARE * console.width))
        kept = _fitting(columns, console.width - min(wanted, room))
        left = console.width - sum(c.width + _GAP for c in kept)
        width = max(1, min(wanted, left))
        names = [Text(name) for name in fit_names(table.names, width)]
        _print(console, [_SafeColumn(table.title, names, 0, "left", width), *kept])
        rest = [c for c, safe in zip(table.columns, columns, strict=True) if safe not in kept]
        if table.wraps and kept and rest:
            console.print()
            print_table(console, replace(table, columns=rest))
            return
    hidden = [c.title for c in columns if c not in kept]
    if hidden:
        text = f"(hidden, terminal too narrow: {', '.join(hidden)})"
        console.print(Text(text, style="dim"))


@dataclass(frozen=True, eq=False)
class _SafeColumn:
    """A column whose texts are safe to show, with its width in characters."""

    title: str
    cells: Sequence[Text]
    rank: int
    justify: Literal["left", "right"]
    width: int

    @classmethod
    def of(cls, column: Column) -> "_SafeColumn":
        found: Sequence[Line] = column.cells
        if column.widest is not None:
            found = fit_names([str(cell) for cell in found], column.widest)
        title, cells = visible(column.title), [safe(cell) for cell in found]
        width = max(map(cell_len, [*title.split(), *(cell.plain for cell in cells)]), default=1)
        return cls(title, cells, column.rank, column.justify, width)


def _fitting(columns: Sequence[_SafeColumn], width: int) -> list[_SafeColumn]:
    """Return the columns that fit, without the columns of the highest ranks."""
    kept = list(columns)
    while sum(c.width + _GAP for c in kept) > width:
        last = max(kept, key=lambda c: c.rank, default=None)
        if last is None or last.rank == 0:
            break
        kept.remove(last)
    return kept


def _print(console: Console, columns: Sequence[_SafeColumn]) -> None:
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for c in columns:
        grid.add_column(Text(c.title), justify=c.justify, width=c.width, overflow="fold")
    for cells in zip(*(c.cells for c in columns), strict=True):
        grid.add_row(*cells)
    console.print(grid)


def _print_section(section: Section, console: Console, brief: bool = False) -> None:
    cards = [(above, some) for above, some in section.cards if printable(console, some)]
    if section.cards and not (cards or section.facts or section.table or section.notes):
        return  # a heading without content
    heading(console, section.title)
    if section.facts:
        print_facts(console, section.facts)
    if section.histogram is not None:
        _print_histogram(section.histogram, console)
    for above, some in cards:
        if above:
            console.print(Text(visible(above), style="dim"))
        print_cards(console, some)
    if section.table is not None and not (brief and cards):
        print_table(console, section.table)
    for note in section.notes:
        console.print(Text(visible(note), style="dim") if isinstance(note, str) else safe(note))


def printable(console: Console, cards: Sequence[Card]) -> bool:
    """Whether cards can be printed: texts always can, pictures need a terminal."""
    texts = all(isinstance(card.content, str) for card in cards)
    return texts or (console.is_terminal and not console.options.ascii_only)


def print_cards(console: Console, cards: Sequence[Card]) -> None:
    """Print samples with pictures side by side, or samples with texts one below the other."""
    if all(isinstance(card.content, str) for card in cards):
        for card in cards:
            about = ", ".join([card.title, *card.captions()])
            console.print(Text(visible(about), style="bold"), overflow="fold")
            text = visible(str(card.content))[: _LINES * console.width]
            console.print(Padding(Text(text, overflow="fold"), (0, 0, 0, _GAP)))
        return
    across = max(1, (console.width + _GAP) // (_CARD + _GAP))
    for start in range(0, len(cards), across):
        row = cards[start : start + across]
        grid = Grid.grid(padding=(0, _GAP, 0, 0))
        for _ in row:
            grid.add_column(width=_CARD, overflow="fold", vertical="bottom")
        coloured = bool(console.color_system) and not console.no_color
        grid.add_row(*(_card(card, coloured) for card in row))
        console.print(grid)


def _card(card: Card, coloured: bool) -> Text:
    picture = card.content if isinstance(card.content, Pixels) else None
    lines = [] if picture is None else _blocks(picture.values, coloured)
    lines.append(Text(visible(card.title), style="bold"))
    lines += [Text(visible(line)) for line in card.captions(" ✗")]
    return Text("\n").join(lines)


def _blocks(values: Any, coloured: bool) -> list[Text]:
    """Draw a picture (h, w) or (h, w, 3) uint8 in half blocks, two rows in each line."""
    step = max(1, -(-max(values.shape[:2]) // _CARD))
    h, w = (size // step * step for size in values.shape[:2])
    parts = values[:h, :w].reshape(h // step, step, w // step, step, -1)
    means = parts.mean((1, 3)).round().astype(int)
    if len(means) % 2:
        means = np.concatenate([means, np.zeros_like(means[:1])])
    lines = []
    for upper, lower in zip(means[::2], means[1::2], strict=True):
        line = Text()
        for top, bottom in zip(upper, lower, strict=True):
            if coloured:
                colours = (_rgb(top), _rgb(bottom))
                line.append("▀", Style(color=colours[0], bgcolor=colours[1]))
            else:
                line.append(_HALVES[2 * (top.mean() > _HALF) + (bottom.mean() > _HALF)])
        lines.append(line)
    return lines


def _rgb(pixel: Any) -> Color:
    return Color.from_rgb(*(pixel if len(pixel) == 3 else [*pixel] * 3))


def _print_histogram(histogram: Histogram, console: Console) -> None:
    """Print a line for each bin: edges, count, bar. A count above zero has a visible bar."""
    rows = bins(histogram)
    left = max((len(label) for label, _ in rows), default=0)
    right = max((len(f"{n:,}") for _, n in rows), default=0)
    width = max(1, min(_WIDEST_BAR, console.width - left - right - 4))
    most = max((n for _, n in rows), default=1)
    for label, n in rows:
        line = Text(f"{label:>{left}}  {n:>{right},}  ")
        eighths = max(round(n / most * width * 8), 1 if n else 0)
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        bar = "#" * math.ceil(eighths / 8) if console.options.ascii_only else bar
        console.print(line.append(bar, style="cyan"), soft_wrap=True)
