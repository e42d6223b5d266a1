"""What a run would compute, from what, and what it would cost: the first batch, and no file."""

from dataclasses import asdict, dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

from gradscope.blocks import Chosen, Tuner
from gradscope.engine import finite_samples
from gradscope.run.budget import plan
from gradscope.run.disk import Room, tried
from gradscope.run.job import Job
from gradscope.run.overlap import BatchSize
from gradscope.stages.labels import mean
from gradscope.stages.losses import options


@dataclass(frozen=True)
class Estimate:
    """The plan of a run: what it would cost, found on its first batch."""

    samples: int
    batch_size: int
    backend: str  # chosen on the first batch
    notes: tuple[str, ...]
    chains: tuple[str, ...]  # in canonical spelling
    room: Room  # on the disk; and seconds, from the second evaluation of the first batch
    memory: int | None  # bytes at the peak, above the loaded model and data; None if unknown
    available: int | None  # bytes that there are for it; None if unknown
    ways: tuple[Chosen, ...]  # kernel variants, with the seconds that were predicted

    def to_json(self) -> dict[str, Any]:
        """Return plain data under a versioned schema."""
        own = asdict(self)
        del own["room"]
        own["ways"] = [one.to_json() for one in self.ways]
        return {"schema": "gradscope.plan", "version": 1, **own, **self.room.to_json()}


@dataclass(frozen=True)
class FirstBatch:
    """What the first batch gave: the smallest, the median and the largest of what is finite."""

    samples: int
    loss: tuple[float, float, float]
    norm: tuple[float, float, float]
    nonfinite: int  # samples without a finite gradient


@dataclass(frozen=True)
class Inspection:
    """What a run would compute, from what, and at what cost."""

    model: dict[str, Any]
    checkpoint: dict[str, Any]
    dataset: dict[str, Any]
    loss: dict[str, Any]
    first: FirstBatch
    certificate: dict[str, Any]  # the proof of the first batch
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


def estimate(job: Job, path: Path | None) -> Estimate:
    """Plan the batch size, and evaluate, prove and time the first batch; nothing is written.

    Raises:
        SpecError: The memory budget does not hold a single sample.
        RefusedError: No backend has an exact, proved answer.
    """
    with Tuner(measures=False).active():
        budget = plan(job, measured=True)
    size = BatchSize(budget.samples, fixed=job.scope.settings.own_loss)
    with Tuner(measures=False).active() as tuner:
        room = size.fitting(partial(tried, job, path), len(job.rows))
    notes = (*job.notes, *budget.notes, *job.scope.notes, *size.notes)
    return Estimate(
        samples=len(job.rows),
        batch_size=size.samples,
        backend=job.scope.backend,
        notes=tuple(dict.fromkeys(notes)),
        chains=tuple(chain.text for chain in job.chains),
        room=room,
        memory=budget.peak,
        available=budget.available,
        ways=tuple(tuner.chosen.values()),
    )


def inspect(job: Job) -> Inspection:
    """Evaluate and prove the first batch of a job whose `verify` is not "never"; say what it is."""
    cost = estimate(job, None)
    first = _first_batch(job, min(cost.batch_size, len(job.rows)))
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
        plan=cost,
    )


def _first_batch(job: Job, n: int) -> FirstBatch:
    batch = job.load(0, n)
    evaluation = job.scope.evaluate(batch, job.request())
    finite = finite_samples(evaluation).reshape(len(batch), -1).all(1)
    shown = job.scope.labels.of(batch)
    ranges = []
    for values in (evaluation.losses, evaluation.gradients.norms):
        kept = mean(values.detach(), shown)[finite].double()
        found = (kept.min(), kept.median(), kept.max()) if len(kept) else (nan, nan, nan)
        ranges.append((float(found[0]), float(found[1]), float(found[2])))
    return FirstBatch(len(batch), ranges[0], ranges[1], int((~finite).sum()))
