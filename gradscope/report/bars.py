"""Bars and sparklines of text."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from gradscope.report.text import short
from gradscope.stats import Histogram

_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = "_.-=+*#@"
_WIDEST = 100


def bar(share: float, width: int, ascii_only: bool = False) -> str:
    """Return a bar `share` (0 to 1) of `width` cells long; what is not zero can be seen."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    if ascii_only:
        return "#" * ((eighths + 7) // 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def sparkline(values: Sequence[float | None], width: int, ascii_only: bool = False) -> str:
    """Return one letter a value, from the least to the largest; evenly thinned to `width`.

    What is unknown is a space.
    """
    levels = _PLAIN_LEVELS if ascii_only else _LEVELS
    if len(values) > width > 1:
        values = [values[round(k * (len(values) - 1) / (width - 1))] for k in range(width)]
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) / (len(levels) - 1) or 1.0
    return "".join(" " if v is None else levels[round((v - low) / step)] for v in values)


def print_histogram(console: Console, histogram: Histogram) -> None:
    """Print one line a bin: its edges, a bar, its count."""
    ascii_only = console.options.ascii_only
    labels = [
        f"{short(low)} to {short(high)}"
        for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)
    ]
    counts = list(histogram.counts)
    if histogram.zeros:
        labels, counts = ["zero", *labels], [histogram.zeros, *counts]
    left = max(map(len, labels), default=0)
    right = max((len(f"{n:,}") for n in counts), default=0)
    width = max(1, min(_WIDEST, console.width - left - right - 4))
    most = max(counts, default=1)
    for label, n in zip(labels, counts, strict=True):
        line = Text(f"{label:>{left}}  {n:>{right},}  ")
        line.append(bar(n / most, width, ascii_only), style="cyan")
        console.print(line, soft_wrap=True)
