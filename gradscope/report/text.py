"""Names as text: safe to show, and never two of one look."""

import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len

_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


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
    if width < 5 or max(map(cell_len, shown), default=0) <= width:
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
    return f"{_take(name, head)}…{_take(name[::-1], width - 1 - head)[::-1]}"


def _take(text: str, cells: int) -> str:
    """Return the longest beginning of `text` that fills at most `cells` cells."""
    used = 0
    for k, character in enumerate(text):
        used += cell_len(character)
        if used > cells:
            return text[:k]
    return text
