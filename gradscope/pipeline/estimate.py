"""What a run would cost, found by running its first batch and writing nothing."""

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradscope.pipeline.job import Job


@dataclass(frozen=True)
class Estimate:
    """The plan of a run.

    Attributes:
        samples: N.
        batch_size: Samples a batch.
        backend: What was chosen on the first batch.
        notes: Why.
        chains: In canonical spelling.
        bytes: What the file would hold in the dense layout.
        free: Bytes free where it would be written.
        seconds: For all batches, from the time of the second evaluation of the first one.
    """

    samples: int
    batch_size: int
    backend: str
    notes: tuple[str, ...]
    chains: tuple[str, ...]
    bytes: int
    free: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data under a versioned schema."""
        return {"schema": "gradscope.plan", "version": 1, **asdict(self)}


def estimate(job: Job, path: Path | None) -> Estimate:
    """Evaluate, prove and time the first batch.

    Raises:
        RefusedError: No backend has an exact, proved answer.
    """
    batch = job.load(0, min(job.batch_size, len(job.rows)))
    job.scope.compiler.left = -(-len(job.rows) // job.batch_size)
    job.scope.evaluate(batch, job.wanted)
    begun = time.perf_counter()
    gradients, problem = job.scope.evaluate(batch, job.wanted).gradients, job.scope.problem
    shown = job.scope.labels.of(batch)
    size = 0
    for chain in job.scope.settled(job.chains, lambda: [batch]):
        if chain.reducer is None:
            rows = chain.rows(gradients, problem, shown).dense()
            per_sample = sum(r.nbytes for r in rows.values()) / len(batch)
            size += round(per_sample * len(job.rows))
        else:
            size += sum(
                t.nbytes
                for t in chain.result(chain.update(None, gradients, problem, shown)).values()
            )
    seconds = time.perf_counter() - begun
    folder = Path.cwd() if path is None else path.absolute().parent
    return Estimate(
        samples=len(job.rows),
        batch_size=job.batch_size,
        backend=job.scope.backend,
        notes=(*job.notes, *job.scope.notes),
        chains=tuple(chain.text for chain in job.chains),
        bytes=size + _light_table(job),
        free=shutil.disk_usage(folder).free if folder.is_dir() else 0,
        seconds=seconds * len(job.rows) / len(batch),
    )


def _light_table(job: Job) -> int:
    """Bytes of /samples and /norms: index, target, loss, norm, finite, a norm a parameter."""
    size = job.scope.problem.dtype.itemsize
    return len(job.rows) * (8 + 8 + size + size + 1 + size * len(job.shapes))
