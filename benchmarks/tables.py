"""The results as tables: one a task, methods down, models across."""

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.document import by_task
from benchmarks.methods import METHODS
from benchmarks.run import Cell
from benchmarks.scaling import Point
from benchmarks.tasks import TASKS
from benchmarks.workloads import FAMILIES

WIDTH = 140  # where the output is no terminal
_PLAIN = "plain backward"


def show(cells: list[Cell], points: list[Point], console: Console) -> None:
    """Print everything."""
    for task, table in by_task(cells).items():
        _print(task, table, console)
    for axis in dict.fromkeys(point.axis for point in points):
        _print_axis(axis, [p for p in points if p.axis == axis], console)


def _print(task: str, cells: Mapping[tuple[str, str], Cell], console: Console) -> None:
    models = list(dict.fromkeys(model for _, model in cells))
    methods = list(dict.fromkeys(method for method, _ in cells))
    notes = _Notes()
    table = Table(title=TASKS[task].title, title_justify="left", caption_justify="left")
    table.add_column("")
    for model in models:
        sizes = dict(next(c for (_, m), c in cells.items() if m == model).sizes)
        table.add_column(FAMILIES[model].label(sizes), justify="right")
    for method in methods:
        found = [cells.get((method, model)) for model in models]
        bold = "bold" if method in METHODS and METHODS[method].ours else ""
        table.add_row(Text(method, style=bold), *(notes.text(cell) for cell in found))
    console.print(table)
    for line in notes.lines:
        console.print(Text(f"  {line}"))
    console.print()


def _print_axis(axis: str, points: list[Point], console: Console) -> None:
    values = list(dict.fromkeys(point.value for point in points))
    notes = _Notes()
    for task in dict.fromkeys(point.cell.task for point in points):
        table = Table(title=f"{TASKS[task].title}: cost against {axis}", title_justify="left")
        table.add_column("")
        for value in values:
            table.add_column(f"{axis}={value}", justify="right")
        for method in dict.fromkeys(point.cell.method for point in points):
            row = {
                p.value: p.cell for p in points if (p.cell.task, p.cell.method) == (task, method)
            }
            if row:
                table.add_row(method, *(notes.text(row.get(value)) for value in values))
        console.print(table)
    for line in notes.lines:
        console.print(Text(f"  {line}"))
    console.print()


class _Notes:
    """Numbered reasons, each once."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    @property
    def lines(self) -> Iterable[str]:
        """The reasons with their numbers."""
        return [f"[{k}] {reason}" for k, reason in enumerate(self._reasons, 1)]

    def text(self, cell: Cell | None) -> Text:
        """Return what a table says of a cell: its ratio and its memory, or a word."""
        if cell is None:
            return Text("")
        if cell.status == "not installed":
            return Text("not installed", style="dim")
        if cell.status == "declined":
            return Text(f"– [{self._number(cell)}]", style="dim")
        if cell.status != "right" or cell.timing is None:
            return Text(f"{cell.status} [{self._number(cell)}]", style="red")
        if cell.method == _PLAIN:
            return Text(f"{1e3 * min(cell.timing.seconds):.3g} ms  {_bytes(cell)}")
        words = [f"{cell.timing.ratio:.2f} ({cell.timing.median:.2f})", _bytes(cell)]
        if cell.compile_seconds is not None:
            words.insert(1, f"(+{cell.compile_seconds:.0f} s)")
        return Text("  ".join(words))

    def _number(self, cell: Cell) -> int:
        reason = cell.reason or cell.status
        if reason not in self._reasons:
            self._reasons.append(reason)
        return self._reasons.index(reason) + 1


def _bytes(cell: Cell) -> str:
    peak = cell.timing.peak_bytes if cell.timing else None
    return "" if peak is None else f"{peak / 2**20:.0f}M"
