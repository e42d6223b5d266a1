"""Pictures with matplotlib (the extra gradscope[plot]), without a display."""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gradscope.errors import OutputError, SpecError
from gradscope.report.panels import Panel, summary_panels
from gradscope.report.panels_over import difference_panels, history_panels
from gradscope.report.results import Result
from gradscope.stats import Difference, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
_WIDTH = 5.4  # inches of a picture


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot_stats(found: Result, path: str | Path) -> None:
    """Write all pictures of a result as one, in the format that the suffix of `path` says.

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
    drawn = figure(found)
    try:
        save(drawn, target, target.suffix.lower()[1:])
    except OSError as error:
        raise OutputError(
            f"the picture cannot be written: {error.strerror or error}", where=str(path)
        ) from error


def panels(found: Result) -> list[Panel]:
    """Return the pictures of a result."""
    if isinstance(found, Summary):
        return summary_panels(found)
    if isinstance(found, Difference):
        return difference_panels(found)
    return history_panels(found)


def figure(found: Result, ink: str = "black") -> "Figure":
    """Draw all pictures, two a row.

    Args:
        found: What to draw.
        ink: The colour of text and axes.

    Raises:
        SpecError: matplotlib is not installed.
    """
    every = panels(found)
    pairs = [every[k : k + 2] for k in range(0, len(every), 2)]
    heights = [max(panel.height for panel in pair) for pair in pairs]
    drawn = _figure(2 * _WIDTH, sum(heights))
    rows: Any = drawn.subfigures(len(pairs), 1, height_ratios=heights, squeeze=False)
    for row, pair in zip(rows[:, 0], pairs, strict=True):
        for axes, panel in zip(row.subplots(1, 2, squeeze=False)[0], pair, strict=False):
            panel.draw(axes)
        for axes in row.axes:
            _paint(axes, ink)
        if len(pair) == 1:
            row.axes[1].set_axis_off()
    return drawn


def picture(panel: Panel, ink: str) -> "Figure":
    """Draw one picture by itself."""
    drawn = _figure(_WIDTH, panel.height)
    panel.draw(drawn.subplots())
    for axes in drawn.axes:
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


def _figure(width: float, height: float) -> "Figure":
    if not available():
        raise SpecError(
            "pictures need matplotlib, which is not installed",
            remedy="Install the extra: pip install 'gradscope[plot]'.",
        )
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


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
