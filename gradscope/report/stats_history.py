"""`gradscope stats RUN.jsonl`: the statistics of a training, step by step, in sections."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from gradscope.report.layout import Column, facts, numbers, whole
from gradscope.report.sections import Fact, Section, Spark, Table, print_sections
from gradscope.report.text import NONE, count, percent, short, visible
from gradscope.stats import History, Step

_SHOWN = 20

CURVES: Sequence[tuple[str, Callable[[Step], float | None]]] = (
    ("loss", lambda step: step.loss),
    ("median norm", lambda step: step.norm_median),
    ("norm of mean", lambda step: step.mean_gradient_norm),
    ("noise scale", lambda step: step.noise_scale.simple),
    ("opposed", lambda step: step.opposing),
)


def render_history(history: History, console: Console) -> None:
    """Print a curve a number, then a row a step."""
    console.print(Text(visible(history.path), style="bold"), overflow="fold")
    facts(console, file_facts(history))
    print_sections(sections(history), console)


def file_facts(history: History) -> list[tuple[str, str | Text]]:
    """Return what was recorded."""
    steps = history.steps
    return [
        ("steps", f"{count(len(steps), 'step')}, {steps[0].step:,} to {steps[-1].step:,}"),
        ("samples", f"{steps[-1].samples:,}"),
        ("parameters", f"{len(steps[-1].parameters):,}"),
    ]


def sections(history: History) -> list[Section]:
    """Return the curves, and at most 20 steps, evenly spread."""
    steps = history.steps
    curves: list[Fact] = [(name, Spark([take(s) for s in steps])) for name, take in CURVES]
    last = len(steps) - 1
    some = [steps[round(k * last / (_SHOWN - 1))] for k in range(_SHOWN)]
    return [
        Section("Over time", "history", curves),
        Section("Steps", table=_table(steps if len(steps) <= _SHOWN else some)),
    ]


def _table(steps: Sequence[Step]) -> Table:
    columns = [
        whole("step", [s.step for s in steps]),
        numbers("loss", [s.loss for s in steps]),
        numbers("median norm", [s.norm_median for s in steps]),
        numbers("norm of mean", [s.mean_gradient_norm for s in steps], rank=1),
        numbers("noise scale", [s.noise_scale.simple for s in steps]),
        numbers("opposed", [s.opposing for s in steps], rank=2, show=percent),
    ]
    if any(s.nonfinite for s in steps):
        columns.append(whole("not finite", [s.nonfinite for s in steps]))
    if any(s.noise_scale.simple_interval for s in steps):
        columns.insert(5, _between(steps))
    return Table(columns)


def _between(steps: Sequence[Step]) -> Column:
    found = [step.noise_scale.simple_interval for step in steps]
    cells = [
        NONE
        if i is None
        else f"{short(i.low)} or more"
        if i.high is None
        else f"{short(i.low)} to {short(i.high)}"
        for i in found
    ]
    return Column("95%", cells, rank=3)
