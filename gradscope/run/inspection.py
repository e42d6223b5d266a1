"""What a run would compute, from what, and what it would cost: the first batch, and no file."""

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import nan, prod
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from gradscope.blocks import ChosenVariant, Evaluation
from gradscope.config import memory_text
from gradscope.core.batch import Batch
from gradscope.core.precision import dtype_name
from gradscope.engine.certificate import finite_samples
from gradscope.engine.chains import bind
from gradscope.engine.fold import prepare_chains, usable
from gradscope.errors import OutputError
from gradscope.model.problem import slopes
from gradscope.process.memory import timed
from gradscope.run.budget import Sizes, plan, rehearsal
from gradscope.run.execute import keeps_states, rows_of
from gradscope.run.job import Job, file_plan, max_dense_samples
from gradscope.run.overlap import BatchSize
from gradscope.stages.chain import Chain
from gradscope.stages.labels import mean_loss, mean_norm
from gradscope.stages.losses import options
from gradscope.stages.reducers.base import carried_state
from gradscope.storage import Layout, file_bytes

if sys.platform != "win32":
    import resource

LARGE = 10**9  # bytes of a file worth a word beforehand
_FEW = 32  # samples that tell the structure of all, where they are small
_PROJECTED = 256

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class DiskSpace:
    """What a result file takes, and what there is for it."""

    layout: str  # the one asked for
    layouts: dict[str, int]  # bytes of the file in each layout
    smaller: dict[str, int]  # bytes of the file by options that would make it smaller
    kept: int  # bytes of an unfinished file, which are on the disk already
    free: int  # bytes on the disk, or within the quota where the file system tells it
    limit: int | None  # bytes that the system lets a file have
    seconds: float  # of computing, without waiting for the disk
    compressed: bool  # whether rows are: the bytes are then the most it may take

    @property
    def bytes(self) -> int:
        """The bytes of the file."""
        return self.layouts[self.layout]

    def holds(self, size: int) -> bool:
        """Whether a file of `size` bytes fits."""
        return size <= self.free + self.kept and (self.limit is None or size <= self.limit)

    def require(self, path: Path) -> None:
        """Refuse a file that does not fit, and say what would; a compressed one may fit."""
        if self.compressed or self.holds(self.bytes):
            return
        if self.limit is not None and self.bytes > self.limit:
            there = f"a file may have {memory_text(self.limit)} here (ulimit -f)"
        else:
            there = f"the disk has {memory_text(self.free)} free"
            if self.kept:
                there += f", besides {memory_text(self.kept)} of the unfinished file"
        found = [f"{k} ({memory_text(v)})" for k, v in self.smaller.items() if self.holds(v)]
        raise OutputError(
            f"the file would take {memory_text(self.bytes)}, and {there}",
            where=str(path),
            remedy=f"Store less: {', '.join(found)}; or choose another disk."
            if found
            else "Choose another disk, or compute fewer --samples or --parameters.",
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"bytes": self.bytes, "fits": self.holds(self.bytes)}


@dataclass(frozen=True)
class Estimate:
    """The plan of a run: what it would cost, found on its first batch."""

    samples: int
    batch_size: int
    backend: str  # chosen on the first batch
    notes: tuple[str, ...]
    chains: tuple[str, ...]  # in canonical spelling
    room: DiskSpace  # on the disk; and seconds, from the second evaluation of the first batch
    memory: int | None  # bytes at the peak, above the loaded model and data; None if unknown
    available: int | None  # bytes that there are for it; None if unknown
    ways: tuple[ChosenVariant, ...]  # kernel variants
    noun: str = "sample"  # what has a row: sample or token

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
    wrong: float | None  # share that is predicted as another class; None where there are none


@dataclass(frozen=True)
class Phase:
    """A part of the first batch's answer and proof."""

    phase: str
    seconds: float
    passes: float  # the same in plain forward and backward passes of the batch


@dataclass(frozen=True)
class Inspection:
    """What a run would compute, from what, and at what cost."""

    model: dict[str, Any]
    checkpoint: dict[str, Any]
    dataset: dict[str, Any]
    loss: dict[str, Any]
    first: FirstBatch
    certificate: dict[str, Any]  # the proof of the first batch
    phases: tuple[Phase, ...]  # what that took
    plan: Estimate

    def to_json(self) -> dict[str, Any]:
        """Return plain data under a versioned schema."""
        parts = ("model", "checkpoint", "dataset", "loss", "certificate")
        return {
            "schema": "gradscope.check",
            "version": 1,
            **{name: getattr(self, name) for name in parts},
            "first_batch": asdict(self.first),
            "phases": [asdict(phase) for phase in self.phases],
            "plan": self.plan.to_json(),
        }


def inspect(job: Job) -> Inspection:
    """Evaluate and prove the first batch of a job whose `verify` is not "never"; say what it is."""
    cost = estimate(job, None)
    problem, loaded = job.session.problem, job.checkpoint
    certificate = job.session.certificate
    assert certificate is not None  # the first batch was proved
    batch = job.load(0, min(cost.batch_size, len(job.rows)))
    evaluation = job.session.evaluate(batch, job.request())
    labelled = job.session.labels.of(batch)
    finite = finite_samples(evaluation).reshape(len(batch), -1).all(1)
    predicted = job.session.predictions_of(batch, evaluation)
    other = predicted["prediction"] != batch.targets.flatten() if "margin" in predicted else None

    def spread(values: Tensor) -> tuple[float, float, float]:
        kept = values.detach()[finite].double()
        if not len(kept):
            return nan, nan, nan
        return float(kept.min()), float(kept.median()), float(kept.max())

    return Inspection(
        model={
            "class": type(problem.model).__name__,
            "mode": job.spec.model.mode,
            "parameters": len(problem.parameters),
            "numbers": sum(p.numel() for p in problem.parameters.values()),
            "dtype": dtype_name(problem.dtype),
            "device": str(problem.device),
        },
        checkpoint={
            "path": str(loaded.path),
            **{k: getattr(loaded, k) for k in ("format", "tensors", "key", "prefix", "sha256")},
        },
        dataset=job.dataset.describe(),
        loss={"name": job.spec.loss.stage.name, **options(problem.loss)},
        first=FirstBatch(
            samples=len(batch),
            loss=spread(mean_loss(evaluation.losses, labelled)),
            norm=spread(mean_norm(evaluation.gradients.norms, labelled)),
            nonfinite=int((~finite).sum()),
            wrong=None if other is None else float(other.double().mean()),
        ),
        certificate=certificate.to_json(),
        phases=_phases(job, batch, certificate.phases),
        plan=cost,
    )


def _phases(job: Job, batch: Batch, took: Mapping[str, float]) -> tuple[Phase, ...]:
    """Hold what the first batch took against a plain pass of it, the faster one of two."""
    problem, labelled = job.session.problem, job.session.labels.of(batch)

    def plain() -> tuple[Tensor, ...]:
        with problem.state.restoring():
            return slopes(problem.losses(labelled), problem.parameters.values())

    once = min(timed(plain, problem.device)[0] for _ in range(2))
    return tuple(Phase(name, seconds, seconds / once) for name, seconds in took.items())


def estimate(job: Job, path: Path | None) -> Estimate:
    """Plan the batch size, and evaluate, prove and time the first batch; nothing is written."""
    budget = plan(job, measured=True)
    size = BatchSize(budget.batch_size, fixed=job.session.settings.own_loss)
    with job.tuner().active() as tuner:
        room = size.fitting(partial(_tried, job, path), len(job.rows))
    notes = (*job.notes, *budget.notes, *job.session.notes, *size.notes)
    return Estimate(
        samples=len(job.rows),
        batch_size=size.samples,
        backend=job.session.backend,
        notes=tuple(dict.fromkeys(notes)),
        chains=tuple(chain.text for chain in job.chains),
        room=room,
        memory=budget.peak,
        available=budget.available,
        ways=tuple(tuner.chosen.values()),
        noun=job.spec.compute.rows,
    )


def preflight(
    job: Job, path: Path, *, overwrite: bool = False, large: int | None = None
) -> DiskSpace | None:
    """Return what a run needs whose file may have more than `large` bytes, None for any other.

    A few samples are computed, and forgotten again.
    """
    folder, there = os.path.isdir(path.absolute().parent), os.path.exists(path)  # noqa: PTH110, PTH112
    refused = not folder or (there and not overwrite)
    n, row = len(job.rows), sum(p.nbytes for p in job.session.problem.parameters.values())
    others = sum(8 * n * n for chain in job.chains if chain.reducer is not None)
    rows = sum(n * row for chain in job.chains if chain.reducer is None)
    large = LARGE if large is None else large
    if refused or rows + others <= large:  # unless a chain makes rows larger
        return None  # opening the file says why, or that nothing is left to do
    sizes = Sizes.of(job)
    if sizes is not None and n * sizes.rows + others <= large:
        return None  # a chain makes rows smaller
    few = min(_FEW, job.batch_size, max(2, max_dense_samples(job.session)))
    size = BatchSize(few, fixed=job.session.settings.own_loss)
    with rehearsal(job, verify="never") as rehearsed:
        found = size.fitting(partial(_tried, rehearsed, path), len(job.rows))
    found.require(path)
    return found if found.bytes > large else None


def _tried(job: Job, path: Path | None, n: int) -> DiskSpace:
    """Evaluate the first n samples twice: the second time tells how long it takes."""
    batch = job.load(0, n)
    passes = 1

    def once_more() -> list[Batch]:
        nonlocal passes
        passes += 1
        return [batch]

    left = -(-len(job.rows) // n)
    chains = prepare_chains(job.session, job.chains, once_more, left)
    job.session.evaluate(batch, job.request(left))
    begun = time.perf_counter()
    evaluation = job.session.evaluate(batch, job.request(left))
    for gradients in rows_of(job, chains, batch, evaluation).chains:
        for block in (gradients or {}).values():
            for _ in block.tiles():
                pass
    seconds = (time.perf_counter() - begun) * passes * len(job.rows) / n
    return _room(job, path, chains, batch, evaluation, seconds)


def _room(
    job: Job,
    path: Path | None,
    chains: Sequence[Chain],
    batch: Batch,
    evaluation: Evaluation,
    seconds: float,
) -> DiskSpace:
    """Return what the result file takes, by how one batch is structured.

    Of a file in the working directory where `path` is None; the chains have had earlier passes.
    """
    plan, rows = file_plan(job), rows_of(job, chains, batch, evaluation)
    more = _aggregate_shapes(job, chains, batch, evaluation)

    def size(layout: Layout, dtype: torch.dtype) -> int:
        return sum(file_bytes(replace(plan, layout=layout, dtype=dtype), rows, *more))

    layouts = {name: size(name, plan.dtype) for name in get_args(Layout)}
    smaller = {"--layout factored": layouts["factored"]}
    if layouts["auto"] < 0.9 * layouts["factored"]:
        smaller["--layout auto"] = layouts["auto"]
    if plan.dtype.itemsize > 2:
        smaller["--dtype float16"] = size(plan.layout, torch.float16)
    table = sum(file_bytes(plan, replace(rows, chains=(None,) * len(chains)), *more))
    projected = plan.n * _PROJECTED * plan.dtype.itemsize
    smaller[f'a projection (-t "project:dim={_PROJECTED}")'] = table + projected
    mean = sum(p.nbytes for p in job.session.problem.parameters.values())
    smaller['a reducer (such as -t "mean")'] = table + mean
    folder = Path.cwd() if path is None else path.absolute().parent
    kept, limit = 0, None
    with suppress(OSError):  # mostly, there is no unfinished file
        kept = 0 if path is None else 512 * getattr(Path(f"{path}.part").stat(), "st_blocks", 0)
    if sys.platform != "win32":
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limit = None if limit == resource.RLIM_INFINITY else limit
    return DiskSpace(
        layout=plan.layout,
        layouts=layouts,
        smaller={k: v for k, v in smaller.items() if v < layouts[plan.layout]},
        kept=kept,
        free=shutil.disk_usage(folder).free if folder.is_dir() else 0,
        limit=limit,
        seconds=seconds,
        compressed=plan.compression is not None,
    )


def _aggregate_shapes(
    job: Job, chains: Sequence[Chain], batch: Batch, evaluation: Evaluation
) -> tuple[list[Shapes], list[Shapes]]:
    """Return the shapes of what the file holds besides rows: results, and the states it keeps.

    Some grow with the number of samples: it is told by the difference that half of these makes.
    """
    kept = usable(job.session, batch, evaluation)
    if kept is None:
        return [], []
    gradients, problem, samples = kept
    n, few, times = gradients.n, gradients.n // 2, 0.0
    every = [job.session.labels.chain(bind("mean"))]
    every += [chain for chain in chains if chain.reducer is not None]
    states = before = [carried_state(chain.start(gradients, problem, samples)) for chain in every]
    if few and job.session.labels.mode != "exact":  # which goes with sums only
        part, times = slice(0, few), (len(job.rows) - n) / (n - few)
        given = gradients.select(part), problem, samples.select(part)
        before = [carried_state(chain.start(*given)) for chain in every]
    stored = [_scale_shapes(a, b, times) for a, b in zip(states, before, strict=True)]
    results = [
        _scale_shapes(chain.result(a), chain.result(b), times)
        for chain, a, b in zip(every[1:], states[1:], before[1:], strict=True)
    ]
    size = sum(prod(shape) * dtype.itemsize for one in stored for shape, dtype in one.values())
    return results, stored if keeps_states(job, size) else []


def _scale_shapes(found: Mapping[str, Tensor], half: Mapping[str, Tensor], times: float) -> Shapes:
    """Return shapes that have grown by their difference to those of `half`, so many times."""

    def shape(key: str) -> tuple[int, ...]:
        pairs = zip(found[key].shape, half[key].shape, strict=True)
        return tuple(a + round((a - b) * times) for a, b in pairs)

    return {key: (shape(key), now.dtype) for key, now in found.items() if key in half}
