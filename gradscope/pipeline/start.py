"""Starting a run: the result file is opened, and what has to come first is done.

    with start(job, path) as run:
        for batch in run.remaining():
            run.add(batch)
        report = run.finish()

Whoever runs it may wrap the iterator of batches; progress is no parameter of any computation.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from gradscope.errors import OutputError
from gradscope.pipeline.batch_size import BatchSize
from gradscope.pipeline.job import Job
from gradscope.pipeline.run import Run, unproved
from gradscope.stats import RunReport
from gradscope.storage import ChainPlan, FilePlan, open_writer


@contextmanager
def start(
    job: Job, path: Path, *, overwrite: bool = False, resume: bool = False
) -> Iterator["Run"]:
    """Open the result file and yield the run; leaving the block early keeps what is finished.

    Raises:
        OutputError: The file exists, cannot be written, or belongs to another run.
    """
    begun = time.perf_counter()
    _refuse_inputs(job, path)
    with open_writer(path, _plan(job), overwrite=overwrite, resume=resume) as writer:
        size = BatchSize(job.batch_size, fixed=job.scope.own_loss)
        job.scope.compiler.left = -(-len(job.rows) // size.samples)
        chains = size.fitting(
            lambda n: job.scope.settled(job.chains, lambda: job.batches(size)),
            most=len(job.rows),
            again=partial(unproved, job.scope),
        )
        job.scope.compiler.left = -(-(len(job.rows) - writer.completed) // size.samples)
        yield Run(job, chains, path, writer, size, begun, dict(writer.states))


def compute(job: Job, path: Path, *, overwrite: bool = False, resume: bool = False) -> RunReport:
    """Run a job to its end."""
    with start(job, path, overwrite=overwrite, resume=resume) as run:
        for batch in run.remaining():
            run.add(batch)
        return run.finish()


def _refuse_inputs(job: Job, path: Path) -> None:
    """Refuse to write over what the run reads."""
    spec = job.spec
    code = [ref.rpartition(":")[0] for ref in (spec.model.factory, spec.loss.name) if ":" in ref]
    for kind, source in (
        ("checkpoint", spec.checkpoint.path),
        ("data", spec.dataset.path),
        *(("code", Path(place)) for place in code),
    ):
        if source.exists() and path.exists() and path.samefile(source):
            raise OutputError(
                f"the result would replace the {kind} that it is computed from",
                where=str(path),
                remedy="Choose another name.",
            )


def _plan(job: Job) -> FilePlan:
    digests = {key: value for key, value in job.digests.items() if value is not None}
    return FilePlan(
        run=job.record(),
        fingerprint=job.fingerprint(),
        attributes={f"{key}_sha256": digests[key] for key in ("checkpoint", "dataset")},
        n=len(job.rows),
        parameters=job.shapes,
        chains=tuple(ChainPlan(chain.text, chain.reducer is not None) for chain in job.chains),
        dtype=job.scope.problem.dtype,
        layout=job.spec.compute.layout,
    )
