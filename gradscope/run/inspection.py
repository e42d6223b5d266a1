"""Inspection of a run without a result file: inputs, first batch, proof, cost."""

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

LARGE = 10**9  # the size of a larger file is reported before the run, in bytes
_FEW = 32  # the number of samples from which a file's size is estimated, at most
_PROJECTED = 256

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class DiskSpace:
    """The disk space that a result file needs, and the space available."""

    layout: str  # the requested layout
    layouts: dict[str, int]  # {layout: bytes of the file}
    smaller: dict[str, int]  # {option: bytes of the file} for options that make it smaller
    kept: int  # bytes of an unfinished file on the disk
    free: int  # free bytes on the disk, within the quota if the file system reports it
    limit: int | None  # the system's limit for the size of a file, in bytes
    seconds: float  # computing time, without the disk
    compressed: bool  # whether rows are compressed; sizes are then upper bounds

    @property
    def bytes(self) -> int:
        """The size of the file in bytes."""
        return self.layouts[self.layout]

    def holds(self, size: int) -> bool:
        """Whether a file of `size` bytes fits."""
        return size <= self.free + self.kept and (self.limit is None or size <= self.limit)

    def require(self, path: Path) -> None:
        """Raise if the file does not fit, unless it is compressed and may be smaller."""
        if self.compressed or self.holds(self.bytes):
            return
        if self.limit is not None and self.bytes > self.limit:
            there = f"the limit for a file is {memory_text(self.limit)} (ulimit -f)"
        else:
            there = f"the disk has {memory_text(self.free)} free"
            if self.kept:
                there += f" (and {memory_text(self.kept)} are used by the unfinished file)"
        found = [f"{k} ({memory_text(v)})" for k, v in self.smaller.items() if self.holds(v)]
        raise OutputError(
            f"the file needs {memory_text(self.bytes)}, but {there}",
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
    """The estimated cost of a run, measured on its first batch."""

    samples: int
    batch_size: int
    backend: str  # chosen on the first batch
    notes: tuple[str, ...]
    chains: tuple[str, ...]  # in canonical spelling
    room: DiskSpace  # disk space; and seconds, from the second evaluation of the first batch
    memory: int | None  # peak bytes in addition to model and data, if known
    available: int | None  # free bytes of memory, if known
    ways: tuple[ChosenVariant, ...]  # kernel variants
    noun: str = "sample"  # the word for a row: sample or token

    def to_json(self) -> dict[str, Any]:
        """Return plain data under a versioned schema."""
        own = asdict(self)
        del own["room"]
        own["ways"] = [one.to_json() for one in self.ways]
        return {"schema": "gradscope.plan", "version": 1, **own, **self.room.to_json()}


@dataclass(frozen=True)
class FirstBatch:
    """Losses and norms of the first batch: (min, median, max) over finite samples."""

    samples: int
    loss: tuple[float, float, float]
    norm: tuple[float, float, float]
    nonfinite: int  # samples without a finite gradient
    wrong: float | None  # share of wrong predictions, if targets are classes


@dataclass(frozen=True)
class Phase:
    """One phase of the evaluation and proof of the first batch."""

    phase: str
    seconds: float
    passes: float  # the time in units of a plain forward and backward pass


@dataclass(frozen=True)
class Inspection:
    """The inputs, the first batch and the estimated cost of a run."""

    model: dict[str, Any]
    checkpoint: dict[str, Any]
    dataset: dict[str, Any]
    loss: dict[str, Any]
    first: FirstBatch
    certificate: dict[str, Any]  # the proof of the first batch
    phases: tuple[Phase, ...]  # the times of evaluation and proof
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
    """Evaluate and prove the first batch of a job, whose `verify` must not be "never"."""
    cost = estimate(job, None)
    problem, loaded = job.session.problem, job.checkpoint
    certificate = job.session.certificate
    assert certificate is not None  # the first batch was proved
    batch = job.load(0, min(cost.batch_size, job.work()))
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
    """Return the phases of the first batch, relative to the faster of two plain passes."""
    problem, labelled = job.session.problem, job.session.labels.of(batch)

    def plain() -> tuple[Tensor, ...]:
        with problem.state.restoring():
            return slopes(problem.losses(labelled.computed), problem.parameters.values())

    once = min(timed(plain, problem.device)[0] for _ in range(2))
    return tuple(Phase(name, seconds, seconds / once) for name, seconds in took.items())


def estimate(job: Job, path: Path | None) -> Estimate:
    """Plan the batch size; evaluate, prove and time the first batch; write no file."""
    budget = plan(job, measured=True)
    size = BatchSize(budget.batch_size, fixed=job.session.settings.own_loss)
    with job.tuner().active() as tuner:
        room = size.fitting(partial(_tried, job, path), job.work())
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
        noun=job.noun,
    )


def preflight(
    job: Job, path: Path, *, overwrite: bool = False, large: int | None = None
) -> DiskSpace | None:
    """Return the disk space of a run, or None if its file has at most `large` bytes.

    A few samples are computed and discarded.

    Raises:
        OutputError: The file does not fit on the disk.
    """
    folder, there = os.path.isdir(path.absolute().parent), os.path.exists(path)  # noqa: PTH110, PTH112
    refused = not folder or (there and not overwrite)
    n, row = len(job.rows), sum(p.nbytes for p in job.session.problem.parameters.values())
    others = sum(8 * n * n for chain in job.chains if chain.reducer is not None)
    rows = sum(n * row for chain in job.chains if chain.reducer is None)
    large = LARGE if large is None else large
    if refused or rows + others <= large:  # ignores chains that make rows larger
        return None  # opening the file raises the error, or finds it complete
    sizes = Sizes.of(job)
    if sizes is not None and n * sizes.rows + others <= large:
        return None  # the chains make rows smaller
    few = max(job.least, min(_FEW, job.batch_size, max(2, max_dense_samples(job.session))))
    size = BatchSize(few, fixed=job.session.settings.own_loss)
    with rehearsal(job, verify="never") as rehearsed:
        found = size.fitting(partial(_tried, rehearsed, path), job.work())
    found.require(path)
    return found if found.bytes > large else None


def _tried(job: Job, path: Path | None, n: int) -> DiskSpace:
    """Evaluate the first n samples twice, and time the second evaluation."""
    batch = job.load(0, n)
    passes = 1

    def once_more() -> list[Batch]:
        nonlocal passes
        passes += 1
        return [batch]

    left = -(-job.work() // n)
    chains = prepare_chains(job.session, job.chains, once_more, left)
    job.session.evaluate(batch, job.request(left))
    begun = time.perf_counter()
    evaluation = job.session.evaluate(batch, job.request(left))
    for gradients in rows_of(job, chains, batch, evaluation).chains:
        for block in (gradients or {}).values():
            for _ in block.tiles():
                pass
    seconds = (time.perf_counter() - begun) * passes * job.work() / batch.work
    return _room(job, path, chains, batch, evaluation, seconds)


def _room(
    job: Job,
    path: Path | None,
    chains: Sequence[Chain],
    batch: Batch,
    evaluation: Evaluation,
    seconds: float,
) -> DiskSpace:
    """Return the disk space for the result file, estimated from the blocks of one batch.

    Without `path`, the working directory is used. Earlier passes of the chains must be done.
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
    with suppress(OSError):  # usually there is no unfinished file
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
    """Return the shapes of the results and of the stored states.

    If states grow with the number of samples, their growth is extrapolated from half a batch.
    """
    kept = usable(job.session, batch, evaluation)
    if kept is None:
        return [], []
    gradients, problem, samples = kept
    n, few, times = gradients.n, gradients.n // 2, 0.0
    every = [job.session.labels.chain(bind("mean"))]
    every += [chain for chain in chains if chain.reducer is not None]
    states = before = [carried_state(chain.start(gradients, problem, samples)) for chain in every]
    if few and job.session.labels.mode != "exact":  # exact expectations only support sums
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
    """Return the shapes of `found` plus `times` their difference from the shapes of `half`."""

    def shape(key: str) -> tuple[int, ...]:
        pairs = zip(found[key].shape, half[key].shape, strict=True)
        return tuple(a + round((a - b) * times) for a, b in pairs)

    return {key: (shape(key), now.dtype) for key, now in found.items() if key in half}
