"""A rehearsal: what a run does with one batch after the other, without a file."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

from torch import Tensor

from gradscope.blocks import Block, DenseBlock
from gradscope.core.memory import release_freed_memory
from gradscope.engine import settled
from gradscope.run.batch_size import BatchSize
from gradscope.run.job import Job
from gradscope.run.overlap import Behind
from gradscope.run.run import Run
from gradscope.storage import Rows
from gradscope.storage.columns import PART_BYTES
from gradscope.storage.plan import States
from gradscope.storage.scratch import Scratch


class Nowhere:
    """Stands in for the writer, a slow one: two batches keep it busy as long as the first's proof.

    So the memory that it takes shows at once with that of the next batch and of its audit,
    whichever is the slower in a run.

    Attributes:
        completed: The number of rows it was given.
    """

    def __init__(self) -> None:
        self.completed = 0
        self._kept: tuple[Rows, list[Tensor]] | None = None
        self._scratch = Scratch()
        self._begun = time.monotonic()
        self._busy: list[float] = []  # seconds, for batches to come

    def append(self, rows: Rows, states: States | None = None, *, proved: bool = False) -> None:
        """Make the rows of a batch."""
        copies = [t.clone() for state in (states or {}).values() for t in state.values()]
        self._kept = rows, copies
        now = time.monotonic()
        if not self.completed:
            self._busy = 2 * [now - self._begun]
        enough = now + (self._busy.pop() if self._busy else 0.0)
        blocks = [block for gradients in rows.chains for block in (gradients or {}).values()]
        for block in blocks if enough <= now else itertools.cycle(blocks):
            self._make(block)
            if now < enough < time.monotonic():
                break
        self.completed += len(rows.index)

    def go_back(self) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """Begin again: nothing was written."""
        return 0, {}

    def finish(self, *results: object, **more: object) -> None:
        """Do nothing: there is no file."""

    def _make(self, block: Block) -> None:
        if isinstance(block, DenseBlock):
            return
        step = max(1, PART_BYTES // max(1, prod(block.shape) * block.dtype.itemsize))
        for start in range(0, block.n, step):
            part = block.select(slice(start, start + step))
            part.dense(self._scratch.take((part.n, *block.shape), block.dtype, block.device))


def rehearse(job: Job, n: int) -> bool:
    """Go through the first n samples three times; return whether memory sufficed for n at a time.

    Raises:
        RefusedError: What a run would be refused for.
    """
    batch, size = job.load(0, n), BatchSize(n)
    chains = settled(job.scope, job.chains, lambda: [batch])
    dense = job.spec.compute.layout == "dense"
    with Behind(Nowhere(), job.scope.problem.device, dense=dense) as behind:
        run = Run(job, chains, Path(), behind, size, begun=0.0)
        run.add(batch)
        run.add(batch)
        run.done = len(job.rows) - n  # the third is the last, which is audited
        run.add(batch)
    return size.samples == n


@contextmanager
def forgotten(job: Job) -> Iterator[Job]:
    """Yield the job with a session of its own, which compiles nothing and is closed afterwards."""
    session = job.scope.rehearsal()
    try:
        yield replace(job, scope=session)
    finally:
        session.close()
        release_freed_memory()  # or the run would come on top of it
