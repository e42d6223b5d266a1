"""Pictures of a summary, one question each, drawn onto matplotlib's axes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradscope.report.text import count, fit_names, short
from gradscope.stats import ParameterRow, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE = "#3d85c6", "#d9772b"  # readable on white and on black
_MOST_PARAMETERS = 40
_MOST_LABELS = 5
_NAME = 32
RASTER = 400  # more points than this are one picture in an SVG
_HEIGHT = 3.4


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        label: What it shows, for who cannot see it.
        draw: Onto axes.
        height: In inches.
    """

    label: str
    draw: Callable[["Axes"], None]
    height: float = _HEIGHT


def summary_panels(summary: Summary) -> list[Panel]:
    """Return the pictures of one file."""
    rows = _shown(summary.parameters)
    height = max(1.8, 1.0 + 0.2 * len(rows))
    some = len(rows) < len(summary.parameters)
    which = f" ({len(rows)} of {len(summary.parameters)}, largest share)" if some else ""
    norms, signals = [r.mean_norm for r in rows], [r.signal_to_noise for r in rows]
    names = [row.name for row in rows]
    panels = [
        Panel("Histogram of the gradient norms", lambda axes: _distribution(axes, summary)),
        Panel("Gradient norm against loss, a point a sample, the largest labelled",
              lambda axes: _against_loss(axes, summary)),
        Panel("Mean gradient norm of each parameter",
              lambda axes: bars(axes, f"Mean norm{which}", names, norms, BLUE), height),
        Panel("Signal to noise of each parameter",
              lambda axes: _signals(axes, summary, f"Signal to noise{which}", names, signals),
              height),
    ]  # fmt: skip
    if summary.directions is not None:
        panels.append(
            Panel(
                "Histogram of the cosines with the mean gradient",
                lambda axes: _directions(axes, summary),
            )
        )
    if summary.spectrum is not None:
        panels.append(
            Panel(
                "Eigenvalues of the second moment of the gradients",
                lambda axes: _spectrum(axes, summary),
            )
        )
    if summary.cosines is not None:
        panels.append(
            Panel("Cosines of samples with each other", lambda axes: _matrix(axes, summary), 4.2)
        )
    return panels


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
        empty(axes, "every norm is zero" if norm is not None else "no finite sample")
        return
    found = norm.histogram
    if found.edges[0] == found.edges[-1]:
        axes.bar([short(found.edges[0])], found.counts, color=BLUE, width=0.3)
        axes.set_xlim(-1, 1)
    else:
        axes.stairs(found.counts, found.edges, fill=True, color=BLUE)
        if found.scale == "log":
            axes.set_xscale("log")
        if found.edges[0] <= norm.median:
            axes.axvline(norm.median, color=ORANGE, label=f"median {short(norm.median)}")
            axes.legend(frameon=False, loc="upper right")
    if found.zeros:
        axes.set_title(f"Gradient norms ({count(found.zeros, 'zero')} not shown)")


def _against_loss(axes: "Axes", summary: Summary) -> None:
    axes.set_title("Norm against loss")
    axes.set_xlabel("loss")
    axes.set_ylabel("norm")
    cloud = summary.points
    loss, norm = _largest(summary) if cloud is None else (cloud.loss, cloud.norm)
    if not norm:
        empty(axes, "no finite sample")
        return
    if cloud is not None and len(norm) < cloud.of:
        axes.set_title(f"Norm against loss ({len(norm):,} of {cloud.of:,} samples)")
    dense = len(norm) > RASTER
    axes.scatter(loss, norm, s=9, alpha=0.5, color=BLUE, linewidths=0, rasterized=dense)
    log_when_wide(axes.set_xscale, loss)
    log_when_wide(axes.set_yscale, norm)
    rows = [(r.loss, r.norm, r.index) for r in summary.samples if r.loss is not None]
    label_outliers(axes, rows)


def label_outliers(axes: "Axes", points: Sequence[tuple[float, float, int]]) -> None:
    """Mark the first few (x, y, index), with labels in a row above, in the order of x."""
    some = sorted(points[:_MOST_LABELS])
    axes.set_title(axes.get_title(), pad=20)
    for k, (x, y, index) in enumerate(some):
        axes.scatter(x, y, s=22, color=ORANGE, linewidths=0)
        axes.annotate(
            str(index),
            (x, y),
            xytext=((k + 1) / (len(some) + 1), 1.02),
            textcoords="axes fraction",
            ha="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": ORANGE, "linewidth": 0.6},
        )


def _largest(summary: Summary) -> tuple[list[float], list[float]]:
    """Return loss and norm of the listed samples, for a summary read back from JSON."""
    rows = [row for row in summary.samples if row.loss is not None]
    return [row.loss for row in rows if row.loss is not None], [row.norm for row in rows]


def _directions(axes: "Axes", summary: Summary) -> None:
    found = summary.directions
    assert found is not None  # else there is no such panel
    axes.set_title(f"Cosine with the mean ({found.opposing:.0%} opposed)")
    axes.set_xlabel("cosine")
    axes.set_ylabel("samples")
    edges, counts = found.histogram.edges, found.histogram.counts
    half = len(counts) // 2
    axes.stairs(counts[:half], edges[: half + 1], fill=True, color=ORANGE)
    axes.stairs(counts[half:], edges[half:], fill=True, color=BLUE)


def _spectrum(axes: "Axes", summary: Summary) -> None:
    found = summary.spectrum
    assert found is not None  # else there is no such panel
    rank = short(found.effective_rank)
    axes.set_title(f"Spectrum (effective rank {rank})")
    axes.set_xlabel("direction")
    axes.set_ylabel("eigenvalue")
    values = [v for v in found.eigenvalues if v > 1e-12 * found.eigenvalues[0]]
    if not values:
        empty(axes, "every gradient is zero")
        return
    axes.plot(range(1, len(values) + 1), values, color=BLUE, marker=".", markersize=4)
    log_when_wide(axes.set_yscale, values)


def _matrix(axes: "Axes", summary: Summary) -> None:
    found = summary.cosines
    assert found is not None  # else there is no such panel
    axes.set_title(f"Cosines of {len(found)} samples")
    picture = axes.imshow(found, cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
    axes.set_xlabel(
        "samples, evenly spread, by target" if summary.classes else "samples, evenly spread"
    )
    axes.set_xticks([])
    axes.set_yticks([])
    figure: Any = axes.figure
    figure.colorbar(picture, ax=axes, shrink=0.8)


def bars(
    axes: "Axes", title: str, names: Sequence[str], values: Sequence[float | None], color: str
) -> None:
    """Draw a bar a name; a name is no formula."""
    axes.set_title(title)
    axes.set_yticks(range(len(names)), fit_names(names, _NAME), fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.barh(range(len(values)), [value or 0.0 for value in values], color=color, height=0.7)
    positive = [value for value in values if value and value > 0]
    if positive:
        log_when_wide(axes.set_xscale, positive)
    if axes.get_xscale() == "log":
        axes.set_xlim(left=min(positive) / 2)
    for k, value in enumerate(values):
        if value is None:
            side = axes.get_yaxis_transform()
            axes.text(0.01, k, "undefined", transform=side, va="center", fontsize=7)


def _signals(
    axes: "Axes",
    summary: Summary,
    title: str,
    names: Sequence[str],
    signals: Sequence[float | None],
) -> None:
    """Draw signal to noise, with the line that noise alone reaches."""
    bars(axes, title, names, signals, ORANGE)
    n = summary.file.samples - summary.nonfinite.count
    if n > 1:
        axes.axvline(1 / n, color=BLUE, linewidth=0.8, linestyle="--")
        axes.set_title(f"{title}; dashed: noise alone, 1/{n:,}")


def log_when_wide(set_scale: Any, values: Sequence[float]) -> None:
    """Use a logarithmic axis when all values are positive and span over two decades."""
    if min(values) > 0 and max(values) / 100 > min(values):
        set_scale("log")


def empty(axes: "Axes", text: str) -> None:
    """Say why there is nothing to draw."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
