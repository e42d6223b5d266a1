"""The history of a training run: statistics of its steps, in a file of JSON lines."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import hypot, isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gradscope.core.texts import count
from gradscope.errors import OutputError, ResultFileError
from gradscope.stats.builtin.batch import NoiseScale
from gradscope.stats.builtin.norms import Clip
from gradscope.stats.records import Record, spread
from gradscope.stats.sections import (
    NONE,
    Brief,
    Column,
    CurvePicture,
    Displayable,
    Fact,
    Overview,
    Picture,
    Section,
    Sparkline,
    Table,
    count_column,
    duration,
    interval_text,
    numbers,
    percent,
    short,
)
from gradscope.stats.summary import Summary

_SUFFIX = ".jsonl"
_SHOWN = 20  # steps in the table
_DRAWN = 8  # parameters in a picture
_BRIEF = 5  # parameters in the short form
_NAMED = 5  # numbers of lines or steps that a warning lists

_FORMULA = "B_simple = trΣ / |G|² (McCandlish et al. 2018)"
Points = list[tuple[float, float]]
Band = Sequence[tuple[float, float, float | None]]
Count = Annotated[int, Field(ge=0, lt=2**53)]


class ParameterStep(Record):
    """One parameter at one step: mean ‖gᵢ‖, ‖G‖, ‖G‖² / (mean‖gᵢ‖² − ‖G‖²)."""

    name: str
    mean_norm: float | None
    mean_gradient_norm: float | None
    signal_to_noise: float | None


class Cost(Record):
    """The time of measurements, in wall-clock seconds."""

    seconds: float  # time of this measurement
    proof_seconds: float  # time of all proofs so far
    overhead: float | None  # time of all measurements so far / time of training without them
    budget: float | None  # the limit for `overhead`
    interval: Count  # expected steps to the next measurement


class Step(Record):
    """The statistics of one step, in one line of the file; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore")

    schema_: Literal["gradscope.step"] = "gradscope.step"
    version: Literal[1] = 1
    step: Count
    samples: Count
    nonfinite: Count
    loss: float | None
    norm_mean: float | None
    norm_median: float | None
    norm_90: float | None
    mean_gradient_norm: float | None
    noise_scale: NoiseScale
    opposing: float | None
    mean_cosine: float | None
    evidence: float | None
    parameters: tuple[ParameterStep, ...]
    norm_percentiles: dict[str, float] | None = None
    clipped: tuple[Clip, ...] = ()
    cost: Cost | None = None

    @classmethod
    def of(cls, step: int, summary: Summary, cost: Cost | None = None) -> "Step":
        """Return the step with the numbers of a summary that a history stores."""
        norm, directions, clipping = summary.norm, summary.directions, summary.clipping
        lengths: Any = [row.mean_gradient_norm for row in summary.parameters]
        return cls(
            step=step,
            samples=summary.finite,
            nonfinite=summary.nonfinite.count,
            loss=None if summary.loss is None else summary.loss.mean,
            norm_mean=None if norm is None else norm.mean,
            norm_median=None if norm is None else norm.median,
            norm_90=None if norm is None else norm.percentiles["90"],
            mean_gradient_norm=None if None in lengths else hypot(*lengths),
            noise_scale=summary.noise_scale,
            opposing=None if directions is None else directions.opposing,
            mean_cosine=None if directions is None else directions.cosine.mean,
            evidence=summary.signal.evidence,
            parameters=tuple(
                ParameterStep(**row.model_dump(include=set(ParameterStep.model_fields)))
                for row in summary.parameters
            ),
            norm_percentiles=None if norm is None else norm.percentiles,
            clipped=() if clipping is None else clipping.asked,
            cost=cost,
        )


class End(Record):
    """The last line of a history: the training or its measurements have ended."""

    model_config = ConfigDict(extra="ignore")

    schema_: Literal["gradscope.end"] = "gradscope.end"
    version: Literal[1] = 1
    step: Count
    overhead: float | None = None
    reason: str | None = None

    @property
    def text(self) -> str:
        """The end in one line."""
        return f"ended at step {self.step:,}" + (f": {self.reason}" if self.reason else "")


_LINE: TypeAdapter[Step | End] = TypeAdapter(Annotated[Step | End, Field(discriminator="schema_")])

CURVES: dict[str, Callable[[Step], float | None]] = {
    "loss": lambda step: step.loss,
    "median norm": lambda step: step.norm_median,
    "norm of mean": lambda step: step.mean_gradient_norm,
    "noise scale": lambda step: step.noise_scale.simple,
    "opposed": lambda step: step.opposing,
}


class History(Record, Displayable):
    """All steps of a run, sorted by number, and the path of the file."""

    schema_: Literal["gradscope.history"] = "gradscope.history"
    version: Literal[1] = 1
    path: str
    steps: tuple[Step, ...]
    end: End | None = None  # the end, if the file has ended
    broken: tuple[int, ...] = ()  # numbers of invalid lines

    def overview(self) -> Overview:
        """Return the overview: the curves, and a table of at most 20 evenly spread steps."""
        steps = self.steps
        curves = _curves(steps)
        shown = Table(_columns([steps[k] for k in spread(len(steps), _SHOWN)]))
        facts, warnings = self._facts(), self._warnings()
        learning = [Section("What learns", table=_learning(steps[-1]))] if _strongest(steps) else []
        return Overview(
            paths=[self.path],
            facts=facts,
            warnings=warnings,
            sections=[
                Section("Over time", curves, formulas=[_FORMULA]),
                *learning,
                Section("Steps", table=shown),
            ],
            pictures=list(_pictures({"": steps})),
            brief=Brief(
                facts,
                [Section("Over time", curves), *learning],
                "--full shows each step; --plot and --html draw them.",
            ),
        )

    def _warnings(self) -> list[str]:
        """Return warnings about invalid lines, and about steps with nonfinite samples."""
        warnings = []
        if self.broken:
            said = f"ignored {count(len(self.broken), 'line')} without a complete record"
            warnings.append(f"{said}: {_first(self.broken)}")
        if lost := [step.step for step in self.steps if step.nonfinite]:
            said = f"samples without a finite gradient are ignored at {count(len(lost), 'step')}"
            warnings.append(f"{said}: {_first(lost)}")
        return warnings

    def _facts(self) -> list[Fact]:
        first, last = self.steps[0], self.steps[-1]
        facts: list[Fact] = [
            ("steps", f"{count(len(self.steps), 'step')}, {first.step:,} to {last.step:,}"),
            ("samples", f"{last.samples:,}"),
            ("parameters", f"{len(last.parameters):,}"),
        ]
        if last.cost is not None:
            facts += [("overhead", self._overhead(last.cost)), ("measuring", self._seconds())]
        if self.end is not None:
            facts.append(("training", self.end.text))
        return facts

    def _overhead(self, latest: Cost) -> str:
        """Return the time of measurements relative to the training time, and the budget."""
        share = latest.overhead if self.end is None else self.end.overhead
        if share is None:
            return "unknown: the training has a single step"
        if latest.budget is None:
            return f"{percent(share)} of the training time"
        exceeded = "; the first and the last step exceed it" if share > latest.budget else ""
        return f"{percent(share)} of the training time, budget {percent(latest.budget)}{exceeded}"

    def _seconds(self) -> str:
        """Return the times of the first, the last and the remaining measurements."""
        costs = [step.cost for step in self.steps if step.cost is not None]
        first, *others = [cost.seconds for cost in costs]
        proof = " (with the proof)" if costs[0].proof_seconds else ""
        parts = [f"first step {duration(first)}{proof}"]
        if others:
            which = "latest" if self.end is None else "last"
            parts.append(f"{which} step {duration(others[-1])}")
        if between := others[:-1]:
            parts.append(f"other steps {duration(sum(between) / len(between))} each")
        return ", ".join(parts)


class Histories(Record, Displayable):
    """The histories of several runs."""

    schema_: Literal["gradscope.histories"] = "gradscope.histories"
    version: Literal[1] = 1
    histories: tuple[History, ...]

    def overview(self) -> Overview:
        """Return the last step of each run, and the curves of all runs in the same pictures."""
        runs = dict(zip(_names([h.path for h in self.histories]), self.histories, strict=True))
        steps = {name: history.steps for name, history in runs.items()}
        ends = [NONE if h.end is None else h.end.text for h in self.histories]
        columns = _columns([h.steps[-1] for h in self.histories])
        columns += [
            count_column("steps measured", [len(h.steps) for h in self.histories], 4),
            Column("training", ends, rank=5, justify="left"),
        ]
        latest = Table(columns, "run", [*runs])
        sections = [Section("Last steps", table=latest, formulas=[_FORMULA])]
        sections += [Section(f"Over time: {name}", _curves(own)) for name, own in steps.items()]
        return Overview(
            paths=[history.path for history in self.histories],
            facts=[("runs", f"{len(runs):,}")],
            warnings=[f"{name}: {text}" for name, h in runs.items() for text in h._warnings()],
            sections=sections,
            pictures=list(_pictures(steps)),
        )


def record(path: str | Path, step: int, summary: Summary, cost: Cost | None = None) -> Step:
    """Append one step to a file of JSON lines, which `gradscope stats` reads; return it.

    Args:
        path: The file, *.jsonl; it is created if absent.
        step: The number of the step.
        summary: The summary, from `measure` or of a result file.
        cost: The time of the measurement, if known.

    Raises:
        OutputError: The file cannot be written, or its name does not end in .jsonl.
    """
    found = Step.of(step, summary, cost)
    append(path, found)
    return found


def line(of: Step | End) -> str:
    """Return a record as a line of the file, with a newline."""
    return json.dumps(of.to_json(), ensure_ascii=False) + "\n"


def append(path: str | Path, *lines: Step | End) -> None:
    """Append lines, each in one write, so that a concurrent reader finds whole lines.

    If a stopped process left an incomplete line, it is ended by a newline, and readers ignore it.
    Without lines, the file is created if absent.

    Raises:
        OutputError: The file cannot be written, or its name does not end in .jsonl.
    """
    target = Path(path)
    if target.suffix != _SUFFIX:
        raise OutputError(f"the name of a history must end in {_SUFFIX}", where=str(path))
    texts = [*map(line, lines)]
    try:
        with target.open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if texts and size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                texts[0] = "\n" + texts[0]
            for text in texts:
                data = text.encode()
                while data:
                    data = data[file.write(data) :]
    except OSError as error:
        raise OutputError(
            f"the history cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="Check the path and the free space of its disk.",
        ) from error


class HistoryReader:
    """Reads a growing history: each call reads the lines appended since the last call.

    If a step was recorded twice, as after a restart, the last record counts. An incomplete last
    line is read by a later call. Other invalid lines are ignored and counted.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._forget()

    def _forget(self) -> None:
        self._place, self._lines, self._file = 0, 0, (0, 0)
        self._steps: dict[int, Step] = {}
        self._end: End | None = None
        self._broken: list[int] = []

    def read(self) -> tuple[History | None, list[Step]]:
        """Return the history (None if it has no step yet) and the new steps.

        Raises:
            ResultFileError: The file cannot be read, or has ended without a step.
        """
        try:
            new = self._appended()
        except OSError as error:
            raise ResultFileError(
                f"the history cannot be read: {error.strerror}",
                where=str(self.path),
                remedy="Give a file of JSON lines that a Monitor has written.",
            ) from error
        *whole, rest = new.split(b"\n")
        found = [step for one in whole if (step := self._line(one, len(one) + 1)) is not None]
        if rest.strip() and _parsed(rest) is not None:  # only the newline is missing
            found += filter(None, [self._line(rest, len(rest))])
            self._lines -= 1
        if not self._steps:
            if self._end is not None:
                raise self.empty()
            return None, []
        steps = tuple(self._steps[key] for key in sorted(self._steps))
        broken = tuple(self._broken)
        return History(path=str(self.path), steps=steps, end=self._end, broken=broken), found

    def empty(self) -> ResultFileError:
        """Return the error for a file without a step."""
        remedy = self._end.text if self._end is not None else None
        if self._broken:
            return ResultFileError(
                "the line is not a recorded step", where=f"{self.path}: line {self._broken[0]}"
            )
        return ResultFileError("the history has no step", where=str(self.path), remedy=remedy)

    def _appended(self) -> bytes:
        """Return the bytes after the lines read so far; all bytes if the file was replaced."""
        if self.path.exists() and not self.path.is_file() and not self.path.is_dir():
            raise OSError(None, "this is not a regular file")  # reading a pipe would block
        with self.path.open("rb") as file:
            told = os.fstat(file.fileno())
            if self._file != (told.st_dev, told.st_ino) or told.st_size < self._place:
                self._forget()
                self._file = told.st_dev, told.st_ino
            file.seek(self._place)
            return file.read()

    def _line(self, line: bytes, size: int) -> Step | None:
        """Add one line of `size` bytes; return its step, or None if it has no step."""
        self._place += size
        self._lines += 1
        if not line.strip():
            return None
        found = _parsed(line)
        if isinstance(found, Step):
            self._steps[found.step], self._end = found, None
            return found
        if found is None:
            self._broken.append(self._lines)
        self._end = found or self._end
        return None


def _parsed(line: bytes) -> Step | End | None:
    try:
        return _LINE.validate_json(line)
    except ValidationError:
        return None


def read_history(path: str | Path) -> History:
    """Read all steps of a history; if a step was recorded twice, the last record counts.

    Raises:
        ResultFileError: The file cannot be read, or has no step.
    """
    reader = HistoryReader(path)
    found, _ = reader.read()
    if found is None:
        raise reader.empty()
    return found


def read_histories(paths: Sequence[str | Path]) -> Histories:
    """Read several histories.

    Raises:
        ResultFileError: A file cannot be read, or has no step.
    """
    return Histories(histories=tuple(read_history(path) for path in paths))


def _names(paths: Sequence[str]) -> list[str]:
    """Return names of runs: the shortest ends of their paths that are unique."""
    parts = [Path(path).absolute().with_suffix("").parts for path in paths]
    for k in range(1, max(map(len, parts))):
        names = ["/".join(one[-k:]) for one in parts]
        if len({*names}) == len(names):
            return names
    return [f"{name} ({k})" for k, name in enumerate(names, 1)]  # a file was given twice


def _first(numbered: Sequence[int]) -> str:
    return ", ".join(map(str, numbered[:_NAMED])) + (", ..." if len(numbered) > _NAMED else "")


def _curves(steps: Sequence[Step]) -> list[Fact]:
    """Return a sparkline of each number, with its last value."""
    facts: list[Fact] = []
    for name, take in CURVES.items():
        values = [take(step) for step in steps]
        show = percent if name == "opposed" else short
        facts.append((name, Sparkline(values, show(values[-1]))))
    for clip in steps[-1].clipped:
        values = [{c.norm: c.clipped for c in s.clipped}.get(clip.norm) for s in steps]
        facts.append((f"over {short(clip.norm)}", Sparkline(values, percent(clip.clipped))))
    return facts


def _learning(step: Step) -> Table:
    """Return a table of the parameters with the largest signal to noise."""
    rows = _strongest([step])[:_BRIEF]
    columns = [
        numbers("signal to noise", [row.signal_to_noise for row in rows]),
        numbers("mean norm", [row.mean_norm for row in rows], 1),
        numbers("norm of mean", [row.mean_gradient_norm for row in rows], 2),
    ]
    return Table(columns, "parameter", [row.name for row in rows])


def _strongest(steps: Sequence[Step]) -> list[ParameterStep]:
    """Return the parameters of the last step, sorted by signal to noise, the largest first."""
    return sorted(steps[-1].parameters, key=lambda p: -(p.signal_to_noise or 0.0))


def _columns(steps: Sequence[Step]) -> list[Column]:
    ranks, shown = {"norm of mean": 1, "opposed": 2}, {"opposed": percent}
    columns = [count_column("step", [s.step for s in steps])]
    for name, take in CURVES.items():
        show = shown.get(name, short)
        columns.append(numbers(name, [take(s) for s in steps], ranks.get(name, 0), show))
    if any(s.nonfinite for s in steps):
        columns.append(count_column("not finite", [s.nonfinite for s in steps]))
    intervals = [s.noise_scale.simple_interval for s in steps]
    if any(intervals):
        lows = [None if i is None else i.low for i in intervals]
        texts = [interval_text(i) for i in intervals]
        columns.insert(5, Column("95%", texts, rank=3, values=lows))
    return columns


def _pictures(runs: Mapping[str, Sequence[Step]]) -> Iterator[Picture]:
    """Yield pictures: each number over all runs, and signal to noise of parameters by run."""

    def drawn(label: str, title: str, curves: dict[str, Points], **more: Any) -> Picture:
        curves = {name: points for name, points in curves.items() if points}
        return CurvePicture(
            label=label,
            title=title,
            across="step",
            empty="" if curves else "not known at any step",
            curves=curves,
            interactive=True,
            **more,
        )

    for title, take in CURVES.items():
        known = {name: _points(steps, take) for name, steps in runs.items()}
        bands = {name: _band(steps) for name, steps in runs.items() if known[name]}
        more = {"bands": {k: b for k, b in bands.items() if b}} if title == "noise scale" else {}
        yield drawn(f"{title} by step", title, known, **more)
    for run, steps in runs.items():
        of = f", {run}" if run else ""
        curves = {
            layer.name: _points(steps, partial(_signal_to_noise, layer.name))
            for layer in _strongest(steps)[:_DRAWN]
        }
        label = f"signal to noise of the parameters by step{of}"
        yield drawn(label, f"signal to noise{of}", curves)


def _points(steps: Sequence[Step], take: Callable[[Step], float | None]) -> Points:
    known = [(step.step, take(step)) for step in steps]
    return [(step, value) for step, value in known if value is not None and isfinite(value)]


def _band(steps: Sequence[Step]) -> Band:
    """Return the interval of the noise scale at each step that has one."""
    intervals = [(step.step, step.noise_scale.simple_interval) for step in steps]
    return [(step, i.low, i.high) for step, i in intervals if i is not None and i.low]


def _signal_to_noise(name: str, step: Step) -> float | None:
    found = (p.signal_to_noise for p in step.parameters if p.name == name)
    return next(found, None) or None  # a logarithmic axis has no zero
