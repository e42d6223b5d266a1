"""`compute --sharded`: one run of several processes, the model divided over them by fully_shard.

Each process computes its own samples into a file of its own, in step with the others; the first one
then merges them, and the files of the parts are removed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradscope.config import RunSpec
from gradscope.core import stops
from gradscope.core.ranks import Ranks
from gradscope.errors import RefusedError, SpecError
from gradscope.run.job import Job, prepare
from gradscope.run.merging import MergeReport, merging
from gradscope.run.start import start
from gradscope.stages.transforms.base import NeedsProblem
from gradscope.storage import require_free


@contextmanager
def processes(device: str | None) -> Iterator[Ranks]:
    """Yield the processes that torchrun has started, each on its device.

    Raises:
        SpecError: It has started none.
    """
    if "RANK" not in os.environ:
        raise SpecError(
            "a model is divided over processes, and this is the only one",
            where="sharded",
            remedy="Start them with torchrun --nproc-per-node N -m gradscope compute --sharded.",
        )
    place = torch.device(device or "cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
    stops.without_shutdown()
    try:
        yield Ranks(dist.group.WORLD, place)
    finally:
        dist.destroy_process_group()


def compute_divided(spec: RunSpec, output: Path, *, overwrite: bool = False) -> MergeReport | None:
    """Compute a run by all processes together; only the first has a report.

    Raises:
        RefusedError: Another process could not go on, or has ended.
    """
    with processes(spec.compute.device) as ranks, ranks.together():
        job = prepare(spec.computing(predictions=False))
        for chain in job.chains:
            if any(isinstance(step, NeedsProblem) for step in chain.before):
                raise RefusedError(
                    f"{chain.text!r} evaluates the model again, which the other processes of a "
                    "divided one would have to do as well",
                    remedy="Compute it on one process.",
                )
        place = job.place(output)
        require_free(output, overwrite=overwrite)
        _part(job, place, overwrite=overwrite)
        every = ranks.of_all(str(place))
        report = _merged(job, every, output, overwrite=overwrite) if ranks.rank == 0 else None
        ranks.agree()
        place.unlink()
    return report


def _part(job: Job, place: Path, *, overwrite: bool) -> None:
    """Compute this process's samples, and then wait upon the others."""
    lockstep = job.scope.lockstep
    assert lockstep is not None
    lockstep.attended = True
    with start(job, place, overwrite=overwrite) as run:
        for batch in run.remaining():
            run.add(batch)
        lockstep.attend(job.load(0, 1))
        run.finish()


def _merged(job: Job, parts: list[str], output: Path, *, overwrite: bool) -> MergeReport:
    stages: list[Any] = [stage for chain in job.chains for stage in chain.stages]
    code = [Path(s.name.rpartition(":")[0]) for s in stages if ".py:" in s.name]
    with merging(map(Path, parts), output, overwrite=overwrite, code=code) as under_way:
        for part in under_way.parts.files:
            under_way.add(part)
        return under_way.finish()
