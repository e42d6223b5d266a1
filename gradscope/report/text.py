"""Names and numbers as text: safe to show, short, and never two alike."""

import math
import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len

_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
NONE = "-"


def visible(text: str, keep: str = "") -> str:
    r"""Replace control, format and other unprintable characters by escapes like \x1b.

    Args:
        text: From a model, a file or a user.
        keep: Characters to leave alone, such as a line break.
    """
    return "".join(
        character if character in keep or unicodedata.category(character) not in _UNSAFE
        # repr's escapes, and no more of its quotes
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )  # fmt: skip


def fit_names(names: Sequence[str], width: int) -> list[str]:
    """Return the names made visible, the long ones cut in the middle to `width` cells.

    The cut keeps as many letters on either side as tells all names apart, the same for all. When
    no cut does, no name is cut, and the table wraps them.
    """
    shown = [visible(name) for name in names]
    longest = max(map(cell_len, shown), default=0)
    if longest <= width or width < 5:
        return shown
    middle = (width - 1) // 2
    distinct = len(set(shown))
    for head in sorted(range(width - 1), key=lambda k: abs(k - middle)):
        cut = [_cut(name, head, width) for name in shown]
        if len(set(cut)) == distinct:
            return cut
    return shown


def _cut(name: str, head: int, width: int) -> str:
    if cell_len(name) <= width:
        return name
    left, right = _take(name, head), _take(name[::-1], width - 1 - head)[::-1]
    return f"{left}…{right}"


def _take(text: str, cells: int) -> str:
    """Return the longest beginning of `text` that fills at most `cells` cells."""
    used = 0
    for k, character in enumerate(text):
        used += cell_len(character)
        if used > cells:
            return text[:k]
    return text


def short(value: float | None) -> str:
    """Return a number with three significant digits."""
    if value is None:
        return NONE
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if 1e-3 <= abs(value) < 999.5:
        return f"{value:#.3g}".rstrip(".")
    if 999.5 <= abs(value) < 99999.5:
        return f"{value:.0f}"
    return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def percent(share: float | None) -> str:
    """Return a share of one as a percentage."""
    if share is None:
        return NONE
    return "<0.1%" if 0 < share < 0.0005 else f"{100 * share:.1f}%"


def count(n: int, noun: str) -> str:
    """Return "1 sample", "1,797 samples"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def shape(dimensions: Sequence[int]) -> str:
    """Return "64x3x7x7", or "scalar"."""
    return "x".join(map(str, dimensions)) or "scalar"


def size(n: int | None) -> str:
    """Return a number of bytes, in powers of 1000."""
    if n is None:
        return NONE
    power = 0
    value = float(n)
    while value >= 999.5 and power < len(_UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_UNITS[power]}"


def duration(seconds: float | None) -> str:
    """Return "12.3 ms", "4.56 s", "2 min 03 s", "1 h 05 min"."""
    if seconds is None:
        return NONE
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
