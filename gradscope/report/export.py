"""What `gradscope export` has written."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from gradscope.report.text import count, size, visible
from gradscope.report.text import shape as shape_text
from gradscope.storage import Exported


def render_export(found: Sequence[Exported], console: Console) -> None:
    """Print each file with its size and what is in it."""
    for one in found:
        line = f"{one.path}: {_what(one)}, {size(one.bytes)}"
        console.print(Text(visible(line)), soft_wrap=True)


def _what(one: Exported) -> str:
    if one.shape is None:
        return count(len(one.names), "parameter")
    if len(one.names) == 1:
        return f"{one.names[0]} {shape_text(one.shape)}"
    return f"{count(one.shape[0], 'sample')}, {count(one.shape[1], 'column')}"
