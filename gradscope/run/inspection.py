"""What would be run, looked at closely: model, weights, data, loss, and the first batch, proved."""

from dataclasses import asdict, dataclass
from math import nan
from typing import Any

from gradscope.engine import finite_samples
from gradscope.run.estimate import Estimate, estimate
from gradscope.run.job import Job
from gradscope.stages.labels import mean
from gradscope.stages.losses import options


@dataclass(frozen=True)
class FirstBatch:
    """What the first batch gave.

    Attributes:
        samples: n.
        loss: The smallest, the median and the largest loss; of those that are finite.
        norm: The same of the gradients' norms.
        nonfinite: How many samples have no finite gradient.
    """

    samples: int
    loss: tuple[float, float, float]
    norm: tuple[float, float, float]
    nonfinite: int


@dataclass(frozen=True)
class Inspection:
    """What a run would compute, from what.

    Attributes:
        model: Its class, mode, and how many parameters and numbers are differentiated by.
        checkpoint: File, format, tensors, digest.
        dataset: File, format, samples, arrays.
        loss: Name and options.
        first: The first batch.
        certificate: Its proof.
        plan: What the whole would cost.
    """

    model: dict[str, Any]
    checkpoint: dict[str, Any]
    dataset: dict[str, Any]
    loss: dict[str, Any]
    first: FirstBatch
    certificate: dict[str, Any]
    plan: Estimate

    def to_json(self) -> dict[str, Any]:
        """Return plain data under a versioned schema."""
        parts = ("model", "checkpoint", "dataset", "loss", "certificate")
        return {
            "schema": "gradscope.check",
            "version": 1,
            **{name: getattr(self, name) for name in parts},
            "first_batch": asdict(self.first),
            "plan": self.plan.to_json(),
        }


def inspect(job: Job) -> Inspection:
    """Evaluate and prove the first batch of a job, and say what the job is.

    Args:
        job: Its `verify` is not "never".

    Raises:
        RefusedError: No backend has an exact, proved answer.
    """
    plan = estimate(job, None)
    first = _first_batch(job, min(plan.batch_size, len(job.rows)))
    problem, loaded = job.scope.problem, job.checkpoint
    certificate = job.scope.certificate
    assert certificate is not None  # the first batch was proved
    return Inspection(
        model={
            "class": type(problem.model).__name__,
            "mode": job.spec.model.mode,
            "parameters": len(problem.parameters),
            "numbers": sum(p.numel() for p in problem.parameters.values()),
            "dtype": str(problem.dtype).removeprefix("torch."),
            "device": str(problem.device),
        },
        checkpoint={
            "path": str(loaded.path),
            "format": loaded.format,
            "tensors": loaded.tensors,
            "key": loaded.key,
            "prefix": loaded.prefix,
            "sha256": loaded.sha256,
        },
        dataset=job.dataset.describe(),
        loss={"name": job.spec.loss.stage.name, **options(problem.loss)},
        first=first,
        certificate=certificate.to_json(),
        plan=plan,
    )


def _first_batch(job: Job, n: int) -> FirstBatch:
    batch = job.load(0, n)
    evaluation = job.scope.evaluate(batch, job.request())
    finite = finite_samples(evaluation).reshape(len(batch), -1).all(1)
    shown = job.scope.labels.of(batch)
    ranges = []
    for values in (evaluation.losses, evaluation.gradients.norms):
        kept = mean(values.detach(), shown)[finite].double()
        ranges.append(
            (float(kept.min()), float(kept.median()), float(kept.max()))
            if len(kept)
            else (nan, nan, nan)
        )
    return FirstBatch(len(batch), ranges[0], ranges[1], int((~finite).sum()))
