"""Output of `compare`."""

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gradscope.comparison import BackendRow, Comparison
from gradscope.comparison.run import STATUS, distance, parameter_errors
from gradscope.core.texts import count, listed, visible
from gradscope.report.screens import render_kernels
from gradscope.report.terminal import heading, print_table, safe
from gradscope.stats.sections import duration, size

_ROWS = 20  # the most parameters in a list of disagreements, without --verbose


def render_comparison(comparison: Comparison, console: Console, verbose: bool = False) -> None:
    """Print a row for each backend, the kernels (`verbose`), disagreements, and refusals."""
    rows = comparison.rows
    print_table(console, comparison.table())
    plain = f"{duration(comparison.baseline_seconds)}, {size(comparison.baseline_bytes)}"
    text = f"Plain forward and backward: {plain}"
    console.print(Text(f"{text}, {comparison.dtype}.", style="dim"))
    if verbose:
        render_kernels(comparison.ways, console)
    for row in rows:
        if not all(p.agrees for p in row.parameters):
            _render_disagreement(comparison, row, console, verbose)
    for row in rows:
        without_numbers = row.status != "agrees" and all(p.agrees for p in row.parameters)
        if without_numbers and (row.reason or row.remedy):
            console.print()
            name = Text(visible(row.backend), "bold")
            console.print(Text(" ").join([name, safe(STATUS[row.status])]))
            _render_advice(row, console, ())
    console.print()
    tally = Counter(STATUS[row.status].text for row in rows)
    counts = ", ".join(f"{n} {word}" for word, n in tally.items())
    text = f"{count(comparison.samples, comparison.noun)}, {count(len(rows), 'backend')}: {counts}"
    console.print(Text(text, style="green" if comparison.agrees else "bold red"))


def _render_disagreement(
    comparison: Comparison, row: BackendRow, console: Console, verbose: bool = False
) -> None:
    wrong = [p for p in row.parameters if not p.agrees]
    heading(console, f"{row.backend} disagrees in {count(len(wrong), 'parameter')}")
    furthest = sorted(map(distance, wrong), reverse=True)
    shown = wrong if verbose else [p for p in wrong if distance(p) >= furthest[:_ROWS][-1]][:_ROWS]
    print_table(console, parameter_errors(shown, comparison))
    if len(shown) < len(wrong):
        more = f"{count(len(wrong) - len(shown), 'parameter')} with smaller errors: --verbose"
        console.print(Text(more, style="dim"))
    meanings: dict[str, list[str]] = {}
    for p in wrong:
        meanings.setdefault(p.meaning, []).append(p.name)
    for meaning, of in meanings.items():
        names = f"{listed(of, len(of) if verbose else 10)}: "
        _print_wrapped(names * (len(meanings) > 1) + meaning, console)
    _render_advice(row, console, meanings)


def _render_advice(row: BackendRow, console: Console, said: Iterable[str]) -> None:
    for text in (row.reason, row.remedy):
        if text is not None and not any(meaning in text for meaning in said):
            _print_wrapped(text, console)


def _print_wrapped(text: str, console: Console) -> None:
    safe = Text(visible(text, keep="\n"), overflow="fold")
    console.print(Padding(safe, (0, 0, 0, 2)))
