"""An error as the user sees it: what, where, remedy; no traceback."""

from rich.console import Console
from rich.text import Text

from gradscope.errors import GradscopeError
from gradscope.report.text import visible


def render_error(error: GradscopeError, console: Console) -> None:
    """Print "error: where: what", and the remedy on the lines after it.

    Lines are left to the terminal to wrap, so that a caret stays under what it points at.

    Args:
        error: What was raised.
        console: On stderr.
    """
    head = error.what if error.where is None else f"{error.where}: {error.what}"
    text = Text.assemble(("error", "bold red"), ": ", visible(head, keep="\n"))
    if error.remedy is not None:
        text.append("\n" + visible(error.remedy, keep="\n"))
    console.print(text, soft_wrap=True)
