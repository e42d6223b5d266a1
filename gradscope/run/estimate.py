"""What a run would cost, found by running its first batch and writing nothing."""

from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from gradscope.blocks import ways
from gradscope.core.memory import available
from gradscope.run.batch_size import BatchSize
from gradscope.run.choice import choose, too_large
from gradscope.run.footprint import Meter
from gradscope.run.job import Job
from gradscope.run.preflight import Room, tried
from gradscope.run.rehearsal import forgotten


@dataclass(frozen=True)
class Estimate:
    """The plan of a run.

    Attributes:
        samples: N.
        batch_size: Samples a batch.
        backend: What was chosen on the first batch.
        notes: Why.
        chains: In canonical spelling.
        room: What the file would take, what there is for it, and how long computing takes: from
            the second evaluation of the first batch.
        memory: Bytes taken at the peak, above the loaded model and data; None if unknown.
        available: Bytes of memory that there are for it; None if unknown.
        ways: Which of several exact ways is taken where, with the seconds that were predicted.
    """

    samples: int
    batch_size: int
    backend: str
    notes: tuple[str, ...]
    chains: tuple[str, ...]
    room: Room
    memory: int | None
    available: int | None
    ways: tuple[ways.Choice, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data under a versioned schema."""
        own = asdict(self)
        del own["room"]
        return {"schema": "gradscope.plan", "version": 1, **own, **self.room.to_json()}


def estimate(job: Job, path: Path | None) -> Estimate:
    """Evaluate, prove and time the first batch.

    Raises:
        SpecError: The memory budget does not hold a single sample.
        RefusedError: No backend has an exact, proved answer.
    """
    meter, there = Meter(job), available(job.scope.problem.device)
    with ways.predicted():
        choice = choose(job)
        memory, notes = _memory(job, meter, min(choice.samples, len(job.rows)), there)
    size = BatchSize(choice.samples, fixed=job.scope.settings.own_loss)
    with ways.predicted() as chosen:
        room = size.fitting(partial(_first_batch, job, path), len(job.rows))
    return Estimate(
        samples=len(job.rows),
        batch_size=size.samples,
        backend=job.scope.backend,
        notes=tuple(
            dict.fromkeys((*job.notes, *choice.notes, *notes, *job.scope.notes, *size.notes))
        ),
        chains=tuple(chain.text for chain in job.chains),
        room=room,
        memory=None if memory is None else max(memory, choice.peak),
        available=there,
        ways=tuple(chosen.values()),
    )


def _memory(
    job: Job, meter: Meter, n: int, there: int | None
) -> tuple[int | None, tuple[str, ...]]:
    """Return the peak for batches of n samples: rehearsed, if that seems to fit."""
    budget = inf if there is None else there
    with forgotten(job) as rehearsed:
        meter = meter.of(rehearsed)
        found = meter.footprint(max(1, n // 2), budget)  # n itself comes as new as in a run
        if found is None:
            return None, ()
        if found.peak(n) > budget:
            return found.peak(n), (too_large(n, found, budget, "there is"),)
        peaks = [meter.peak(n) or found.peak(n) for _ in range(2)]  # they differ a little
        return max(peaks), ()


def _first_batch(job: Job, path: Path | None, n: int) -> Room:
    return tried(job, path, n)
