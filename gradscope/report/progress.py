"""Progress of a command on stderr.

Progress wraps the iterator of batches, so computations do not depend on it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from rich.console import Console
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

from gradscope.core.texts import count
from gradscope.report.console import console as make_console
from gradscope.stats.sections import duration, short

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
