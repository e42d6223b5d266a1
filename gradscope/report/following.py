"""The display of a growing history."""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gradscope.core.texts import visible
from gradscope.report.terminal import render
from gradscope.stats.sections import percent, short
from gradscope.training.history import CURVES, History, HistoryReader, Step

_POLL = 0.5  # seconds between reads of the file

OnSteps = Callable[[History | None, Sequence[Step]], None]  # the history so far, its new steps


def follow(reader: HistoryReader, console: Console, on_steps: OnSteps | None = None) -> History:
    """Show a growing history until its training ends, and return the history.

    Args:
        reader: The reader of the file, which may still be empty.
        console: A terminal shows one screen; other outputs get a line for each step.
        on_steps: Called with new steps instead of showing them.
    """
    with _display(console, on_steps) as show:
        while True:
            found, new = reader.read()
            show(found, new)
            if found is not None and found.end is not None:
                return found
            time.sleep(_POLL)


@contextmanager
def _display(console: Console, on_steps: OnSteps | None) -> Iterator[OnSteps]:
    if on_steps is not None:
        yield on_steps
    elif not console.is_terminal or console.is_dumb_terminal:
        yield lambda found, new: _print(found, new, console)
    else:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            drawn: object = None

            def show(found: History | None, new: Sequence[Step]) -> None:
                nonlocal drawn
                now = console.size, found and (len(found.steps), found.broken)
                if new or drawn != now:
                    drawn = now
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
    """Return the history cut to the terminal's height, with a last line on how to leave."""
    width, height = console.size
    lines = [Text("no step has been measured yet", style="yellow")]
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
    last = Text("Ctrl-C closes; the training continues", style="dim", end="")
    last.truncate(width)
    return Text("\n", no_wrap=True, end="").join([*lines[: max(0, height - 1)], last])
