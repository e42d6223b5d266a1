"""Pictures with matplotlib (the extra torch-gradscope[plot]), without a display."""

import warnings
from collections.abc import Sequence
from functools import singledispatch
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gradscope.errors import SpecError
from gradscope.report.console import fit_names
from gradscope.stats.sections import (
    BarPicture,
    CurvePicture,
    Displayable,
    HistogramPicture,
    MatrixPicture,
    Picture,
    ScatterPicture,
    short,
)
from gradscope.storage import written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
_WIDTH = 5.4  # inches of a picture
_BLUE, _ORANGE = "#3d85c6", "#d9772b"  # readable on white and on black
_NAMED = 5  # the most points with a label
_NAME = 32  # the most letters of a name
_RASTER = 400  # with more points an SVG contains them as a bitmap


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot(result: Any, ink: str = "black") -> "Figure":
    """Draw a result: a file (a path or an open file), scores, statistics, or a comparison of files.

    Args:
        result: A path, `gradscope.open(...)`, `Scores`, or the result of `gradscope.stats`.
        ink: The colour of text and axes.

    Returns:
        A matplotlib figure; `figure.savefig("norms.pdf")` writes it.

    Raises:
        SpecError: There is nothing to draw, or matplotlib is not installed.
    """
    from gradscope.attribution import Scores, summarize_scores
    from gradscope.stats import summarize
    from gradscope.storage import GradientFile, open_file

    if isinstance(result, str | Path):
        with open_file(result) as file:
            return plot(file, ink)
    if isinstance(result, GradientFile):
        result = Scores.of(result) if "attribution" in result.run else summarize(result)
    if isinstance(result, Scores):
        result = summarize_scores(result)
    pictures = result.overview().pictures
    if not pictures:
        raise SpecError("there is nothing to draw", remedy="Give a result file or its statistics.")
    return figure(pictures, ink)


def plot_stats(result: Displayable, path: str | Path) -> None:
    """Write all pictures of a result as one, in the format given by the suffix of `path`.

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
    pictures = result.overview().pictures
    if not pictures:
        raise SpecError("there is nothing to draw", where=str(path), remedy="Leave out `plot`.")
    drawn = figure(pictures)
    written(target, lambda file: save(drawn, file, target.suffix.lower()[1:]))


def figure(pictures: Sequence[Picture], ink: str = "black") -> "Figure":
    """Draw pictures, two in each row, with text and axes in the colour `ink`."""
    if not available():
        raise SpecError(
            "pictures need matplotlib, which is not installed",
            remedy="Install the extra: pip install 'torch-gradscope[plot]'.",
        )
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    across = min(2, len(pictures))
    pairs = [pictures[k : k + 2] for k in range(0, len(pictures), 2)]
    heights = [max(picture.height for picture in pair) for pair in pairs]
    drawn = Figure(figsize=(across * _WIDTH, sum(heights)), layout="constrained")
    rows: Any = [drawn]
    if len(pictures) > 1:
        rows = drawn.subfigures(len(pairs), 1, height_ratios=heights, squeeze=False)[:, 0]
    for row, pair in zip(rows, pairs, strict=True):
        places = row.subplots(1, across, squeeze=False)[0]
        for axes, picture in zip(places, pair, strict=False):
            axes.set_title(picture.title)
            axes.set_xlabel(picture.across)
            axes.set_ylabel(picture.up)
            if picture.empty:
                side = {"transform": axes.transAxes, "ha": "center", "va": "center"}
                axes.text(0.5, 0.5, picture.empty, **side)
            else:
                _draw(picture, axes)
        for axes in row.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(colors=ink, which="both")
            for spine in axes.spines.values():
                spine.set_color(ink)
            for text in axes.findobj(Text):
                text.set_color(ink)
        for axes in places[len(pair) :]:
            axes.set_axis_off()
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


@singledispatch
def _draw(picture: Picture, axes: "Axes") -> None:
    raise TypeError(f"no way to draw {type(picture).__name__}")


@_draw.register(BarPicture)
def _bars(picture: BarPicture, axes: "Axes") -> None:
    """Draw a bar for each name. Names are not parsed as formulas."""
    names, values = picture.names, picture.values
    axes.set_yticks(range(len(names)), fit_names(names, _NAME), fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    color = _ORANGE if picture.second else _BLUE
    axes.barh(range(len(values)), [value or 0.0 for value in values], color=color, height=0.7)
    positive = [value for value in values if value and value > 0]
    if positive and not any(value and value < 0 for value in values):
        _log_when_wide(axes.set_xscale, positive)
    else:
        axes.locator_params(axis="x", nbins=6)  # scores have many digits
    if axes.get_xscale() == "log":
        axes.set_xlim(left=min(positive) / 2)
    for k, value in enumerate(values):
        if value is None:
            side = axes.get_yaxis_transform()
            axes.text(0.01, k, "undefined", transform=side, va="center", fontsize=7)
    if picture.mark is not None:
        axes.axvline(picture.mark, color=_BLUE, linewidth=0.8, linestyle="--")


@_draw.register(HistogramPicture)
def _histogram(picture: HistogramPicture, axes: "Axes") -> None:
    found = picture.histogram
    edges, counts, half = found.edges, found.counts, len(found.counts) // 2
    if picture.split:
        axes.stairs(counts[:half], edges[: half + 1], fill=True, color=_ORANGE)
        axes.stairs(counts[half:], edges[half:], fill=True, color=_BLUE)
    elif edges[0] == edges[-1]:
        axes.bar([short(edges[0])], counts, color=_BLUE, width=0.3)
        axes.set_xlim(-1, 1)
    else:
        axes.stairs(counts, edges, fill=True, color=_BLUE)
        if found.scale == "log":
            axes.set_xscale("log")
        if picture.mark is not None and edges[0] <= picture.mark[0]:
            axes.axvline(picture.mark[0], color=_ORANGE)
            top = 1.12 * axes.get_ylim()[1]  # room for the name above the bars
            axes.set_ylim(top=top)
            side: Any = {"textcoords": "offset points", "va": "top", "fontsize": 9}
            axes.annotate(picture.mark[1], (picture.mark[0], top), (4, 0), **side)


@_draw.register(ScatterPicture)
def _scatter(picture: ScatterPicture, axes: "Axes") -> None:
    x, y = picture.x, picture.y
    dense = len(x) > _RASTER
    axes.scatter(x, y, s=9, alpha=0.5, color=_BLUE, linewidths=0, rasterized=dense)
    both = [*x, *y]
    _log_when_wide(axes.set_xscale, both if picture.diagonal else x)
    _log_when_wide(axes.set_yscale, both if picture.diagonal else y)
    if picture.diagonal:
        axes.plot([min(both), max(both)], [min(both), max(both)], color=_ORANGE, linewidth=0.8)
    some = sorted(picture.named[:_NAMED])  # with labels in a row above, in the order of x
    axes.set_title(axes.get_title(), pad=20)
    for k, (left, up, name) in enumerate(some):
        axes.scatter(left, up, s=22, color=_ORANGE, linewidths=0)
        axes.annotate(
            name,
            (left, up),
            xytext=((k + 1) / (len(some) + 1), 1.02),
            textcoords="axes fraction",
            ha="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": _ORANGE, "linewidth": 0.6},
        )


@_draw.register(CurvePicture)
def _curves(picture: CurvePicture, axes: "Axes") -> None:
    several, colors = any(picture.curves), {}
    for name, points in picture.curves.items():
        kind: Any = {"label": name} if several else {"color": _BLUE}
        (line,) = axes.plot(*zip(*points, strict=True), marker=".", markersize=4, **kind)
        colors[name] = line.get_color()
    axes.locator_params(axis="x", integer=True)
    _log_when_wide(axes.set_yscale, [y for points in picture.curves.values() for _, y in points])
    if several:  # above the curves
        across = 1 if max(map(len, picture.curves)) > _NAME else 2
        place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": across}
        axes.set_title(axes.get_title(), pad=14 + 12 * -(-len(picture.curves) // across))
        for text in axes.legend(frameon=False, fontsize=7, **place).get_texts():
            text.set_parse_math(False)
    ends = [high for band in picture.bands.values() for _, _, high in band if high is not None]
    top = 2 * max(ends, default=axes.get_ylim()[1])
    for name, band in picture.bands.items():  # a band without upper end is drawn up to the top
        axes.set_yscale("log")
        x, low, high = zip(*band, strict=True)
        filled = [top if h is None else h for h in high]
        axes.fill_between(x, low, filled, color=colors[name], alpha=0.25, linewidth=0)
        axes.set_ylim(top=top)


@_draw.register(MatrixPicture)
def _matrix(picture: MatrixPicture, axes: "Axes") -> None:
    shown = axes.imshow(picture.values, cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    drawn: Any = axes.figure
    drawn.colorbar(shown, ax=axes, shrink=0.8, label=picture.up)
    axes.set_ylabel("")


def _log_when_wide(set_scale: Any, values: Sequence[float]) -> None:
    """Use a logarithmic axis when all values are positive and span over two decades."""
    if min(values) > 0 and max(values) / 100 > min(values):
        set_scale("log")
