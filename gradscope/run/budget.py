"""The memory budget: the batch size of a run, and the memory that it takes.

The default batch size follows from the sizes of one sample: the tensors that its forward pass
records, its rows and the reducers' states. The batch is large enough to keep the kernels busy, if a
generous sum of these sizes fits into half of the free memory. If memory still runs out, `BatchSize`
halves the batch.

Counted sizes do not predict the peak. On a CPU, a convolution needs eight times the memory that
autograd records, and a linear layer three times: kernels allocate workspace that torch does not
report. So for `--memory`, and if the peak is reported to the user, it is measured: small batches
are computed and proved as in a run, without a file. The batch size is doubled until the difference
between two peaks exceeds the memory that libraries, the allocator and partly filled tiles keep. The
peaks of larger batches are extrapolated linearly from the last two.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradscope.blocks import unmeasured
from gradscope.config import memory_text, parse_memory
from gradscope.core.batch import Batch
from gradscope.core.texts import count
from gradscope.engine.fold import prepare_chains
from gradscope.engine.session import Session, Verify
from gradscope.errors import ModelError, SpecError
from gradscope.model.independence import require_independent, require_unaffected
from gradscope.model.problem import Problem
from gradscope.model.sample_axis import locating_lost_axis
from gradscope.process.memory import (
    available,
    peak_memory,
    release_freed_memory,
    slices,
    used_memory,
)
from gradscope.process.shortage import is_shortage
from gradscope.run.execute import Run
from gradscope.run.job import BATCH_SAMPLES, Job, max_dense_samples
from gradscope.run.overlap import BatchSize
from gradscope.stages.reducers.base import carried_bytes
from gradscope.storage import KEEP_BYTES, PART_BYTES, FinishedBatch, Scratch, States

_LARGEST = 4096  # larger batches are not faster
_BUSY = 2**28  # on a CPU, more bytes of autograd graph per thread are not faster
_THREADS = 2  # the minimum number of threads for this
_CACHED = 2**24  # batches of small models are faster while their graph has fewer bytes
_GRAPHS = 8  # the assumed peak in multiples of the graph: gradients, factors and workspace
_SPARE = 2**28  # bytes for tiles and libraries
_MARGIN = 0.8  # the share of --memory to plan with
_SHARE = 0.5  # the share of free memory to plan with, without --memory
_CLEAR = 48 * 2**20  # a larger difference of two peaks, in bytes, comes from the samples
_WRITER = 16 * 2**20  # bytes for HDF5, checks of the finished file, and write buffers


@dataclass(frozen=True)
class MemoryPlan:
    """The batch size of a run and the memory that it takes."""

    batch_size: int
    notes: tuple[str, ...] = ()  # the reason, if the batch size is smaller than usual
    peak: int | None = None  # bytes in addition to model and data, if measured
    available: int | None = None  # free bytes, if the system reports them


def plan(
    job: Job, *, measured: bool = False, free: int | None = None, busy: int | None = None
) -> MemoryPlan:
    """Return the requested batch size, or a batch size that fits into memory.

    Args:
        job: The run.
        measured: Measure the peak, even if the batch size does not depend on it.
        free: Free bytes, by default what the system reports.
        busy: On a CPU, the bytes of autograd graph per thread that are enough.

    Raises:
        SpecError: A single sample takes more than `--memory`.
    """
    free = available(job.session.problem.device) if free is None else free
    asked = job.session.settings
    proved = asked.verify != "never" and not asked.own_loss and len(job.rows) > 1
    try:
        found = _choose_plan(job, free, measured=measured, busy=busy or _BUSY)
    except ModelError:
        if proved:
            _require_independent(job)  # its error is more precise if samples are coupled
        raise
    if proved and job.spec.compute.batch_size is None and found.batch_size == 1:
        _require_independent(job)
    return found


def _choose_plan(job: Job, free: int | None, *, measured: bool, busy: int) -> MemoryPlan:
    asked = job.spec.compute
    if asked.memory is not None:
        with rehearsal(job) as rehearsed:
            return _plan_within(rehearsed, parse_memory(asked.memory), free)
    given = asked.batch_size is not None or job.session.settings.own_loss
    if free is None and not given:
        return MemoryPlan(max(job.least, min(job.batch_size, max_dense_samples(job.session))))
    if given and not measured:
        return MemoryPlan(job.batch_size, available=free)
    with rehearsal(job) as rehearsed:
        return _plan_by_sizes(rehearsed, free, fixed=given, measured=measured, busy=busy)


def _require_independent(job: Job) -> None:
    """Raise if two samples are coupled, which batches of one cannot show."""
    if job.dataset.alone:
        return  # no batch can hold two samples

    def compared(problem: Problem, batch: Batch) -> None:
        with problem.state.watching(), locating_lost_axis(problem, batch):
            losses = problem.losses(batch).detach()
            require_independent(problem, batch, losses)
            require_unaffected(problem, batch, losses, judged=True)

    with rehearsal(job) as one:
        problem, two = one.session.problem, one.load(0, max(2, one.least)).computed.head(2)
        known, two = problem.state.change_count, one.session.labels.of(two).detached()
        try:
            compared(problem, two)
        except Exception as error:
            if is_shortage(error):
                return  # two samples do not fit into memory
            if problem.state.change_count == known:
                raise
            compared(problem, two)  # the state that the forward pass changes is now restored


def _plan_within(job: Job, memory: int, free: int | None) -> MemoryPlan:
    """Return the largest power of two whose measured peak stays within `--memory`."""
    most, budget = min(job.work(), max(job.least, _LARGEST)), _MARGIN * memory
    found = Rehearsals(job).curve(most, budget)
    if found is None:
        return MemoryPlan(job.batch_size, ("this system does not report memory use",), None, free)
    batch_size = found.most(budget, most)
    if not batch_size:
        least = memory_text(int(found.peak(job.least) / _MARGIN))
        raise SpecError(
            f"a batch of {'one sample' if job.least == 1 else f'{job.least:,} samples'} takes "
            f"about {memory_text(found.peak(job.least))}"
            + (", and a group must be in one batch" if job.groups is not None else ""),
            where=f"memory {job.spec.compute.memory}",
            remedy=f"Give more than {least} ({_MARGIN:.0%} of it is used), or compute fewer "
            "`parameters` at a time.",
        )
    peak = found.peak(batch_size)
    note = f"batches of {count(batch_size, 'sample')} should take {memory_text(peak)}"
    note += f" of the allowed {memory_text(memory)}"
    return MemoryPlan(batch_size, (note,), max(found.largest, peak), free)


def _plan_by_sizes(
    job: Job, free: int | None, *, fixed: bool, measured: bool, busy: int
) -> MemoryPlan:
    """Return the job's batch size, or a smaller one if memory is short and it is not `fixed`."""
    rehearsals = Rehearsals(job) if measured else None  # first, so the peak includes loaded code
    batch_size, sizes, notes = job.batch_size, Sizes.of(job), list[str]()
    limit = inf if free is None else free
    if sizes is not None and not fixed:
        raw = any(c.reducer is not None and c.reducer.raw for c in job.chains)
        least = 2 if raw or job.spec.compute.layout != "dense" else 1  # one hides structure
        least = max(least, job.least)
        batch_size = min(batch_size, max(least, sizes.busy(job.session.problem.device, busy)))
        if job.tokens is None:
            batch_size = min(batch_size, max(least, BATCH_SAMPLES, sizes.cached))
        wanted = min(batch_size, job.work())
        fitting = max(job.least, sizes.fitting(wanted, _SHARE * limit))
        if fitting < wanted:
            batch_size, half = fitting, memory_text(_SHARE * limit)
            note = f"batches of {count(fitting, 'sample')}: larger batches may take over {half}"
            notes.append(f"{note}, half of the free memory")
    most = min(batch_size, job.work())
    takes = inf if sizes is None else sizes.most(most)
    if inf > takes > limit and not fixed:
        note = f"a batch may take up to {memory_text(takes)}; {memory_text(limit)} are free"
        notes.append(note)
    if rehearsals is None:
        return MemoryPlan(batch_size, tuple(notes), available=free)
    whole = job.session.settings.own_loss  # which samples share a batch is part of the answer
    found = rehearsals.curve(most, limit) if takes > limit and not whole else None
    if found is None:
        return MemoryPlan(batch_size, tuple(notes), rehearsals.peak(most), free)
    peak, fits = found.peak(most), found.most(limit, most)
    if peak > limit:
        note = f"batches of {count(most, 'sample')} take about {memory_text(peak)}"
        notes.append(f"{note}; {memory_text(limit)} are free, enough for {fits:,}")
    return MemoryPlan(batch_size, tuple(notes), peak, free)


@dataclass(frozen=True)
class Sizes:
    """The memory of one sample, in bytes."""

    graph: int  # tensors that its forward pass records
    rows: int  # the rows of all chains
    states: int  # the states of all reducers after the sample
    gradient: int  # the gradient of all parameters

    @classmethod
    def of(cls, job: Job) -> "Sizes | None":
        """Return the sizes of one sample, evaluated without proof, or None if it raises."""
        try:
            with rehearsal(job, verify="never") as one:
                n = 1 if one.tokens is None else min(2, len(one.rows))  # to detect shared positions
                sample = one.load(0, max(n, one.least))
                sample = sample if one.groups is None else sample.one(0)
                labelled = one.session.labels.of(sample).computed
                graph = graph_bytes(one.session.problem, labelled)
                graph //= 1 if one.groups is None else len(labelled.sample_batch)
                chains = prepare_chains(one.session, one.chains, lambda: [sample])
                rows, states = Run(one, chains, Path(), NullWriter(), BatchSize(n)).reduce_batch(
                    sample, samples_left=len(sample)
                )
                if one.tokens is not None and one.session.factored_tokens:
                    graph //= one.tokens.positions  # one pass for all tokens
        except Exception:  # the run will report the error
            return None
        blocks = [block for made in rows.chains for block in (made or {}).values()]
        rows_bytes = sum(block.n * prod(block.shape) * block.dtype.itemsize for block in blocks)
        return cls(
            graph=graph,
            rows=rows_bytes * len(job.rows) // job.work(),
            states=sum(map(carried_bytes, states.values())),
            gradient=sum(p.nbytes for p in job.session.problem.parameters.values()),
        )

    def busy(self, device: torch.device, size: int = _BUSY) -> int:
        """Return a batch size that keeps the device busy; on a CPU, a power of two.

        On a CPU, more than `size` bytes of autograd graph per thread are not needed.
        """
        if device.type != "cpu":
            return _LARGEST
        found = size * max(_THREADS, torch.get_num_threads()) // max(1, self.graph)
        return 1 << max(1, found).bit_length() - 1

    @property
    def cached(self) -> int:
        """The batch size, a power of two, up to which batches of small models become faster."""
        return 1 << (_CACHED // max(1, self.graph)).bit_length() >> 1

    def most(self, n: int) -> int:
        """Return an upper bound in bytes for batches of n samples."""
        return _SPARE + n * self.each + self.fixed

    def fitting(self, most: int, budget: float) -> int:
        """Return the largest of `most` and lower powers of two that fits `budget`, at least 1.

        Samples may always take as much as states and gradients: a smaller batch saves little.
        """
        room = max(budget - _SPARE - self.fixed, self.fixed)
        return next((n for n in _powers(most) if n * self.each <= room), 1)

    @property
    def each(self) -> int:
        """An upper bound in bytes for a sample: one batch is computed while one is written."""
        return _GRAPHS * self.graph + 2 * self.rows

    @property
    def fixed(self) -> int:
        """An upper bound in bytes for the states and gradients of any batch."""
        return 2 * self.states + 4 * self.gradient


def _powers(limit: int) -> list[int]:
    """Return `limit` and the powers of two up to it, in descending order."""
    return [limit, *(1 << k for k in reversed(range(limit.bit_length())))]


@dataclass(frozen=True)
class PeakCurve:
    """Measured peak memory by batch size."""

    points: tuple[tuple[int, int], ...]  # (samples, bytes), ascending, at least one
    complete: bool  # whether larger batches can be extrapolated from the last two points

    @property
    def largest(self) -> int:
        """The largest measured peak, in bytes."""
        return max(size for _, size in self.points)

    def peak(self, n: int) -> int:
        """Return the bytes for batches of n samples, on the line through the nearest two points."""
        first, last = self.points[0], self.points[-1]
        if n <= first[0] or first == last:
            return first[1]
        lines = [*pairwise(self.points)]
        (left, low), (right, high) = next((k for k in lines if n <= k[1][0]), lines[-1])
        return round(low + (n - left) * max(0, high - low) / (right - left))

    def most(self, budget: float, limit: int) -> int:
        """Return the largest of `limit` and lower powers of two whose peak fits, or 0.

        Powers of two do not change with small differences between measurements.
        """
        first, last = self.points[0][0], self.points[-1][0]
        known = [n for n in _powers(limit) if first <= n and (self.complete or n <= last)]
        return next((n for n in known if self.peak(n) <= budget), 0)


class Rehearsals:
    """Measures a job's peak memory above the memory in use when the object is made.

    Code that the first rehearsal loads remains in memory. So every later rehearsal includes it, as
    a run does.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._device = job, job.session.problem.device
        few = min(2, job.work(), job.batch_size)
        job.load(0, max(job.least, few))  # raises errors in the data first
        gc.collect()  # a peak is relative to the memory in use
        release_freed_memory()
        self._base = used_memory(self._device)

    def peak(self, n: int) -> int | None:
        """Return the peak bytes with batches of n samples.

        Returns None if the system does not report memory, or if memory runs out.
        """
        with peak_memory(self._device) as above:
            start = used_memory(self._device)
            fits = rehearse(self._job, n)
        if self._base is None or start is None or not above or not fits:
            return None
        return _WRITER + start + above[0] - self._base

    def curve(self, most: int, budget: float) -> PeakCurve | None:
        """Measure small batches, up to `most` samples, while the next is likely to fit `budget`.

        Returns None if the system does not report memory.
        """
        least = self._job.least
        self.peak(least)  # loads code, so later differences come from the samples
        first = self.peak(least)
        if first is None:
            return None
        points, rise = [(least, first)], 0
        while points[-1][0] < most and rise < _CLEAR:
            n, last = points[-1]
            might = last + max(2 * rise, last - first)
            peak = self.peak(min(2 * n, most)) if might <= budget else None
            if peak is None:
                return PeakCurve(tuple(points), complete=False)
            points.append((min(2 * n, most), peak))
            rise = max(0, peak - last)
        return PeakCurve(tuple(points), complete=True)


def graph_bytes(problem: Problem, batch: Batch) -> int:
    """Return the bytes in the graph of a batch's losses, without parameters and buffers."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(t: Tensor) -> Tensor:
        if t.layout == torch.strided:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t.detach()  # without detach, an output and its node would form a reference cycle

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        problem.losses(batch.detached())
    own = chain(problem.model.parameters(), problem.model.buffers())
    others = storages.keys() - {t.untyped_storage().data_ptr() for t in own}
    return sum(storages[place].nbytes() for place in others)


def samples_busy(session: Session, batch: Batch, size: int) -> int:
    """Return a batch size that keeps the device busy, at least 2; see `Sizes.busy`.

    It follows from the first sample of `batch`, or is `_LARGEST` if that cannot be evaluated.
    """
    trial = session.rehearsal("never")
    try:
        with unmeasured(), trial.problem.state.watching():
            graph = graph_bytes(trial.problem, trial.labels.of(batch.select(slice(0, 1))))
    except Exception:  # the run will report the error
        return _LARGEST
    finally:
        trial.close()
    return max(2, Sizes(graph, 0, 0, 0).busy(trial.problem.device, size))  # one hides structure


class NullWriter:
    """A writer without a file; it keeps the rows of a batch until the next batch is appended.

    A slow writer keeps rows for the same time, so the peak of a run is not higher.
    """

    completed = 0

    def __init__(self) -> None:
        self._last_rows: Any = None
        self._scratch = Scratch()

    def append(
        self, rows: FinishedBatch, states: States | None = None, *, proved: bool = False
    ) -> None:
        """Release the last rows, copy small states, and form dense rows in parts, as a writer."""
        self._last_rows = None
        own = [t for state in (states or {}).values() for t in state.values()]
        copies = [t.clone() for t in own] if sum(t.nbytes for t in own) <= KEEP_BYTES else []
        self._last_rows = rows, copies
        for block in (b for gradients in rows.chains for b in (gradients or {}).values()):
            if block.dense_if_formed is not None:
                continue
            for some in slices(block.n, prod(block.shape) * block.dtype.itemsize, PART_BYTES):
                part = block.select(some)
                part.dense(self._scratch.take((part.n, *block.shape), block.dtype, block.device))

    def wait(self) -> None:
        """Return at once."""

    def go_back(self) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """Return no rows and no states."""
        return 0, {}

    def finish(self, **results: Any) -> None:
        """Do nothing."""


def rehearse(job: Job, n: int) -> bool:
    """Compute n samples twice, as a run does; return whether the memory was enough for n."""
    job.session.close()  # so that the first batch is proved, as in a run
    size = BatchSize(n)
    batches = [job.load(0, n) for _ in range(2)]  # a run also holds two loaded batches
    chains = prepare_chains(job.session, job.chains, lambda: batches[:1])
    run = Run(job, chains, Path(), NullWriter(), size)
    for done, batch in zip((0, len(job.rows) - len(batches[0])), batches, strict=True):
        run.done = done  # the first batch is proved, the last batch is audited
        run.add(batch)
    return size.samples == n


@contextmanager
def rehearsal(job: Job, verify: Verify | None = None) -> Iterator[Job]:
    """Yield the job with a separate session, which compiles nothing and is closed afterwards.

    The session verifies its results as the job's session does, or by `verify`. Kernels are not
    timed in the body, because the run has different batch sizes.
    """
    session = job.session.rehearsal(verify)
    try:
        with unmeasured():
            yield replace(job, session=session)
    finally:
        session.close()
        release_freed_memory()  # or it would add to the peak of the run
