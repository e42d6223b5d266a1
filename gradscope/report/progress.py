"""Progress on stderr: a wrapper around the iterator of batches, so no computation knows of it."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

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

from gradscope.report.console import console as make_console
from gradscope.report.text import count, duration, short

T = TypeVar("T")
Report = Callable[[int], None]  # how many more are done

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
    """Yield the batches and show how far it has come: a bar on a terminal, else plain lines.

    A batch counts as done when the next one is asked for. Loop over the result without giving it
    a name: then the bar is gone as soon as an exception leaves the loop.

    Args:
        batches: What to go through.
        total: How many units there are, when known.
        unit: Their name, in the plural.
        size: The units in a batch; its length if not given.
        quiet: Show nothing.
        console: On stderr if not given.
        clock: Seconds.
    """
    target = console or make_console(stderr=True)
    shown: AbstractContextManager[Report]
    if quiet:
        shown = nullcontext(lambda n: None)
    elif target.is_terminal and not target.is_dumb_terminal:
        shown = _bar(target, total, unit)
    else:
        shown = _lines(target, total, unit, clock)
    length = size or _length
    with shown as done:
        for batch in batches:
            yield batch
            done(length(batch))


def _length(batch: object) -> int:
    return len(batch)  # type: ignore[arg-type]


@contextmanager
def _bar(console: Console, total: int | None, unit: str) -> Iterator[Report]:
    columns = (BarColumn(None), MofNCompleteColumn(), _Rate(unit), TimeRemainingColumn())
    # expand: the bar takes what is left; transient: the result follows on a clean screen
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
    seen = 0

    def done(n: int) -> None:
        nonlocal seen, last
        seen += n
        now = clock()
        if now - last >= _EVERY:
            last = now
            _say(console, _line(seen, total, unit, now - start))

    yield done
    seconds = clock() - start
    rate = f", {short(seen / seconds)} {unit}/s" if seconds > 0 else ""
    noun = count(seen, unit.removesuffix("s"))
    _say(console, f"{noun} in {duration(seconds)}{rate}")


def _line(seen: int, total: int | None, unit: str, seconds: float) -> str:
    rate = seen / seconds
    speed = f"{short(rate)} {unit}/s"
    if total is None:
        return f"{count(seen, unit.removesuffix('s'))}, {speed}"
    left = f", {duration((total - seen) / rate)} left" if seen else ""
    return f"{seen:,} of {total:,} {unit}, {speed}{left}"


def _say(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)
