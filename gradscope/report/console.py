"""Consoles: where results and notices go, and in what form."""

from typing import TextIO

from rich.console import Console

from gradscope.core import streams


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command what becomes of it; rich would exit, and swallow stdout."""
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
