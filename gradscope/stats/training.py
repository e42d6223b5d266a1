"""Statistics of a training run: of a batch in memory, and step by step in a file of JSON lines."""

import json
from collections.abc import Callable, Iterator, Sequence
from math import hypot, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from gradscope.blocks import wide
from gradscope.core.batch import Batch
from gradscope.engine import finite_samples
from gradscope.errors import OutputError, ResultFileError
from gradscope.scope import Scope
from gradscope.stats.builtin.batch import NoiseScale
from gradscope.stats.records import Floats, Record, cosines_of, spread
from gradscope.stats.sections import (
    Column,
    CurvePicture,
    Overview,
    Picture,
    Section,
    Shown,
    Spark,
    Table,
    between,
    count,
    numbers,
    percent,
    short,
    whole,
)
from gradscope.stats.summary import Summary, summarize

_SUFFIX = ".jsonl"
_SHOWN = 20  # steps in the table
_DRAWN = 8  # parameters in a picture

Points = list[tuple[float, float]]
Band = Sequence[tuple[float, float, float | None]]


class _Cosines(dict[str, Floats]):
    """A chain in memory: its arrays by name."""

    text, reduced = "cosine:to=mean", False


def measure(scope: Scope, inputs: Any, targets: Any = None, top: int = 10) -> Summary:
    """Return the statistics of the samples of one batch.

    No gradient is formed where the blocks know their norms and products. What needs rows (signal
    by entry, spectrum, noise between classes) is left out.

    Args:
        scope: Of a model and loss.
        inputs: A tensor, tuple or dict, sample axis first; all samples are held at once.
        targets: Likewise, or None.
        top: How many samples to list in each list.
    """
    scope.session.labels.require_one()
    evaluation = scope.evaluate(Batch.of(inputs, targets))
    gradients, finite = evaluation.gradients, _numpy(finite_samples(evaluation))
    rows = torch.from_numpy(np.flatnonzero(finite)).to(evaluation.losses.device)
    dots, lengths = np.zeros(len(rows)), {}  # ⟨gᵢ, G⟩ of the finite samples, ‖G‖ by parameter
    for name, block in gradients.items():
        kept = wide(block.select(rows))
        mean = kept.weighted_sum() / max(1, len(rows))
        dots += _numpy(kept.dot(mean).real)
        lengths[name] = float(torch.linalg.vector_norm(mean)) if len(rows) else nan
    samples = {
        "index": np.arange(len(finite)),
        "loss": _numpy(evaluation.losses),
        "norm": _numpy(gradients.norms),
        "finite": finite,
    }
    if isinstance(targets, Tensor) and targets.dim() == 1:
        samples["target"] = _numpy(targets)
    along = np.zeros(len(finite))
    sizes = samples["norm"][finite] * np.linalg.norm(list(lengths.values()))
    along[finite] = np.nan_to_num(cosines_of(dots, sizes))
    measured: Any = SimpleNamespace(  # a `Source`
        path="memory",
        n=len(finite),
        parameters={name: block.shape for name, block in gradients.items()},
        samples=samples,
        norms={name: _numpy(v.sqrt()) for name, v in gradients.squared_norms.items()},
        norm_attributes={k: {"mean_gradient_norm": length} for k, length in lengths.items()},
        chains=(_Cosines(cosine=along),),
        attributes={},
        run={"backend": scope.backend},
        certificate={} if scope.certificate is None else scope.certificate.to_json(),
    )
    return summarize(measured, top=top)


def _numpy(values: Tensor) -> Any:
    return values.detach().cpu().numpy()


class Layer(Record):
    """One parameter at one step: mean ‖gᵢ‖, ‖G‖, ‖G‖² / (mean‖gᵢ‖² − ‖G‖²)."""

    name: str
    mean_norm: float | None
    mean_gradient_norm: float | None
    signal_to_noise: float | None


class Step(Record):
    """One step: one line of the file."""

    schema_: Literal["gradscope.step"] = "gradscope.step"
    version: Literal[1] = 1
    step: int
    samples: int
    nonfinite: int
    loss: float | None
    norm_mean: float | None
    norm_median: float | None
    norm_90: float | None
    mean_gradient_norm: float | None
    noise_scale: NoiseScale
    opposing: float | None
    mean_cosine: float | None
    evidence: float | None
    parameters: tuple[Layer, ...]

    @classmethod
    def of(cls, step: int, summary: Summary) -> "Step":
        """Return what is kept of a summary."""
        norm, directions = summary.norm, summary.directions
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
                Layer(**row.model_dump(include=set(Layer.model_fields)))
                for row in summary.parameters
            ),
        )


CURVES: dict[str, Callable[[Step], float | None]] = {
    "loss": lambda step: step.loss,
    "median norm": lambda step: step.norm_median,
    "norm of mean": lambda step: step.mean_gradient_norm,
    "noise scale": lambda step: step.noise_scale.simple,
    "opposed": lambda step: step.opposing,
}


class History(Record, Shown):
    """All steps of a run, in the order of their numbers, and where they were read."""

    schema_: Literal["gradscope.history"] = "gradscope.history"
    version: Literal[1] = 1
    path: str
    steps: tuple[Step, ...]

    def overview(self) -> Overview:
        """Return all that is shown of it: the curves, and at most 20 steps, evenly spread."""
        steps = self.steps
        formula = "B_simple = trΣ / |G|² (McCandlish et al. 2018)"
        curves = [(name, Spark([take(s) for s in steps])) for name, take in CURVES.items()]
        shown = Table(_columns([steps[k] for k in spread(len(steps), _SHOWN)]))
        return Overview(
            paths=[self.path],
            facts=[
                ("steps", f"{count(len(steps), 'step')}, {steps[0].step:,} to {steps[-1].step:,}"),
                ("samples", f"{steps[-1].samples:,}"),
                ("parameters", f"{len(steps[-1].parameters):,}"),
            ],
            sections=[
                Section("Over time", curves, formulas=[formula]),
                Section("Steps", table=shown),
            ],
            pictures=list(_pictures(steps)),
        )


def record(path: str | Path, step: int, summary: Summary) -> None:
    """Append one step to a file of JSON lines, which `gradscope stats` reads.

    Args:
        path: The file, named *.jsonl; created where it is absent.
        step: Of the training.
        summary: From `measure`, or of a result file.

    Raises:
        OutputError: The file cannot be written, or has another name.
    """
    target = Path(path)
    if target.suffix != _SUFFIX:
        raise OutputError(f"a history is a file *{_SUFFIX}", where=str(path))
    line = json.dumps(Step.of(step, summary).to_json(), ensure_ascii=False)
    try:
        with target.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise OutputError(
            f"the step cannot be written: {error.strerror or error}", where=str(path)
        ) from error


def read_history(path: str | Path) -> History:
    """Read all steps; of a step that was recorded again, as after a restart, the last counts.

    Raises:
        ResultFileError: The file cannot be read, or a line is no step.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ResultFileError(
            "the history cannot be read", where=str(path), remedy=str(error)
        ) from error
    found: dict[int, Step] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            step = Step.model_validate_json(line)
        except ValidationError as error:
            raise ResultFileError(
                "the line is no recorded step",
                where=f"{path}: line {number}",
                remedy="A line cut short by a stop can be deleted.",
            ) from error
        found[step.step] = step
    if not found:
        raise ResultFileError("no step is recorded", where=str(path))
    return History(path=str(path), steps=tuple(found[key] for key in sorted(found)))


def _columns(steps: Sequence[Step]) -> list[Column]:
    ranks, shown = {"norm of mean": 1, "opposed": 2}, {"opposed": percent}
    columns = [whole("step", [s.step for s in steps])]
    for name, take in CURVES.items():
        show = shown.get(name, short)
        columns.append(numbers(name, [take(s) for s in steps], ranks.get(name, 0), show))
    if any(s.nonfinite for s in steps):
        columns.append(whole("not finite", [s.nonfinite for s in steps]))
    intervals = [s.noise_scale.simple_interval for s in steps]
    if any(intervals):
        columns.insert(5, Column("95%", [between(i) for i in intervals], rank=3))
    return columns


def _pictures(steps: Sequence[Step]) -> Iterator[Picture]:
    """Draw each number, and the parameters whose signal to noise is largest at the end."""

    def drawn(label: str, title: str, curves: dict[str, Points], band: Band = ()) -> Picture:
        curves = {name: points for name, points in curves.items() if points}
        empty = "" if curves else "not known at any step"
        return CurvePicture(
            label=label, title=title, across="step", empty=empty, curves=curves, band=band
        )

    intervals = [(s.step, s.noise_scale.simple_interval) for s in steps]
    band = [(step, i.low, i.high) for step, i in intervals if i is not None and i.low]
    for name, take in CURVES.items():
        known: Points = [(s.step, value) for s in steps if (value := take(s)) is not None]
        yield drawn(f"{name} by step", name, {"": known}, band if name == "noise scale" else ())
    last = sorted(steps[-1].parameters, key=lambda p: -(p.signal_to_noise or 0.0))
    curves: dict[str, Points] = {layer.name: [] for layer in last[:_DRAWN]}
    for step in steps:
        for layer in step.parameters:
            if layer.name in curves and layer.signal_to_noise:
                curves[layer.name].append((step.step, layer.signal_to_noise))
    title = "Signal to noise by parameter"
    yield drawn("Signal to noise of the parameters by step", title, curves)
