"""The table of `gradscope compare`."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gradscope.report.layout import Column, heading, names_table
from gradscope.report.text import NONE, count, duration, short, size, visible
from gradscope.report.ways import render_ways

if TYPE_CHECKING:
    from gradscope.comparison import BackendRow, Comparison

_STATUS = {
    "agrees": ("agrees", "green"),
    "disagrees": ("DISAGREES", "bold red"),
    "refused": ("refused", "yellow"),
    "failed": ("FAILED", "bold red"),
}


def render_comparison(comparison: "Comparison", console: Console, verbose: bool = False) -> None:
    """Print a row a backend, then what disagrees, then every refusal with its remedy."""
    _print_rows(comparison, console)
    if verbose:
        render_ways(comparison.ways, console)
    for row in comparison.rows:
        if not all(p.agrees for p in row.parameters):
            _print_disagreement(row, console)
    for row in comparison.rows:
        if not row.parameters and (row.reason or row.remedy):
            _print_reason(row, console)
    console.print()
    console.print(_conclusion(comparison))


def _print_rows(comparison: "Comparison", console: Console) -> None:
    rows, baseline = comparison.rows, comparison.baseline_seconds
    columns = [
        Column("status", [Text(*_STATUS.get(r.status, (r.status, ""))) for r in rows]),
        Column("time", [duration(r.seconds) for r in rows], rank=2),
        Column("x plain backward", [_times(r.seconds, baseline) for r in rows], rank=1),
        Column("peak memory", [size(r.peak_bytes) for r in rows], rank=3),
        Column(
            "worst relative error", [short(r.worst.relative if r.worst else None) for r in rows]
        ),
    ]
    names_table(console, "backend", [r.backend for r in rows], columns)
    text = f"Plain forward and backward: {duration(baseline)}, {size(comparison.baseline_bytes)}"
    console.print(Text(f"{text}, {comparison.dtype}.", style="dim"))


def _times(seconds: float | None, baseline: float) -> str:
    return NONE if seconds is None or baseline <= 0 else short(seconds / baseline)


def _print_disagreement(row: "BackendRow", console: Console) -> None:
    wrong = [p for p in row.parameters if not p.agrees]
    heading(console, f"{visible(row.backend)} disagrees in {count(len(wrong), 'parameter')}")
    columns = [
        Column("relative error", [short(p.relative) for p in wrong]),
        Column("absolute error", [short(p.absolute) for p in wrong], rank=3),
        Column("cosine", [_precise(p.cosine) for p in wrong], rank=2),
        Column("worst sample", [_sample(p.worst_sample) for p in wrong], rank=1),
        Column("factor", [_precise(p.factor) for p in wrong]),
    ]
    names_table(console, "parameter", [p.name for p in wrong], columns)
    meanings: dict[str, list[str]] = {}
    for p in wrong:
        meanings.setdefault(p.meaning, []).append(p.name)
    for meaning, names in meanings.items():
        some = len(meanings) > 1
        where = ", ".join(names) + ": " if some else ""
        _print_wrapped(where + meaning, console)
    _print_advice(row, console, said=set(meanings))


def _print_reason(row: "BackendRow", console: Console) -> None:
    word, style = _STATUS.get(row.status, (row.status, ""))
    console.print()
    console.print(Text.assemble((visible(row.backend), "bold"), " ", (word, style)))
    _print_advice(row, console, said=set())


def _print_advice(row: "BackendRow", console: Console, said: set[str]) -> None:
    for text in (row.reason, row.remedy):
        if text is not None and not any(meaning in text for meaning in said):
            _print_wrapped(text, console)


def _print_wrapped(text: str, console: Console) -> None:
    safe = Text(visible(text, keep="\n"), overflow="fold")
    console.print(Padding(safe, (0, 0, 0, 2)))


def _precise(value: float | None) -> str:
    """Return a number near one with the digits that show how near."""
    return NONE if value is None else f"{value:.5g}"


def _sample(position: int | None) -> str:
    return NONE if position is None else str(position)


def _conclusion(comparison: "Comparison") -> Text:
    """Return the last line: whether all that answered agree."""
    tally: dict[str, int] = {}
    for row in comparison.rows:
        word = _STATUS.get(row.status, (row.status, ""))[0]
        tally[word] = tally.get(word, 0) + 1
    counts = ", ".join(f"{n} {word}" for word, n in tally.items())
    text = f"{count(comparison.samples, 'sample')}, {count(len(comparison.rows), 'backend')}: "
    return Text(text + counts, style="green" if comparison.agrees else "bold red")
