"""The batch size: what was asked for, or what memory allows."""

from dataclasses import dataclass

from gradscope.config import memory_text, parse_memory
from gradscope.core.memory import available
from gradscope.errors import SpecError
from gradscope.run.footprint import Footprint, Meter
from gradscope.run.job import Job
from gradscope.run.rehearsal import forgotten

_FEW = 2  # samples that tell whether more has to be known
_LARGEST = 4096  # larger batches gain nothing
_MARGIN = 0.8  # of a budget is planned with
_SHARE = 0.5  # of what there is, when no budget is given


@dataclass(frozen=True)
class Choice:
    """A batch size.

    Attributes:
        samples: In a batch.
        notes: Why, where it is not what one would expect.
        peak: Bytes that it took to find out; a run, which chooses first, takes as many.
    """

    samples: int
    notes: tuple[str, ...] = ()
    peak: int = 0


def choose(job: Job) -> Choice:
    """Return the batch size that was asked for, or one that fits into memory.

    Raises:
        SpecError: The memory budget does not hold a single sample.
        RefusedError: What the run would be refused for.
    """
    asked, memory = job.spec.compute.batch_size, job.spec.compute.memory
    if memory is not None:
        with forgotten(job) as rehearsed:
            return _within(rehearsed, parse_memory(memory))
    there = available(job.scope.problem.device)
    if asked is not None or job.scope.settings.own_loss or there is None:
        return Choice(job.batch_size)
    with forgotten(job) as rehearsed:
        return _prudent(rehearsed, _SHARE * there)


def too_large(samples: int, found: Footprint, budget: float, what: str) -> str:
    """Say that batches of so many samples do not fit."""
    return (
        f"batches of {samples:,} samples take about {memory_text(found.peak(samples))}, "
        f"and {what} {memory_text(budget)}: {found.most(budget, samples):,} would fit"
    )


def _within(job: Job, budget: int) -> Choice:
    """Choose by a given budget."""
    most = min(len(job.rows), _LARGEST)
    found = Meter(job).footprint(most, _MARGIN * budget)
    if found is None:
        return Choice(job.batch_size, ("how much memory is taken is not known here",))
    samples = found.most(_MARGIN * budget, most)
    if not samples:
        raise SpecError(
            f"a single sample at a time takes about {memory_text(found.peak(1))}",
            where=f"memory {job.spec.compute.memory}",
            remedy="Give more, or compute fewer --parameters at a time.",
        )
    note = f"batches of {samples:,} samples are to take {memory_text(found.peak(samples))}"
    notes = (f"{note} of the {memory_text(budget)} of --memory",)
    return Choice(samples, notes, found.largest)


def _prudent(job: Job, budget: float) -> Choice:
    """Keep to the usual batch size, unless memory is short."""
    most = job.batch_size
    meter, few = Meter(job), min(_FEW, most)
    small = meter.peak(few)
    if small is None or small * most <= budget * few:
        return Choice(most)
    found = meter.footprint(most, budget)
    samples = most if found is None else max(1, found.most(budget, most))
    if found is None or samples == most:
        return Choice(most, peak=0 if found is None else found.largest)
    note = f"batches of {samples:,} samples are to take {memory_text(found.peak(samples))}"
    notes = (f"{note}: half of the memory there is is {memory_text(budget)}",)
    return Choice(samples, notes, found.largest)
