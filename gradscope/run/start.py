"""Start a run: open the result file, choose the batch size, and compute earlier passes.

    with start(job, path) as run:
        for batch in run.remaining():
            run.add(batch)
        report = run.finish()

To show progress, the caller wraps the iterator of batches.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from gradscope.config import file_of
from gradscope.core.grammar import parse
from gradscope.engine.fold import prepare_chains
from gradscope.errors import OutputError
from gradscope.run.budget import MemoryPlan, plan
from gradscope.run.execute import (
    Progress,
    Run,
    batches,
    first_of,
    require_reproduced,
    rows_of,
    without_progress,
)
from gradscope.run.job import Job, file_plan
from gradscope.run.outcome import RunReport
from gradscope.run.overlap import BackgroundWriter, BatchSize
from gradscope.stages.chain import Chain
from gradscope.storage import open_writer, require_distinct, writing

_SLACK = 1e-8  # allowed absolute difference of recomputed numbers


@contextmanager
def start(
    job: Job, path: Path, *, overwrite: bool = False, resume: bool = False
) -> Iterator["Run"]:
    """Open the result file and yield the run; leaving the block early keeps finished rows.

    Without `overwrite`, an unfinished shard is always resumed, because lost workers are restarted
    with the same command. The first batch chooses the kernels, by time measurements or from the
    cache. The choice is recorded, and a resumed run uses the same kernels.

    Raises:
        OutputError: The file exists, cannot be written, or belongs to another run.
    """
    begun = time.perf_counter()
    resume = resume or (job.shard is not None and not overwrite)
    refuse_inputs(job, path)
    job.session.close()  # discard the state of an earlier run of this job
    layout = file_plan(job)
    with open_writer(path, layout, overwrite=overwrite, resume=resume) as writer:
        before = Progress.of(writer.states)
        done, budget = writer.completed, _budget(job, before, writer.completed)
        layout.run["batch_size"] = budget.batch_size  # the first batch lays out the file
        size = BatchSize(budget.batch_size, fixed=job.session.settings.own_loss)
        batches_left = -(-job.work() // size.samples)
        tuner = job.tuner(before.choices)
        with (
            tuner.active(),
            BackgroundWriter(
                writer, job.session.problem.device, dense=job.spec.compute.layout == "dense"
            ) as background,
        ):
            chains = size.fitting(
                lambda n: prepare_chains(
                    job.session, job.chains, lambda: batches(job, size), batches_left
                ),
                job.work(),
            )
            progress = replace(before, batch_size=size.samples)
            if 0 < done < len(job.rows):
                _recheck(job, chains, size, before, path)
            audits, proof = progress.audits(done), job.session.certificate
            if proof and not audits.proved and (done or job.session.settings.verify == "first"):
                audits = audits.with_proof(proof)  # else the batch is audited later
            job.session.auditor.audits = audits
            yield Run(
                job,
                chains,
                path,
                background,
                size,
                begun,
                budget.notes,
                without_progress(writer.states),
                progress,
                tuner,
                layout.run,
                done,
            )


def _budget(job: Job, before: Progress, done: int) -> MemoryPlan:
    """Return the batch size of a run with `done` finished rows."""
    asked = job.spec.compute
    if done == len(job.rows):
        return MemoryPlan(1)
    if before.batch_size and not (asked.batch_size or asked.memory):
        return MemoryPlan(before.batch_size)  # the stopped run's batch size
    if asked.sharded:  # a trial needs all processes
        return MemoryPlan(job.batch_size)
    return plan(job)


def _recheck(
    job: Job, chains: tuple[Chain, ...], size: BatchSize, before: Progress, path: Path
) -> None:
    """Prove the first batch of a stopped run again, and compare it with the stored numbers."""
    if before.first is None:
        return
    batch = size.fitting(partial(job.load, 0), job.work())
    evaluation = job.session.evaluate(batch, job.request(), ordinal=0)
    found = first_of(rows_of(job, chains, batch, evaluation))

    def error(sample: str, what: str, began: str, now: str) -> OutputError:
        return OutputError(
            f"the {what} of {sample} was {began} when the run started and is {now} now: model, "
            "loss or data have changed",
            where=str(path),
            remedy="Resume with the code and data with which the run was started, or start again "
            "with overwrite=True.",
        )

    for k, (loss, norm, loss_now, norm_now) in enumerate(zip(*before.first, *found, strict=False)):
        pairs = ("loss", loss, loss_now, _SLACK), ("gradient norm", norm, norm_now, _SLACK)
        require_reproduced(batch.one(k), pairs, job.session.problem.precision, error)


def compute(job: Job, path: Path, **how: bool) -> RunReport:
    """Run a job to its end; see `start`."""
    with start(job, path, **how) as run:
        for batch in run.remaining():
            run.add(batch)
        return run.finish()


def refuse_inputs(job: Job, path: Path) -> None:
    """Raise if `path` is an input of the run."""
    spec = job.spec
    code = filter(None, map(file_of, (spec.model.factory, spec.loss.name)))
    stages = (stage for chain in job.chains for stage in parse(chain.text))
    with writing(path):
        require_distinct(path, job.checkpoint.files, "the checkpoint")
        require_distinct(path, spec.dataset.sources, "the data")
        require_distinct(path, map(Path, code), "the code")
        require_distinct(path, (file for stage in stages for file in stage.files.values()))
