"""Consoles: where results and notices go, and in what form; errors as the user sees them."""

from typing import TextIO

from rich.console import Console
from rich.text import Text

from gradscope.core import streams
from gradscope.errors import GradscopeError
from gradscope.report.text import visible

_LONGEST, _MOST = 5000, 60  # characters of a line of an error, and lines


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command handle it; rich would exit, and swallow stdout."""
        raise


def console(
    *, stderr: bool = False, color: bool | None = None, file: TextIO | None = None
) -> Console:
    """Return a console on stdout, or on stderr.

    Escape sequences go to a terminal only, whatever FORCE_COLOR says. NO_COLOR and COLUMNS are
    honoured; a pipe is 80 columns wide unless COLUMNS says otherwise.

    Args:
        stderr: Write to stderr.
        color: False switches colour off; None leaves it to the terminal and NO_COLOR.
        file: Write here instead.
    """
    stream = file or (streams.err() if stderr else streams.out())
    if not (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf"):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # an old locale shows ? where it has no such letter
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
    """Print "error: where: what", and the remedy on the lines after it; no traceback.

    Lines are left to the terminal to wrap, so that a caret stays under what it points at. A line
    of thousands of characters, which no one reads, is cut in the middle.

    Args:
        error: What was raised.
        console: On stderr.
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
