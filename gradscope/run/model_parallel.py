"""`compute --sharded`: one run in several processes, with a model sharded by fully_shard.

Each process computes different samples and writes them to a separate file. All processes evaluate
batches at the same time. Afterwards, the first process merges the files and removes them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
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
    """Yield the ranks of the processes that torchrun has started, each on its device.

    Raises:
        SpecError: There is only one process, or its GPU is unknown.
        RefusedError: The processes cannot connect to each other.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        raise SpecError(
            "--sharded needs several processes, but only one is running",
            where="sharded",
            remedy="Start them with torchrun --nproc-per-node N -m gradscope compute --sharded, "
            "or remove --sharded.",
        )
    place = torch.device(device or "cpu")
    require_usable(place)
    if place.type == "cuda":
        if place.index is None:
            raise SpecError(
                "the GPU of this process is unknown: LOCAL_RANK is not set",
                where="device",
                remedy="Start the processes with torchrun, or give each its own --device cuda:N.",
            )
        torch.cuda.set_device(place)
    with connected(place) as ranks:
        yield ranks


@contextmanager
def connected(place: torch.device, wait: timedelta | None = None) -> Iterator[Ranks]:
    """Yield the ranks of the processes that torchrun has started.

    A process waits for another process for at most `wait`, by default torch's 30 minutes.

    Raises:
        RefusedError: The processes cannot connect to each other.
    """
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
            timeout=wait,
            **_of_this_start(),
        )
    except (RuntimeError, ValueError) as error:
        raise OutOfStepError(
            f"the processes cannot connect to each other: {first_line(error)}",
            remedy="Start all processes again. For torchrun --max-restarts on several machines set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or it keeps addresses of old processes.",
        ) from error
    stops.without_shutdown()
    try:
        yield Ranks(dist.group.WORLD, place)
    finally:
        dist.destroy_process_group()


def _of_this_start() -> dict[str, Any]:
    """Return a store without the addresses of earlier processes, if torchrun restarted on one host.

    On several machines, the counts of restarts may differ, so the default store is used.
    """
    restarts, local = map(os.environ.get, ("TORCHELASTIC_RESTART_COUNT", "LOCAL_WORLD_SIZE"))
    if restarts in (None, "0") or local != os.environ["WORLD_SIZE"]:
        return {}
    named: Any = dist  # torch's type stubs lack two names
    store, rank, size = next(named.rendezvous("env://"))
    own = named.PrefixStore(f"restart {restarts}", store)
    return {"store": own, "rank": rank, "world_size": size}


def compute_model_parallel(
    spec: RunSpec, output: Path, *, overwrite: bool = False, restarted: bool = False
) -> MergeReport | None:
    """Compute a run in all processes; return the report in the first process, None in the others.

    Args:
        spec: The run.
        output: The merged file.
        overwrite: Replace an existing file, and do not resume.
        restarted: Resume in any case, because torchrun restarted the processes.

    Raises:
        RefusedError: Another process failed or has ended.
    """
    place, report = None, None
    with stops.stop_message(lambda: _stopped(place, output, overwrite=overwrite, complete=report)):
        with processes(spec.compute.device) as ranks, ranks.raise_on_all():
            job = prepare(spec.computing(predictions=False))
            for chain in job.chains:
                if any(isinstance(step, NeedsProblem) for step in chain.before):
                    raise RefusedError(
                        f"the chain {chain.text!r} evaluates the model again, which --sharded does "
                        "not support",
                        remedy="Compute this chain in one process, without --sharded.",
                    )
            place = job.place(output)
            require_free(output, overwrite=overwrite)
            _part(job, place, overwrite=overwrite, resume=restarted)
            every = ranks.all_gather(str(place))
        if ranks.rank == 0:  # the other processes do not wait, because merging may take long
            report = _merged(job, every, output, overwrite=overwrite)
            report = _without(every, output, report)
    return report


def _without(parts: list[str], output: Path, report: MergeReport) -> MergeReport:
    """Remove the partial files, and add a note on files of other runs."""
    for part in parts:
        Path(part).unlink()
    pattern = f"{escape(output.stem)}.shard-*-of-*{escape(output.suffix)}"
    left = sorted(k.name for end in ("", ".part") for k in output.parent.glob(pattern + end))
    note = f"partial files of runs with other numbers of processes remain: {', '.join(left)}"
    return report.model_copy(update={"notes": (*report.notes, note)}) if left else report


def _stopped(place: Path | None, output: Path, *, overwrite: bool, complete: Any) -> str:
    """Return the message after a signal; only the first process reports details."""
    if os.environ.get("RANK", "0") != "0":
        return "stopped"
    if complete:
        return f"stopped; {output} is complete"
    if place is None or not (place.exists() or place.with_name(f"{place.name}.part").exists()):
        return "stopped; nothing was written"
    if not overwrite:
        return "stopped; finished rows are kept, and the same command continues the run"
    away = f" after you have moved {output} away" if output.exists() else ""
    return (
        "stopped; finished rows are kept, and the same command without --overwrite continues "
        f"the run{away}"
    )


def _part(job: Job, place: Path, **how: bool) -> None:
    """Compute this process's samples, then take part in the others' batches until they finish."""
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
