"""`compute --sharded`: one run of several processes, the model divided over them by fully_shard.

Each process computes its own samples into a file of its own, in step with the others; the first one
then merges them, and the files of the parts are removed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradscope.config import RunSpec
from gradscope.errors import RefusedError, SpecError
from gradscope.model.locate import first_line
from gradscope.model.ranks import OutOfStepError, Ranks
from gradscope.process import stops
from gradscope.run.job import Job, prepare, require_usable
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
    if os.environ.get("WORLD_SIZE", "1") == "1":
        raise SpecError(
            "a model is divided over processes, and this is the only one",
            where="sharded",
            remedy="Start several with torchrun --nproc-per-node N -m gradscope compute --sharded; "
            "or leave --sharded out.",
        )
    place = torch.device(device or "cpu")
    require_usable(place)
    if place.type == "cuda":
        if place.index is None:
            raise SpecError(
                "which GPU is this process's own is not known: LOCAL_RANK is not set",
                where="device",
                remedy="Start the processes with torchrun, or give each its own --device cuda:N.",
            )
        torch.cuda.set_device(place)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo", **_of_this_start()
        )
    except (RuntimeError, ValueError) as error:
        raise OutOfStepError(
            f"the processes do not find each other: {first_line(error)}",
            remedy="Start all of them again. For torchrun --max-restarts on several machines set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: else it keeps addresses of ended ones.",
        ) from error
    stops.without_shutdown()
    try:
        yield Ranks(dist.group.WORLD, place)
    finally:
        dist.destroy_process_group()


def _of_this_start() -> dict[str, Any]:
    """Return a store without the addresses of processes that torchrun has started before.

    On several machines its count of restarts may differ between them.
    """
    restarts, local = map(os.environ.get, ("TORCHELASTIC_RESTART_COUNT", "LOCAL_WORLD_SIZE"))
    if restarts in (None, "0") or local != os.environ["WORLD_SIZE"]:
        return {}
    named: Any = dist  # torch's types leave these two out
    store, rank, size = next(named.rendezvous("env://"))
    own = named.PrefixStore(f"restart {restarts}", store)
    return {"store": own, "rank": rank, "world_size": size}


def compute_model_parallel(
    spec: RunSpec, output: Path, *, overwrite: bool = False, restarted: bool = False
) -> MergeReport | None:
    """Compute a run by all processes together; only the first has a report.

    Args:
        spec: The run.
        output: The file of the whole.
        overwrite: Replace it, and begin anew.
        restarted: The processes were started again, since one was lost: they go on in any case.

    Raises:
        RefusedError: Another process could not go on, or has ended.
    """
    place, report = None, None
    with stops.stop_message(lambda: _stopped(place, output, overwrite=overwrite, complete=report)):
        with processes(spec.compute.device) as ranks, ranks.raise_on_all():
            job = prepare(spec.computing(predictions=False))
            for chain in job.chains:
                if any(isinstance(step, NeedsProblem) for step in chain.before):
                    raise RefusedError(
                        f"{chain.text!r} evaluates the model again, which the other processes of "
                        "a divided one would have to do as well",
                        remedy="Compute it on one process.",
                    )
            place = job.place(output)
            require_free(output, overwrite=overwrite)
            _part(job, place, overwrite=overwrite, resume=restarted)
            every = ranks.all_gather(str(place))
        if ranks.rank == 0:  # nobody waits for it: that may take long
            report = _merged(job, every, output, overwrite=overwrite)
            report = _without(every, output, report)
    return report


def _without(parts: list[str], output: Path, report: MergeReport) -> MergeReport:
    """Remove the parts, and note which others are left."""
    for part in parts:
        Path(part).unlink()
    pattern = f"{escape(output.stem)}.shard-*-of-*{escape(output.suffix)}"
    left = sorted(k.name for end in ("", ".part") for k in output.parent.glob(pattern + end))
    note = f"parts of runs by other numbers of processes are left: {', '.join(left)}"
    return report.model_copy(update={"notes": (*report.notes, note)}) if left else report


def _stopped(place: Path | None, output: Path, *, overwrite: bool, complete: Any) -> str:
    """Say what is left of a run that a signal has stopped; one process does."""
    if os.environ.get("RANK", "0") != "0":
        return "stopped"
    if complete:
        return f"stopped; {output} is complete"
    if place is None or not (place.exists() or place.with_name(f"{place.name}.part").exists()):
        return "stopped; nothing was written"
    if not overwrite:
        return "stopped; what is finished is kept, and the same command goes on with it"
    away = f", once {output} is out of the way" if output.exists() else ""
    return (
        "stopped; what is finished is kept: the same command without --overwrite goes on with it"
        f"{away}"
    )


def _part(job: Job, place: Path, **how: bool) -> None:
    """Compute this process's samples, and then wait upon the others."""
    sharded = job.session.model_parallel
    assert sharded is not None
    sharded.uneven_inputs = True
    with start(job, place, **how) as run:
        for batch in run.remaining():
            run.add(batch)
        sharded.join(job.load(0, 1))
        run.finish()


def _merged(job: Job, parts: list[str], output: Path, *, overwrite: bool) -> MergeReport:
    stages: list[Any] = [stage for chain in job.chains for stage in chain.stages]
    code = [Path(s.name.rpartition(":")[0]) for s in stages if ".py:" in s.name]
    with merging(map(Path, parts), output, overwrite=overwrite, code=code) as under_way:
        for part in under_way.parts.files:
            under_way.add(part)
        return under_way.finish()
