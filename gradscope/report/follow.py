"""A training's history while it grows: one screen that is drawn anew, or a line a step."""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gradscope.core.markup import visible
from gradscope.report.terminal import render
from gradscope.stats import History, Step
from gradscope.stats.sections import percent, short
from gradscope.stats.training import CURVES, HistoryReader

_EVERY = 0.5  # seconds between looks at the file

Show = Callable[[History | None, Sequence[Step]], None]  # all there is, and what of it is new


def follow(reader: HistoryReader, console: Console, tell: Show | None = None) -> History:
    """Show a history as it grows, until its training has ended, and return it then.

    Args:
        reader: Of the file; it may be empty as yet.
        console: A terminal shows one screen, anything else gets a line a step.
        tell: Is told what is new in their place.
    """
    with _shown(console, tell) as show:
        while True:
            found, new = reader.read()
            show(found, new)
            if found is not None and found.end is not None:
                return found
            time.sleep(_EVERY)


@contextmanager
def _shown(console: Console, tell: Show | None) -> Iterator[Show]:
    if tell is not None:
        yield tell
    elif not console.is_terminal or console.is_dumb_terminal:
        yield lambda found, new: _print(found, new, console)
    else:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            drawn: tuple[int, int] | None = None

            def show(found: History | None, new: Sequence[Step]) -> None:
                nonlocal drawn
                if new or drawn != console.size:
                    drawn = console.size
                    live.update(_screen(found, console), refresh=True)

            yield show


def _print(found: History | None, new: Sequence[Step], console: Console) -> None:
    """Print a line for each new step, and one for the end."""
    for step in new:
        curves = ((name, take(step)) for name, take in CURVES.items())
        parts = [f"{n} {percent(v) if n == 'opposed' else short(v)}" for n, v in curves]
        if step.cost is not None:
            parts.append(f"overhead {percent(step.cost.overhead)}")
        console.print(Text(f"step {step.step:,}: {', '.join(parts)}"), soft_wrap=True)
    if found is not None and found.end is not None:
        console.print(Text(visible(f"training {found.end.text}")), soft_wrap=True)


def _screen(found: History | None, console: Console) -> Text:
    """Return what fits the terminal, with a last line that says how to leave."""
    width, height = console.size
    lines = [Text("no step is measured yet", style="yellow")]
    if found is not None:
        file = io.TextIOWrapper(io.BytesIO(), console.encoding, "replace")
        inner = Console(
            file=file,
            width=width,
            force_terminal=True,
            color_system=console.color_system,  # type: ignore[arg-type]
            no_color=console.no_color,
            markup=False,
            emoji=False,
            highlight=False,
        )
        render(found, inner, full=False)
        file.seek(0)
        lines = list(Text.from_ansi(file.read()).split(allow_blank=True))
    last = Text("Ctrl-C leaves; the training goes on", style="dim", end="")
    last.truncate(width)
    return Text("\n", no_wrap=True, end="").join([*lines[: max(0, height - 1)], last])
