"""Statistics of a training run, step by step, in a file of JSON lines."""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from gradscope.errors import OutputError, ResultFileError
from gradscope.stats.base import Record
from gradscope.stats.noise import NoiseScale
from gradscope.stats.summary import Summary

SUFFIX = ".jsonl"


class Layer(Record):
    """One parameter at one step.

    Attributes:
        name: As in the model.
        mean_norm: mean ‖gᵢ‖.
        mean_gradient_norm: ‖G‖.
        signal_to_noise: ‖G‖² / (mean‖gᵢ‖² − ‖G‖²).
    """

    name: str
    mean_norm: float | None
    mean_gradient_norm: float | None
    signal_to_noise: float | None


class Step(Record):
    """One step: one line of the file.

    Attributes:
        step: Its number.
        samples: How many were finite.
        nonfinite: How many were not.
        loss: The mean loss.
        norm_mean: mean ‖gᵢ‖.
        norm_median: Its median.
        norm_90: Its 90th percentile.
        mean_gradient_norm: ‖G‖.
        noise_scale: With its intervals.
        opposing: The share of samples with ⟨gᵢ, G⟩ < 0.
        mean_cosine: Of the samples with G.
        evidence: The early-stopping criterion, where rows were there.
        parameters: One each.
    """

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


class History(Record):
    """All steps of a run.

    Attributes:
        path: Where they were read.
        steps: In the file's order.
    """

    schema_: Literal["gradscope.history"] = Field(
        default="gradscope.history", validation_alias="schema", serialization_alias="schema"
    )
    version: Literal[1] = 1
    path: str
    steps: tuple[Step, ...]


def step_of(step: int, summary: Summary) -> Step:
    """Return what is kept of a summary."""
    norm, directions = summary.norm, summary.directions
    lengths = [row.mean_gradient_norm for row in summary.parameters]
    known = [length for length in lengths if length is not None]
    return Step(
        step=step,
        samples=summary.file.samples - summary.nonfinite.count,
        nonfinite=summary.nonfinite.count,
        loss=None if summary.loss is None else summary.loss.mean,
        norm_mean=None if norm is None else norm.mean,
        norm_median=None if norm is None else norm.median,
        norm_90=None if norm is None else norm.percentiles["90"],
        mean_gradient_norm=sum(v**2 for v in known) ** 0.5 if len(known) == len(lengths) else None,
        noise_scale=summary.noise_scale,
        opposing=None if directions is None else directions.opposing,
        mean_cosine=None if directions is None else directions.cosine.mean,
        evidence=summary.signal.evidence,
        parameters=tuple(
            Layer(
                name=row.name,
                mean_norm=row.mean_norm,
                mean_gradient_norm=row.mean_gradient_norm,
                signal_to_noise=row.signal_to_noise,
            )
            for row in summary.parameters
        ),
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
    if target.suffix != SUFFIX:
        raise OutputError(f"a history is a file *{SUFFIX}", where=str(path))
    line = json.dumps(step_of(step, summary).to_json(), ensure_ascii=False)
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
