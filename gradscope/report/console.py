"""Consoles, errors as shown to the user, and shortened names that stay distinct."""

from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from gradscope.core.texts import visible
from gradscope.errors import GradscopeError
from gradscope.process import streams

_LONGEST, _MOST = 5000, 60  # the most characters of a line of an error, and the most lines


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that the command handles it; rich would exit and lose stdout."""
        raise


def console(
    *, stderr: bool = False, color: bool | None = None, file: TextIO | None = None
) -> Console:
    """Return a console on stdout, on stderr, or on a `file`; `color` False switches colour off.

    Only a terminal gets escape sequences, also with FORCE_COLOR. NO_COLOR and COLUMNS are used. A
    pipe is 80 columns wide by default.
    """
    stream = file or (streams.err() if stderr else streams.out())
    if not (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf"):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # an old locale shows ? for missing letters
    terminal = bool(getattr(stream, "isatty", lambda: False)())
    return _Console(
        file=stream,
        force_terminal=terminal,
        force_interactive=terminal,
        no_color=True if color is False else None,
        markup=False,
        emoji=False,
        highlight=False,
    )


def render_error(error: GradscopeError, console: Console) -> None:
    """Print "error: where: what" and the remedy on the next lines, without traceback.

    The terminal wraps lines, so that a caret stays at its column. A line of thousands of characters
    is shortened in the middle.
    """
    text = Text.assemble(("error", "bold red"), ": ", visible(_cut(error.head), keep="\n"))
    if error.remedy is not None:
        text.append("\n" + visible(_cut(error.remedy), keep="\n"))
    console.print(text, soft_wrap=True)


def _cut(text: str) -> str:
    lines = text.split("\n")
    shown = lines if len(lines) <= _MOST else [*lines[: _MOST - 1], "..."]
    half = _LONGEST // 2
    return "\n".join(x if len(x) <= _LONGEST else f"{x[:half]} ... {x[-half:]}" for x in shown)


def fit_names(names: Sequence[str], width: int) -> list[str]:
    """Return the names made visible, with long names shortened in the middle to `width` cells.

    All names keep the same number of letters at each end, chosen so that they stay distinct. If
    this is impossible, no name is shortened, and the table wraps them.
    """
    shown = [visible(name) for name in names]
    if width < 5 or max(map(cell_len, shown), default=0) <= width:
        return shown
    middle = (width - 1) // 2
    distinct = len(set(shown))
    for head in sorted(range(width - 1), key=lambda k: abs(k - middle)):
        cut = [_shortened(name, head, width) for name in shown]
        if len(set(cut)) == distinct:
            return cut
    return shown


def _shortened(name: str, head: int, width: int) -> str:
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
