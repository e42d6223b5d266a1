"""Progress of a command on stderr, and the display of a growing history.

Progress wraps the iterator of batches, so computations do not depend on it.
"""

import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from gradscope.core.texts import count, visible
from gradscope.report.console import console as make_console
from gradscope.report.terminal import render
from gradscope.stats.sections import duration, percent, short
from gradscope.training.history import CURVES, History, HistoryReader, Step

T = TypeVar("T")
Report = Callable[[int], None]  # called with the number of further units that are done

_EVERY = 5.0  # seconds between plain lines


def track(
    batches: Iterable[T],
    total: int | None,
    *,
    unit: str = "samples",
    size: Callable[[T], int] | None = None,
    quiet: bool = False,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield the batches and show progress: a bar on a terminal, else plain lines.

    A batch is done when the next batch is requested. It has `size` units (by default its length)
    of `total`, if that is known. Loop over the result without naming it, so that the bar disappears
    as soon as an exception leaves the loop.
    """
    target = console or make_console(stderr=True)
    shown: AbstractContextManager[Report]
    if quiet:
        shown = nullcontext(lambda n: None)
    elif target.is_terminal and not target.is_dumb_terminal:
        shown = _bar(target, total, unit)
    else:
        shown = _lines(target, total, unit, clock)
    length: Callable[[Any], int] = size or len
    with shown as done:
        for batch in batches:
            yield batch
            done(length(batch))


@contextmanager
def _bar(console: Console, total: int | None, unit: str) -> Iterator[Report]:
    columns = (BarColumn(None), MofNCompleteColumn(), _Rate(unit), TimeRemainingColumn())
    # expand: the bar fills the line; transient: it is removed at the end
    with Progress(*columns, console=console, expand=True, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda n: progress.advance(task, n)


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        self._unit = unit
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{short(speed)} {self._unit}/s")


@contextmanager
def _lines(
    console: Console, total: int | None, unit: str, clock: Callable[[], float]
) -> Iterator[Report]:
    start = last = clock()
    seen, noun = 0, unit.removesuffix("s")

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    def done(n: int) -> None:
        nonlocal seen, last
        seen += n
        now = clock()
        if now - last < _EVERY:
            return
        last, rate = now, seen / (now - start)
        speed = f"{short(rate)} {unit}/s"
        if total is None:
            say(f"{count(seen, noun)}, {speed}")
        else:
            left = f", {duration((total - seen) / rate)} left" if seen else ""
            say(f"{seen:,} of {total:,} {unit}, {speed}{left}")

    yield done
    seconds = clock() - start
    rate = f", {short(seen / seconds)} {unit}/s" if seconds > 0 else ""
    say(f"{count(seen, noun)} in {duration(seconds)}{rate}")


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
