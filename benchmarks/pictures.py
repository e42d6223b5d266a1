"""The results as a picture: ratios by task and model, and the scaling."""

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.document import by_task
from benchmarks.methods import METHODS
from benchmarks.run import Cell
from benchmarks.scaling import Point
from benchmarks.tasks import TASKS

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# colours that colour-blind readers tell apart (Okabe and Ito), a marker for each use of a tool
_COLOURS = {
    "gradscope": "#0072b2",
    "vmap(grad)": "#009e73",
    "Opacus": "#d55e00",
    "BackPACK": "#cc79a7",
    "floor": "black",
    "plain": "0.5",
}
_MARKERS = "oDs^vP*X"


def draw(cells: list[Cell], points: list[Point], title: str, path: Path) -> None:
    """Write the picture, in the format that the suffix says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tables = by_task(cells)
    axes = list(dict.fromkeys((p.cell.task, p.axis) for p in points))
    columns = max(2, min(3, len(tables)))
    rows = -(-len(tables) // columns) + -(-len(axes) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = iter(figure.subplots(rows, columns, squeeze=False).flat)
    for task, table in tables.items():
        _ratios(next(panels), task, list(table.values()))
    for _ in range(-len(tables) % columns):
        next(panels).set_axis_off()
    for task, axis in axes:
        _growth(next(panels), task, axis, [p for p in points if p.axis == axis])
    for panel in panels:
        panel.set_axis_off()
    figure.suptitle(title, fontsize=8)
    _legend(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _ratios(panel: "Axes", task: str, cells: list[Cell]) -> None:
    models = list(dict.fromkeys(cell.model for cell in cells))
    for cell in cells:
        if cell.ratio is None or cell.method == "plain backward":
            continue
        colour, marker = _style(cell.method)
        height = models.index(cell.model) + (-0.16 if cell.method.startswith("gradscope") else 0.1)
        panel.plot(
            [cell.ratio],
            [height],
            marker=marker,
            color=colour,
            linestyle="none",
            label=cell.method,
            alpha=0.85,
            markersize=6,
        )
    panel.axvline(1.0, color="0.5", linewidth=0.8, zorder=0)
    panel.set_xscale("log")
    _plain_numbers(panel.xaxis)
    panel.set_yticks(range(len(models)), models)
    panel.set_ylim(len(models) - 0.5, -0.5)
    panel.set_title(TASKS[task].title, fontsize=10)
    panel.set_xlabel("time / plain forward + backward", fontsize=8)
    panel.grid(axis="x", color="0.9", which="both", linewidth=0.5)


def _growth(panel: "Axes", task: str, axis: str, points: list[Point]) -> None:
    for method in dict.fromkeys(p.cell.method for p in points):
        line = [
            (p.value, min(p.cell.timing.seconds))
            for p in points
            if (p.cell.task, p.cell.method) == (task, method)
            and p.cell.status == "right"
            and p.cell.timing is not None
        ]
        if line:
            colour, marker = _style(method)
            xs, ys = zip(*line, strict=True)
            panel.plot(xs, ys, marker=marker, color=colour, label=method, markersize=4)
    panel.set_xscale("log", base=2)
    values = sorted({p.value for p in points})
    panel.set_xticks(values, [str(value) for value in values])
    panel.set_yscale("log")
    _plain_numbers(panel.yaxis)
    panel.set_title(f"{TASKS[task].title} against {axis}", fontsize=10)
    panel.set_ylabel("seconds", fontsize=8)
    panel.grid(color="0.9", linewidth=0.5)


def _plain_numbers(axis: "Axis") -> None:
    """Write 1, 2, 5, 10, ... at a logarithmic axis, and no more of them than fit."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _legend(figure: "Figure") -> None:
    shown: dict[str, Artist] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    if shown:
        ordered = [name for name in METHODS if name in shown]
        figure.legend(
            [shown[name] for name in ordered],
            ordered,
            loc="outside lower center",
            ncols=4,
            fontsize=8,
            frameon=False,
        )


def _style(method: str) -> tuple[str, str]:
    """Return a colour for the tool and a marker for the way it is used."""
    tool = next((name for name in _COLOURS if method.startswith(name)), "plain")
    same = [name for name in METHODS if name.startswith(tool)]
    position = same.index(method) if method in same else 0
    return _COLOURS[tool], "|" if tool == "floor" else _MARKERS[position % len(_MARKERS)]
