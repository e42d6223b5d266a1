"""The memory budget: how many samples are computed at a time, and how much memory that takes.

One sample tells most: what its forward pass records, its rows and the reducers' states are counted.
A batch is no larger than keeps the kernels busy; where even a generous sum of these sizes fits, no
more has to be known, nor where a smaller batch would save next to nothing of it. Else what a run
takes is measured: a few small batches are computed and proved as a run does it, without a file.
Sizes are doubled until the difference between two of them is clear of what libraries and the
allocator keep and of tiles that are not full yet; from there on the peak grows with the size. A run
of few samples is not worth many trials: one size is measured, a small share of it, and each further
sample is taken to need the generous sum.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradscope.blocks import unmeasured
from gradscope.config import memory_text, parse_memory
from gradscope.core.batch import Batch
from gradscope.core.texts import count
from gradscope.engine.fold import settled
from gradscope.engine.session import Verify
from gradscope.errors import ModelError, SpecError
from gradscope.model.independence import require_independent, require_unaffected
from gradscope.model.problem import Problem
from gradscope.process.memory import available, peak_memory, release_freed_memory, slices, taken
from gradscope.process.shortage import is_shortage
from gradscope.run.execute import Run
from gradscope.run.job import Job, held_densely
from gradscope.run.overlap import BatchSize
from gradscope.stages.reducers.base import carried_bytes
from gradscope.storage import KEEP_BYTES, PART_BYTES, Rows, Scratch, States

_LARGEST = 4096  # larger batches gain nothing
_BUSY = 2**28  # nor, on a processor, such whose graph has more bytes a thread,
_THREADS = 2  # of which there are as many at least
_GRAPHS = 4  # times what the forward pass records: with gradients, factors and workspace
_SPARE = 2**30  # tiles, random matrices, libraries
_MARGIN = 0.8  # of a budget is planned with
_SHARE = 0.5  # of what there is, when no budget is given
_CLEAR = 96 * 2**20
_LEAST, _TRIED = 4, 64  # at least so many samples are a trial's, or that fraction of all
_WRITER = 8 * 2**20  # HDF5 itself, and pieces on their way to the disk


@dataclass(frozen=True)
class Budget:
    """How a run uses memory."""

    samples: int  # computed at a time
    notes: tuple[str, ...] = ()  # why, where it is not what one would expect
    peak: int | None = None  # bytes beside model and data, with what finding out takes
    available: int | None = None  # bytes that there are


def plan(job: Job, *, measured: bool = False, there: int | None = None) -> Budget:
    """Return the batch size that was asked for, or one that fits into memory.

    The peak is found out where the batch size depends on it, or where it is to be `measured`;
    `there` are the bytes of memory that there are, by default what the system tells.
    """
    there = available(job.scope.problem.device) if there is None else there
    asked = job.scope.settings
    proved = asked.verify != "never" and not asked.own_loss and len(job.rows) > 1
    try:
        found = _planned(job, there, measured=measured)
    except ModelError:
        if proved:
            _require_independent(job)  # one sample alone may be too few, which is to be said
        raise
    if proved and job.spec.compute.batch_size is None and found.samples == 1:
        _require_independent(job)
    return found


def _planned(job: Job, there: int | None, *, measured: bool) -> Budget:
    asked = job.spec.compute
    if asked.memory is not None:
        with rehearsal(job) as rehearsed:
            return _within(rehearsed, parse_memory(asked.memory), there)
    given = asked.batch_size is not None or job.scope.settings.own_loss
    if there is None and not given:
        return Budget(min(job.batch_size, held_densely(job.scope)))
    if given and not measured:
        return Budget(job.batch_size, available=there)
    with rehearsal(job) as rehearsed:
        return _beside_others(rehearsed, there, fixed=given, measured=measured)


def _require_independent(job: Job) -> None:
    """Compare two samples' losses with those alone: batches of one will not show coupling."""

    def compared(problem: Problem, batch: Batch) -> None:
        with problem.state.watched():
            losses = problem.losses(batch).detach()
            require_independent(problem, batch, losses)
            require_unaffected(problem, batch, losses, judged=True)

    with rehearsal(job) as one:
        problem = one.scope.problem
        known, two = problem.state.found, one.scope.labels.of(one.load(0, 2)).detached()
        try:
            compared(problem, two)
        except Exception as error:
            if is_shortage(error):
                return  # there is no room for two
            if problem.state.found == known:
                raise
            compared(problem, two)  # now that what the forward pass changes is put back


def _within(job: Job, memory: int, there: int | None) -> Budget:
    """Choose by a given budget."""
    most, budget = min(len(job.rows), _LARGEST), _MARGIN * memory
    found = Rehearsals(job).footprint(most, budget, Sizes.of(job))
    if found is None:
        return Budget(job.batch_size, ("how much memory is taken is not known here",), None, there)
    samples = found.most(budget, most)
    if not samples:
        least = memory_text(int(found.peak(1) / _MARGIN))
        raise SpecError(
            f"a single sample at a time takes about {memory_text(found.peak(1))}",
            where=f"memory {job.spec.compute.memory}",
            remedy=f"Give more than {least}, of which it is {_MARGIN:.0%}, or compute fewer "
            "--parameters at a time.",
        )
    note = f"batches of {count(samples, 'sample')} are to take {memory_text(found.peak(samples))}"
    note += f" of the {memory_text(memory)} of --memory"
    return Budget(samples, (note,), max(found.largest, found.peak(samples)), there)


def _beside_others(job: Job, there: int | None, *, fixed: bool, measured: bool) -> Budget:
    """Keep to the batch size of the job, unless it is not `fixed` and memory is short."""
    samples, sizes = job.batch_size, Sizes.of(job)
    if sizes is not None and not fixed:
        raw = any(c.reducer is not None and c.reducer.raw for c in job.chains)
        least = 2 if raw or job.spec.compute.layout != "dense" else 1  # structure shows in two
        samples = min(samples, max(least, sizes.busy(job.scope.problem.device)))
    most, limit = min(samples, len(job.rows)), inf if there is None else there
    budget = limit if fixed else _SHARE * limit
    if not measured and sizes is not None:
        takes = sizes.most(most)
        # where it is the smaller part, other sizes save little, and each trial takes a proof
        if takes <= budget or most * sizes.each <= sizes.fixed:
            note = f"any batch may take up to {memory_text(takes)}: there is {memory_text(limit)}"
            return Budget(samples, () if takes <= limit else (note,), available=there)
    rehearsals = Rehearsals(job)
    found = rehearsals.footprint(most, budget, None if fixed else sizes)
    if found is None:
        return Budget(samples, available=there)
    notes: tuple[str, ...] = ()
    if not fixed and found.most(budget, most) < most:
        most = samples = max(1, found.most(budget, most))
        note = (
            f"batches of {count(samples, 'sample')} are to take {memory_text(found.peak(samples))}"
        )
        notes = (f"{note}: half of the memory there is is {memory_text(budget)}",)
    peak = found.peak(most)
    if peak > limit:
        note = f"batches of {count(most, 'sample')} take about {memory_text(peak)}, and there is"
        fits = found.most(limit, most)
        notes += (f"{note} {memory_text(limit)}: {fits:,} would fit",)
    elif measured:
        again = [rehearsals.peak(most) or peak for _ in range(2)]  # they differ a little
        peak = max(found.largest, peak, *again)
    return Budget(samples, notes, peak, there)


@dataclass(frozen=True)
class Sizes:
    """What one sample tells of memory, in bytes."""

    graph: int  # what its forward pass records
    rows: int  # its chains' rows
    states: int  # of all reducers after it, as they are carried
    gradient: int  # of all parameters together

    @classmethod
    def of(cls, job: Job) -> "Sizes | None":
        """Count what one sample takes, evaluated but not proved; None where that does not tell.

        It is counted once for a job and its rehearsals.
        """
        if not job.sizes:
            job.sizes.append(cls._counted(job))
        found: Sizes | None = job.sizes[0]
        return found

    @classmethod
    def _counted(cls, job: Job) -> "Sizes | None":
        try:
            with rehearsal(job, verify="never") as one:
                n = 1 if one.tokens is None else min(2, len(one.rows))  # do positions meet?
                sample = one.load(0, n)
                graph = recorded(one.scope.problem, one.scope.labels.of(sample))
                chains = settled(one.scope, one.chains, lambda: [sample])
                rows, states = Run(one, chains, Path(), None, BatchSize(n)).reduced(sample, left=n)
                if one.tokens is not None and one.scope.factored_tokens:
                    graph //= one.tokens.positions  # one pass for all of them
        except Exception:  # whatever it is, the run will tell
            return None
        blocks = [block for made in rows.chains for block in (made or {}).values()]
        return cls(
            graph=graph,
            rows=sum(block.n * prod(block.shape) * block.dtype.itemsize for block in blocks),
            states=sum(map(carried_bytes, states.values())),
            gradient=sum(p.nbytes for p in job.scope.problem.parameters.values()),
        )

    def busy(self, device: torch.device) -> int:
        """Return the samples of a batch that is large enough: on a processor, a power of two."""
        if device.type != "cpu":
            return _LARGEST
        found = _BUSY * max(_THREADS, torch.get_num_threads()) // max(1, self.graph)
        return 1 << max(1, found).bit_length() - 1

    def most(self, n: int) -> int:
        """Return more bytes than batches of n samples take."""
        return _SPARE + n * self.each + self.fixed

    @property
    def each(self) -> int:
        """More bytes than a sample takes: one batch is computed, one is written."""
        return _GRAPHS * self.graph + 2 * self.rows

    @property
    def fixed(self) -> int:
        """More bytes than states and gradients of any batch take."""
        return 2 * self.states + 4 * self.gradient


@dataclass(frozen=True)
class Footprint:
    """Peak memory as a function of the batch size."""

    points: tuple[tuple[int, int], ...]  # (samples, bytes), with growing sizes, at least one
    clear: bool  # larger sizes take as much more a sample as the last two of them
    beyond: Sizes | None = None  # or else at most as much more as this tells

    @property
    def largest(self) -> int:
        """The most bytes that were measured."""
        return max(size for _, size in self.points)

    def peak(self, n: int) -> int:
        """Return the bytes for batches of n samples, on the line through the nearest two points."""
        last, most = self.points[-1]
        if self.beyond is not None and n > last:
            return most + 2 * _CLEAR + self.beyond.fixed + (n - last) * self.beyond.each
        above = next((k for k, (size, _) in enumerate(self.points) if size >= n), -1)
        if len(self.points) == 1 or above == 0:
            return self.points[0][1]
        (left, low), (right, high) = self.points[above - 1], self.points[above]
        return round(low + (n - left) * max(0, high - low) / (right - left))

    def most(self, budget: float, limit: int) -> int:
        """Return the largest of `limit` and the powers of two below whose peak fits, or 0.

        Powers of two, since what is measured differs a little from run to run.
        """
        sizes = [limit, *(1 << k for k in reversed(range(limit.bit_length())))]
        every = self.clear or self.beyond is not None
        known = [n for n in sizes if every or n <= self.points[-1][0]]
        return next((n for n in known if self.peak(n) <= budget), 0)


class Rehearsals:
    """Measures a job's peak memory above what is taken when this is made.

    What the first rehearsal leaves behind for good (code that is loaded when it is first used) so
    counts in every later one, as it does in a run.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._device = job, job.scope.problem.device
        gc.collect()  # a peak is above what is in use
        release_freed_memory()
        self._base = taken(self._device)

    def peak(self, n: int) -> int | None:
        """Return the peak bytes with batches of n samples; None if unknown, or too much."""
        with peak_memory(self._device) as above:
            start = taken(self._device)
            fits = rehearse(self._job, n)
        if self._base is None or start is None or not above or not fits:
            return None
        return _WRITER + start + above[0] - self._base

    def footprint(self, most: int, budget: float, sizes: Sizes | None = None) -> Footprint | None:
        """Measure small batches, up to `most` samples and to what would seem to take `budget`.

        With `sizes`, a run that is not worth more trials has one, unless memory is short. None
        where the system does not tell how much memory is taken.
        """
        self._job.load(0, min(2, most))  # data that do not fit together are the data's fault
        self.peak(1)  # what is loaded now is not the samples'
        first = self.peak(1)
        if first is None:
            return None
        worth = max(_LEAST, len(self._job.rows) // _TRIED)
        if sizes is not None and worth < most:
            few = Footprint(((1, first),), clear=False, beyond=sizes)
            n = few.most(budget, worth)
            peak = self.peak(n) if n > 1 else None
            if peak is not None:
                few = replace(few, points=(*few.points, (n, peak)))
            if few.most(budget, most) >= worth:
                return few
        points, rise = [(1, first)], 0
        while points[-1][0] < most and rise < _CLEAR:
            n, last = points[-1]
            might = last + max(2 * rise, last - first)
            peak = self.peak(min(2 * n, most)) if might <= budget else None
            if peak is None:
                return Footprint(tuple(points), clear=False)
            points.append((min(2 * n, most), peak))
            rise = max(0, peak - last)
        return Footprint(tuple(points), clear=True)


def recorded(problem: Problem, batch: Batch) -> int:
    """Return the bytes that the graph of a batch's losses holds, beside parameters and buffers."""
    held: dict[int, torch.UntypedStorage] = {}

    def seen(t: Tensor) -> Tensor:
        if t.layout == torch.strided:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t.detach()  # an output would hold its own node, and that it: for good

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda t: t):
        problem.losses(batch.detached())
    own = chain(problem.model.parameters(), problem.model.buffers())
    others = held.keys() - {t.untyped_storage().data_ptr() for t in own}
    return sum(held[place].nbytes() for place in others)


class Nowhere:
    """A writer that holds the rows of one batch until the next has been computed and audited.

    That is as long as a slow writer holds them, so that the peak of a run cannot be higher.
    """

    completed = 0

    def __init__(self) -> None:
        self._kept: Any = None
        self._scratch = Scratch()

    def append(self, rows: Rows, states: States | None = None, *, proved: bool = False) -> None:
        """Let go of the last rows, and make these in their dense form, a part at a time.

        States are copied where a writer copies them.
        """
        self._kept = None
        held = [t for state in (states or {}).values() for t in state.values()]
        copies = [t.clone() for t in held] if sum(t.nbytes for t in held) <= KEEP_BYTES else []
        self._kept = rows, copies
        for block in (b for gradients in rows.chains for b in (gradients or {}).values()):
            if block.held is not None:
                continue
            for some in slices(block.n, prod(block.shape) * block.dtype.itemsize, PART_BYTES):
                part = block.select(some)
                part.dense(self._scratch.take((part.n, *block.shape), block.dtype, block.device))

    def wait(self) -> None:
        """Nothing is under way."""

    def go_back(self) -> tuple[int, dict[str, Any]]:
        """Begin again: nothing was written."""
        return 0, {}


def rehearse(job: Job, n: int) -> bool:
    """Compute the first n samples twice, as a run does; return whether memory sufficed for all."""
    size = BatchSize(n)
    batches = [job.load(0, n) for _ in range(2)]  # while one is computed, the next is loaded
    chains = settled(job.scope, job.chains, lambda: batches[:1])
    run = Run(job, chains, Path(), Nowhere(), size)
    for done, batch in zip((0, len(job.rows) - n), batches, strict=True):
        run.done = done  # the first batch is proved, the last one audited
        run.add(batch)
    return size.samples == n


@contextmanager
def rehearsal(job: Job, verify: Verify | None = None) -> Iterator[Job]:
    """Yield the job with a session of its own, which compiles nothing and is closed afterwards.

    It proves its answers as the job's does, unless it is told how to `verify` them.
    Kernels are not measured in the body: they would be for other sizes than the run's.
    """
    session = job.scope.rehearsal(verify)
    try:
        with unmeasured():
            yield replace(job, scope=session)
    finally:
        session.close()
        release_freed_memory()  # or the run would come on top of it
