"""An error as the user sees it: what, where, remedy; no traceback."""

from rich.console import Console
from rich.text import Text

from gradscope.errors import GradscopeError
from gradscope.report.text import visible

_LONGEST, _MOST = 5000, 60  # characters of a line, lines


def render_error(error: GradscopeError, console: Console) -> None:
    """Print "error: where: what", and the remedy on the lines after it.

    Lines are left to the terminal to wrap, so that a caret stays under what it points at. What no
    one reads, a line of thousands of characters, is cut in the middle.

    Args:
        error: What was raised.
        console: On stderr.
    """
    head = error.what if error.where is None else f"{error.where}: {error.what}"
    text = Text.assemble(("error", "bold red"), ": ", visible(_cut(head), keep="\n"))
    if error.remedy is not None:
        text.append("\n" + visible(_cut(error.remedy), keep="\n"))
    console.print(text, soft_wrap=True)


def _cut(text: str) -> str:
    lines = text.split("\n")
    shown = lines if len(lines) <= _MOST else [*lines[: _MOST - 1], "..."]
    half = _LONGEST // 2
    return "\n".join(x if len(x) <= _LONGEST else f"{x[:half]} ... {x[-half:]}" for x in shown)
