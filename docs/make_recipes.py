"""Draw the figures of docs/recipes, each from the numbers that its page computes, as SVG.

    python docs/make_recipes.py [FOLDER]

tests/test_docs.py draws each figure again when it has run the page, and tells which are stale.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "recipes"
COLOURS = BLUE, RED, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#777777"

Names = dict[str, Any]  # what a page's code has defined
# the same bytes from the same numbers, and letters as text
_SVG = {"svg.hashsalt": "gradscope", "svg.fonttype": "none", "font.size": 9}


def draw(page: str, names: Names, folder: Path) -> Path:
    """Draw the figure of `page` into `folder`, from the names that its code has defined."""
    with matplotlib.rc_context(_SVG):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        FIGURES[page](figure.subplots(1, 2), names)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        path = folder / f"{page}.svg"
        figure.savefig(path, metadata={"Date": None})
    return path


def _clipping(panels: Any, names: Names) -> None:
    left, right = panels
    norms, plain, noisy = zip(*names["table"], strict=True)
    left.semilogx(norms, plain, "o-", color=GREY, label="clipped mean")
    best = max(noisy)
    label = "with noise, relative to its best"
    left.semilogx(norms, [v / best for v in noisy], "o-", color=BLUE, label=label)
    _labelled(left, "clipping norm C", "cosine with the true mean")
    left.set_ylim(0, 1.4)  # room for the legend
    left.set_yticks(np.linspace(0, 1, 6))
    _points(right, names["accuracies"])
    right.set_xscale("log")
    for axes in panels:
        _ticks(axes.xaxis, (0.1, 1, 10))
    _labelled(right, "clipping norm C", "test accuracy after DP-SGD")
    right.set_ylim(0.4, 1)


def _batch_size(panels: Any, names: Names) -> None:
    left, right = panels
    for rate, colour in ((0.8, BLUE), (0.1, RED)):
        losses, scales = zip(*names["scales"][rate], strict=True)
        left.loglog(losses, scales, "o-", color=colour, label=f"rate {rate}, batch 64")
    critical, least = names["critical"], names["least"]
    left.axhline(critical, color=GREY, linestyle="--", label="counted, until loss 0.3")
    left.set_xlim(2.5, 0.12)
    left.set_ylim(5, 5000)
    _ticks(left.xaxis, (2, 1, 0.5, 0.2))
    _ticks(left.yaxis, (10, 100, 1000))
    _labelled(left, "loss (training goes to the right)", "noise scale, samples")
    _points(right, names["counted"])
    sizes = np.geomspace(3, 400, 50)
    right.loglog(sizes, least * (1 + critical / sizes), "--", color=GREY, label="fit")
    _ticks(right.xaxis, (4, 16, 64, 256))
    _ticks(right.yaxis, (50, 100, 200))
    _labelled(right, "batch size", "steps until loss 0.3")


def _ewc(panels: Any, names: Names) -> None:
    left, right = panels
    for (kind, pairs), colour in zip(names["reached"].items(), COLOURS, strict=True):
        first, second = zip(*pairs, strict=True)
        left.semilogx(names["strengths"], first, "o-", color=colour, label=kind)
        right.plot(first, second, "o-", color=colour)
    _ticks(left.xaxis, names["strengths"])
    _labelled(left, "λ", "accuracy on task A after B")
    _labelled(right, "accuracy on task A after B", "accuracy on task B")


def _wrong_labels(panels: Any, names: Names) -> None:
    found, kinds = names["found"], {"no gradient": BLUE, "by gradients": RED}
    for axes, name in zip(panels, names["behind"], strict=True):
        for row, score in enumerate(reversed(found)):
            shares = [precision for _, precision in found[score][name]]
            kind = "no gradient" if score in ("loss", "margin") else "by gradients"
            axes.barh(row, sum(shares) / len(shares), color=kinds[kind], label=kind)
            axes.plot(shares, [row] * len(shares), "o", color="black", markersize=3, label="a seed")
        axes.axvline(names["WRONG"] / names["N"], color=GREY, linestyle="--", label="chance")
        axes.set_yticks(range(len(found)), list(reversed(found)))
        axes.set_xlim(0, 1)
        axes.set_xlabel(f"precision, {name}")
    entries = _entries(axes)
    where = {"loc": "outside lower center", "ncols": len(entries)}
    axes.figure.legend(entries.values(), entries, frameon=False, fontsize=8, **where)


def _adapters(panels: Any, names: Names) -> None:
    left, right = panels
    modules, reached = names["by_module"], names["reached"]
    shown = {("new", "B"): BLUE, ("warm", "A"): RED, ("warm", "B"): GREEN}  # A of new is zero
    for place, ((state, matrix), colour) in enumerate(shown.items()):
        norms = [found[state, f"lora_{matrix}"] for found in modules.values()]
        rows = np.arange(len(norms)) + 0.27 * (place - 1)
        left.barh(rows, norms, 0.25, color=colour, label=f"{state}: {matrix}")
    for row, (name, seeds) in enumerate(reached.items()):
        ours = name.startswith(("gradients", "warm"))
        how = {"color": BLUE, "label": "by gradients"} if ours else {"color": GREY, "label": "else"}
        right.plot(seeds, [row] * len(seeds), "o", **how)
    for axes, labels in ((left, modules), (right, reached)):
        axes.set_yticks(range(len(labels)), list(labels))
        axes.invert_yaxis()
    _labelled(left, "mean norm of a sample's gradient", "")
    _labelled(right, "test loss after training on the chosen", "")


def _cabs(panels: Any, names: Names) -> None:
    left, right = panels
    for (size, seeds), colour in zip(names["runs"].items(), COLOURS, strict=False):
        label = "CABS" if size is None else f"batch {size}"
        for seed, history in enumerate(seeds):
            used, _, losses = zip(*history, strict=True)
            every = slice(None, None, max(1, len(history) // 100))
            left.plot(used[every], losses[every], color=colour, label=label, alpha=1 - seed / 2)
    for seed, history in enumerate(names["runs"][None]):
        used, sizes, _ = zip(*history, strict=True)
        right.semilogy(used, sizes, color=BLUE, alpha=1 - seed / 2)
    left.set_ylim(0, 2.4)
    for axes in panels:
        _ticks(axes.xaxis, (0, 4000, 8000, 12000))
    right.set_ylim(6, 64)
    _ticks(right.yaxis, (8, 16, 32, 64))
    _labelled(left, "samples read", "held-out loss")
    _labelled(right, "samples read", "batch size of CABS")


def _points(axes: Axes, values: dict[float, list[float]]) -> None:
    """A point for each seed, and a line through their means."""
    for x, seeds in values.items():
        axes.plot([x] * len(seeds), seeds, "o", color=BLUE)
    means = [sum(seeds) / len(seeds) for seeds in values.values()]
    axes.plot(list(values), means, "-", color=BLUE, label="mean of the seeds")


def _ticks(axis: Any, values: tuple[float, ...]) -> None:
    """Mark these values alone, as they are."""
    axis.set_ticks(values, [f"{v:g}" for v in values])
    axis.set_ticks([], minor=True)


def _labelled(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    entries = _entries(axes)
    if entries:
        axes.legend(entries.values(), entries, frameon=False, fontsize=8)


def _entries(axes: Axes) -> dict[str, Any]:
    """What a legend says, each word once."""
    return dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))


FIGURES: dict[str, Callable[[Any, Names], None]] = {
    "clipping": _clipping,
    "batch_size": _batch_size,
    "cabs": _cabs,
    "ewc": _ewc,
    "wrong_labels": _wrong_labels,
    "adapters": _adapters,
}


def main(folder: Path) -> None:
    """Run every page that has a figure, and draw it into `folder`."""
    sys.path[:0] = [str(ROOT), "."]
    from tests.pages import run

    folder = folder.resolve()
    os.environ["COLUMNS"] = "80"
    for page in FIGURES:
        with tempfile.TemporaryDirectory() as place:
            os.chdir(place)
            Path("build").mkdir()
            Path("sample_models").symlink_to(ROOT / "sample_models")
            draw(page, run(FOLDER / f"{page}.md").names, folder)
            os.chdir(ROOT)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
