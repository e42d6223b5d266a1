"""Pictures of a summary with matplotlib (the extra gradscope[plot]), without a display."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gradscope.errors import OutputError, SpecError
from gradscope.report.text import count, fit_names, short
from gradscope.stats import ParameterRow, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
_BLUE, _ORANGE = "#3d85c6", "#d9772b"  # readable on white and on black
_MOST_PARAMETERS = 40
_MOST_LABELS = 5
_NAME = 32
_RASTER = 400  # more points than this are one picture in an SVG


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot_stats(summary: Summary, path: str | Path) -> None:
    """Write the pictures of a summary, in the format that the suffix of `path` says.

    Raises:
        SpecError: The suffix is unknown, or matplotlib is not installed.
        OutputError: The file cannot be written.
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise SpecError(
            f"a picture cannot be written as {target.suffix or 'a file without suffix'!r}",
            where=str(path),
            remedy=f"Supported: {', '.join(SUFFIXES)}.",
        )
    drawn = figure(summary)
    try:
        save(drawn, target, target.suffix.lower()[1:])
    except OSError as error:
        raise OutputError(
            f"the picture cannot be written: {error.strerror or error}", where=str(path)
        ) from error


def figure(summary: Summary, ink: str = "black") -> "Figure":
    """Draw distribution, norm against loss, and signal and noise of each parameter.

    Args:
        summary: What to draw.
        ink: The colour of text and axes.

    Raises:
        SpecError: matplotlib is not installed.
    """
    if not available():
        raise SpecError(
            "pictures need matplotlib, which is not installed",
            remedy="Install the extra: pip install 'gradscope[plot]'.",
        )
    from matplotlib.figure import Figure

    rows = _shown(summary.parameters)
    lower = max(1.6, 0.9 + 0.2 * len(rows))
    drawn = Figure(figsize=(10, 3.6 + lower), layout="constrained")
    parts: Any = drawn.subfigures(2, 1, height_ratios=[3.6, lower])
    above, below = parts
    left, right = above.subplots(1, 2)
    _distribution(left, summary)
    _against_loss(right, summary)
    norms, signals = below.subplots(1, 2, sharey=True)
    some = len(rows) < len(summary.parameters)
    which = f" ({len(rows)} of {len(summary.parameters)}, largest share)" if some else ""
    norms.set_yticks(range(len(rows)), fit_names([row.name for row in rows], _NAME), fontsize=8)
    norms.invert_yaxis()
    for label in norms.get_yticklabels():
        label.set_parse_math(False)  # a name is no formula
    _bars(norms, f"Mean norm{which}", [row.mean_norm for row in rows], _BLUE)
    _bars(signals, f"Signal to noise{which}", [row.signal_to_noise for row in rows], _ORANGE)
    for axes in (left, right, norms, signals):
        _paint(axes, ink)
    return drawn


def save(drawn: "Figure", target: Path | IO[bytes], kind: str, transparent: bool = False) -> None:
    """Write a figure; the same figure gives the same bytes."""
    from matplotlib import rc_context

    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    options: Any = {"svg.hashsalt": "gradscope", "svg.fonttype": "none"}
    with rc_context(options), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # names in scripts without a font
        drawn.savefig(
            target, format=kind, dpi=150, metadata=dates.get(kind), transparent=transparent
        )


def _shown(rows: Sequence[ParameterRow]) -> list[ParameterRow]:
    """Return the rows with the largest share, in the model's order."""
    order = sorted(range(len(rows)), key=lambda k: -(rows[k].share or 0.0))
    return [rows[k] for k in sorted(order[:_MOST_PARAMETERS])]


def _distribution(axes: "Axes", summary: Summary) -> None:
    axes.set_title("Gradient norms")
    axes.set_xlabel("norm of a sample's gradient")
    axes.set_ylabel("samples")
    norm = summary.norm
    if norm is None or not norm.histogram.counts:
        _empty(axes, "every norm is zero" if norm is not None else "no finite sample")
        return
    found = norm.histogram
    if found.edges[0] == found.edges[-1]:
        axes.bar([short(found.edges[0])], found.counts, color=_BLUE, width=0.3)
        axes.set_xlim(-1, 1)
    else:
        axes.stairs(found.counts, found.edges, fill=True, color=_BLUE)
        if found.scale == "log":
            axes.set_xscale("log")
        if found.edges[0] <= norm.median:
            axes.axvline(norm.median, color=_ORANGE, label=f"median {short(norm.median)}")
            axes.legend(frameon=False, loc="upper left")
    if found.zeros:
        axes.set_title(f"Gradient norms ({count(found.zeros, 'zero')} not shown)")


def _against_loss(axes: "Axes", summary: Summary) -> None:
    axes.set_title("Norm against loss")
    axes.set_xlabel("loss")
    axes.set_ylabel("norm")
    cloud = summary.points
    loss, norm = _largest(summary) if cloud is None else (cloud.loss, cloud.norm)
    if not norm:
        _empty(axes, "no finite sample")
        return
    if cloud is not None and len(norm) < cloud.of:
        axes.set_title(f"Norm against loss ({len(norm):,} of {cloud.of:,} samples)")
    dense = len(norm) > _RASTER
    axes.scatter(loss, norm, s=9, alpha=0.5, color=_BLUE, linewidths=0, rasterized=dense)
    _log_when_wide(axes.set_xscale, loss)
    _log_when_wide(axes.set_yscale, norm)
    _label_largest(axes, summary)


def _label_largest(axes: "Axes", summary: Summary) -> None:
    """Mark the largest norms, with labels in a row above, in the order of loss."""
    rows = [(r.loss, r.norm, r.index) for r in summary.samples[:_MOST_LABELS] if r.loss is not None]
    axes.set_title(axes.get_title(), pad=20)
    for k, (loss, norm, index) in enumerate(sorted(rows)):
        axes.scatter(loss, norm, s=22, color=_ORANGE, linewidths=0)
        axes.annotate(
            str(index),
            (loss, norm),
            xytext=((k + 1) / (len(rows) + 1), 1.02),
            textcoords="axes fraction",
            ha="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": _ORANGE, "linewidth": 0.6},
        )


def _largest(summary: Summary) -> tuple[list[float], list[float]]:
    """Return loss and norm of the listed samples, for a summary read back from JSON."""
    rows = [row for row in summary.samples if row.loss is not None]
    return [row.loss for row in rows if row.loss is not None], [row.norm for row in rows]


def _log_when_wide(set_scale: Any, values: Sequence[float]) -> None:
    """Use a logarithmic axis when all values are positive and span over two decades."""
    if min(values) > 0 and max(values) / 100 > min(values):
        set_scale("log")


def _bars(axes: "Axes", title: str, values: Sequence[float | None], color: str) -> None:
    axes.set_title(title)
    axes.barh(range(len(values)), [value or 0.0 for value in values], color=color, height=0.7)
    positive = [value for value in values if value]
    if positive:
        _log_when_wide(axes.set_xscale, positive)
    if axes.get_xscale() == "log":
        axes.set_xlim(left=min(positive) / 2)
    for k, value in enumerate(values):
        if value is None:
            side = axes.get_yaxis_transform()
            axes.text(0.01, k, "undefined", transform=side, va="center", fontsize=7)


def _empty(axes: "Axes", text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)


def _paint(axes: "Axes", ink: str) -> None:
    """Draw text and axes in one colour, names as they are and not as formulas."""
    from matplotlib.text import Text

    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=ink, which="both")
    for spine in axes.spines.values():
        spine.set_color(ink)
    for text in axes.findobj(Text):
        text.set_color(ink)
