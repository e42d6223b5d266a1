"""Which of several exact ways was taken where, as `compare` and `--dry-run` tell it."""

from collections.abc import Sequence

from rich.console import Console

from gradscope.blocks import Chosen
from gradscope.report.layout import Column, heading, names_table
from gradscope.report.text import duration


def render_ways(choices: Sequence[Chosen], console: Console, *, measured: bool = True) -> None:
    """Print a row a request: the way that was the fastest, its time, and what it was against."""
    if not choices:
        return
    heading(console, "Ways that were measured" if measured else "Ways, and the time they may take")
    columns = [
        Column(
            "fastest" if measured else "way", [choice.variant for choice in choices], justify="left"
        ),
        Column("time", [duration(choice.seconds.get(choice.variant)) for choice in choices]),
        Column("others", [_others(choice) for choice in choices], rank=1, justify="left"),
    ]
    names_table(console, "request", [choice.request for choice in choices], columns)


def _others(choice: Chosen) -> str:
    rest = ((name, spent) for name, spent in choice.seconds.items() if name != choice.variant)
    return ", ".join(f"{name} {duration(spent)}" for name, spent in rest)
