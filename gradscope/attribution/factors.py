"""Factors of the curvature, computed by the workers of torchrun: each its samples.

The shards are result files, which `compute` writes and resumes and `merge` joins.
"""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from gradscope.attribution.methods import CURVATURES, AttributionSettings, method_of
from gradscope.attribution.sources import GradientSource, recorded_run
from gradscope.config import Worker
from gradscope.core.grammar import Stage
from gradscope.run import compute, connected, file_plan, merge, prepare
from gradscope.storage import is_complete

_CHAINS = {  # the chains of each curvature, each with the merged result of the chain before it
    "ekfac": ("kfac:bias=column,full=512", "ekfac"),
    "kfac": ("kfac:bias=column",),
    "diagonal": ("second_moment",),
    "adam": ("second_moment",),
}
_WAIT = timedelta(days=30)  # a worker may have much more work than another


def shared_factors(
    train: GradientSource,
    asked: AttributionSettings,
    output: Path,
    worker: Worker,
    *,
    overwrite: bool = False,
    resume: bool = True,
) -> AttributionSettings:
    """Return settings with the factors that all workers of torchrun compute together, if needed.

    Args:
        train: This worker's training samples.
        asked: The settings.
        output: The score file; the files of factors are next to it.
        worker: This process.
        overwrite: Replace files of another run.
        resume: Continue with the files of an earlier start.

    Raises:
        RefusedError: Another worker failed.
        OutputError: A file cannot be written, or belongs to another run.
    """
    method = method_of(train, asked)
    known = asked.factors is not None or train.facts.rows == "group" or train.facts.spec is None
    if known or method not in _CHAINS or train.stores(CURVATURES[method][0]):
        return asked
    spec = recorded_run(train.facts.spec, train.facts.name)
    device = worker.device(spec.compute.device)
    found: Path | None = None
    with connected(torch.device("cpu"), _WAIT) as ranks:
        for name in _CHAINS[method]:
            chain = name if found is None else str(Stage(name, {"with": f"{found}:0"}))
            found = output.with_name(f"{output.stem}.factors-{name.partition(':')[0]}.h5")
            with ranks.raise_on_all():
                how = {"transform": (chain, "mean"), "backend": "auto", "predictions": False}
                how |= {"sharded": False, "shard": str(worker.shard), "device": device}
                job = prepare(spec.computing(**how))
                whole = replace(job, shard=None, rows=job.run_rows)
                done = resume and is_complete(found, file_plan(whole), overwrite=overwrite)
                if not done:
                    compute(job, job.place(found), overwrite=overwrite, resume=resume)
            parts = ranks.all_gather(None if done else str(job.place(found)))
            with ranks.raise_on_all():
                if ranks.rank == 0 and not done:
                    merge([Path(part) for part in parts if part], found, overwrite=True)
            if not done:
                job.place(found).unlink()
    return replace(asked, factors=str(found))
