"""Starting a run: the result file is opened, and what has to come first is done.

    with start(job, path) as run:
        for batch in run.remaining():
            run.add(batch)
        report = run.finish()

The caller may wrap the iterator of batches; progress is no parameter of any computation.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from gradscope.config import function_of
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

_SLACK = 1e-8  # absolute difference of numbers that are computed again


@contextmanager
def start(
    job: Job, path: Path, *, overwrite: bool = False, resume: bool = False
) -> Iterator["Run"]:
    """Open the result file and yield the run; leaving the block early keeps what is finished.

    A shard that is there is gone on with, or found to be finished, unless it is to be overwritten:
    when a worker is lost, all of them are started again. Which kernels are fastest is measured on
    the first batch, unless an earlier process did so, and recorded: a run that goes on keeps to it.

    Raises:
        OutputError: The file exists, cannot be written, or belongs to another run.
    """
    begun = time.perf_counter()
    resume = resume or (job.shard is not None and not overwrite)
    refuse_inputs(job, path)
    job.session.close()  # a job that was run before begins as a new one does
    layout = file_plan(job)
    with open_writer(path, layout, overwrite=overwrite, resume=resume) as writer:
        before = Progress.of(writer.states)
        done, budget = writer.completed, _budget(job, before, writer.completed)
        layout.run["batch_size"] = budget.batch_size  # the file is laid out with the first batch
        size = BatchSize(budget.batch_size, fixed=job.session.settings.own_loss)
        batches_left = -(-len(job.rows) // size.samples)
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
                len(job.rows),
            )
            progress = replace(before, batch_size=size.samples)
            if 0 < done < len(job.rows):
                _recheck(job, chains, size, before, path)
            audits, proof = progress.audits(done), job.session.certificate
            if proof and not audits.proved and (done or job.session.settings.verify == "first"):
                audits = audits.with_proof(proof)  # else it is audited when its turn comes
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
    """Return how many samples are computed at a time, of a run of which so many are `done`."""
    asked = job.spec.compute
    if done == len(job.rows):
        return MemoryPlan(1)
    if before.batch_size and not (asked.batch_size or asked.memory):
        return MemoryPlan(before.batch_size)  # that of the stopped run
    if asked.sharded:  # no process tries anything without the others
        return MemoryPlan(job.batch_size)
    return plan(job)


def _recheck(
    job: Job, chains: tuple[Chain, ...], size: BatchSize, before: Progress, path: Path
) -> None:
    """Prove the first batch of a stopped run again, and compare it with what was stored."""
    if before.first is None:
        return
    batch = size.fitting(partial(job.load, 0), len(job.rows))
    evaluation = job.session.evaluate(batch, job.request(), ordinal=0)
    found = first_of(rows_of(job, chains, batch, evaluation))

    def error(sample: str, what: str, began: str, now: str) -> OutputError:
        return OutputError(
            f"{sample} had the {what} {began} when the run began, and has {now} now: model, loss "
            "or data have changed",
            where=str(path),
            remedy="Go on with the code and the data that the run began with, or start again with "
            "overwrite=True.",
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
    """Refuse to write over what the run reads."""
    spec = job.spec
    named = (spec.model.factory, function_of(spec.loss.name) or "")
    code = (ref.rpartition(":")[0] for ref in named if ":" in ref)
    stages = (stage for chain in job.chains for stage in parse(chain.text))
    with writing(path):
        require_distinct(path, job.checkpoint.files, "the checkpoint")
        require_distinct(path, spec.dataset.sources, "the data")
        require_distinct(path, map(Path, code), "the code")
        require_distinct(path, (file for stage in stages for file in stage.files.values()))
