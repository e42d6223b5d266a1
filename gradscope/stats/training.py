"""Statistics of a training run: of a batch in memory, and step by step in a file of JSON lines."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import Tensor

from gradscope.blocks import Evaluation, wide
from gradscope.core.batch import Batch
from gradscope.engine import finite_samples
from gradscope.errors import OutputError, ResultFileError
from gradscope.scope import Scope
from gradscope.stats.builtin.batch import NoiseScale
from gradscope.stats.records import Floats, Mask, Record
from gradscope.stats.sections import (
    Column,
    CurvePicture,
    Overview,
    Picture,
    Section,
    Spark,
    Table,
    between,
    count,
    numbers,
    percent,
    whole,
)
from gradscope.stats.summary import Summary, summarize

_SUFFIX = ".jsonl"
_SHOWN = 20  # steps in the table
_DRAWN = 8  # parameters in a picture


class _MeasuredChain(dict[str, Floats]):
    """A chain in memory: its arrays by name."""

    text = "cosine:to=mean"
    reduced = False


@dataclass
class _Measured:
    """A `Source` in memory."""

    n: int
    parameters: Any
    samples: Any
    norms: Any
    norm_attributes: Any
    chains: Any
    run: Any
    certificate: Any
    path: Any = "memory"
    attributes: Any = field(default_factory=dict)


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
    finite = _numpy(finite_samples(evaluation))
    means, dots = _mean_and_products(evaluation, finite)
    gradients = evaluation.gradients
    samples = {
        "index": np.arange(len(finite)),
        "loss": _numpy(evaluation.losses),
        "norm": _numpy(gradients.norms),
        "finite": finite,
    }
    if isinstance(targets, Tensor) and targets.dim() == 1:
        samples["target"] = _numpy(targets)
    norms = {name: float(torch.linalg.vector_norm(mean)) for name, mean in means.items()}
    lengths = {name: norm if finite.any() else nan for name, norm in norms.items()}
    along = np.zeros(len(finite))
    sizes = samples["norm"][finite] * np.linalg.norm(list(lengths.values()))
    along[finite] = np.divide(dots, sizes, out=np.zeros_like(dots), where=sizes > 0)
    measured = _Measured(
        n=len(finite),
        parameters={name: block.shape for name, block in gradients.items()},
        samples=samples,
        norms={name: _numpy(v.sqrt()) for name, v in gradients.squared_norms.items()},
        norm_attributes={k: {"mean_gradient_norm": length} for k, length in lengths.items()},
        chains=(_MeasuredChain(cosine=along),),
        run={"backend": scope.backend},
        certificate={} if scope.certificate is None else scope.certificate.to_json(),
    )
    return summarize(measured, top=top)


def _mean_and_products(evaluation: Evaluation, finite: Mask) -> tuple[dict[str, Tensor], Floats]:
    """Return G, {name: (*shape)}, and ⟨gᵢ, G⟩ (m,) of the m finite samples."""
    rows = torch.from_numpy(np.flatnonzero(finite)).to(evaluation.losses.device)
    kept = {name: wide(block.select(rows)) for name, block in evaluation.gradients.items()}
    means = {name: block.weighted_sum() / max(1, len(rows)) for name, block in kept.items()}
    dots = np.zeros(len(rows))
    for name, block in kept.items():
        dots += _numpy(block.dot(means[name]).real)
    return means, dots


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

    schema_: Literal["gradscope.step"] = Field(
        default="gradscope.step", validation_alias="schema", serialization_alias="schema"
    )
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
        lengths = [row.mean_gradient_norm for row in summary.parameters]
        whole = None if None in lengths else sum(length**2 for length in lengths) ** 0.5
        return cls(
            step=step,
            samples=summary.finite,
            nonfinite=summary.nonfinite.count,
            loss=None if summary.loss is None else summary.loss.mean,
            norm_mean=None if norm is None else norm.mean,
            norm_median=None if norm is None else norm.median,
            norm_90=None if norm is None else norm.percentiles["90"],
            mean_gradient_norm=whole,
            noise_scale=summary.noise_scale,
            opposing=None if directions is None else directions.opposing,
            mean_cosine=None if directions is None else directions.cosine.mean,
            evidence=summary.signal.evidence,
            parameters=tuple(
                Layer(**{key: getattr(row, key) for key in Layer.model_fields})
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


class History(Record):
    """All steps of a run, in the order of their numbers, and where they were read."""

    schema_: Literal["gradscope.history"] = Field(
        default="gradscope.history", validation_alias="schema", serialization_alias="schema"
    )
    version: Literal[1] = 1
    path: str
    steps: tuple[Step, ...]

    def overview(self) -> Overview:
        """Return all that is shown of it: the curves, and at most 20 steps, evenly spread."""
        steps, last = self.steps, len(self.steps) - 1
        some = [steps[round(k * last / (_SHOWN - 1))] for k in range(_SHOWN)]
        formula = "B_simple = trΣ / |G|² (McCandlish et al. 2018)"
        curves = [(name, Spark([take(s) for s in steps])) for name, take in CURVES.items()]
        shown = Table(_columns(steps if len(steps) <= _SHOWN else some))
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
            pictures=[*(_curve(name, steps) for name in CURVES), _layers(steps)],
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
            step = Step.from_json(json.loads(line))
        except (ValueError, ValidationError, TypeError) as error:
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
    intervals = [s.noise_scale.simple_interval for s in steps]
    if any(intervals):
        columns.insert(5, Column("95%", [between(i) for i in intervals], rank=3))
    return columns


def _curve(name: str, steps: Sequence[Step]) -> Picture:
    """Draw one number, and the intervals of the noise scale."""
    known = [(s.step, value) for s in steps if (value := CURVES[name](s)) is not None]
    intervals = [(s.step, s.noise_scale.simple_interval) for s in steps]
    band = [(step, i.low, i.high) for step, i in intervals if i is not None and i.low]
    return CurvePicture(
        label=f"{name} by step",
        title=name,
        across="step",
        empty="" if known else "not known at any step",
        curves={"": known},
        band=band if name == "noise scale" else (),
    )


def _layers(steps: Sequence[Step]) -> Picture:
    """Draw the parameters whose signal to noise is largest at the end."""
    last = sorted(steps[-1].parameters, key=lambda p: -(p.signal_to_noise or 0.0))
    curves: dict[str, list[tuple[float, float]]] = {layer.name: [] for layer in last[:_DRAWN]}
    for step in steps:
        for layer in step.parameters:
            if layer.name in curves and layer.signal_to_noise:
                curves[layer.name].append((step.step, layer.signal_to_noise))
    known = {name: found for name, found in curves.items() if found}
    return CurvePicture(
        label="Signal to noise of the parameters by step",
        title="Signal to noise by parameter",
        across="step",
        empty="" if known else "not known at any step",
        curves=known,
    )
