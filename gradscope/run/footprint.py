"""The memory a run takes at its peak, by the size of its batches: measured on small ones.

Sizes are doubled until the difference between two of them is clear of what libraries and the
allocator keep and of tiles that are not full yet; from there on the peak grows with the size. Where
the next size might take too much before that, nothing is said of larger ones.
"""

import copy
import gc
from dataclasses import dataclass

from gradscope.core.memory import peak_memory, release_freed_memory, taken
from gradscope.run.job import Job
from gradscope.run.rehearsal import rehearse

_CLEAR = 96 * 2**20
_WRITER = 8 * 2**20  # HDF5 itself, and pieces on their way to the disk


@dataclass(frozen=True)
class Footprint:
    """Peak memory as a function of the batch size.

    Attributes:
        points: (samples, bytes), with growing sizes, at least one.
        clear: Larger sizes take as much more a sample as the last two of them.
    """

    points: tuple[tuple[int, int], ...]
    clear: bool

    @property
    def largest(self) -> int:
        """The most bytes that were measured."""
        return max(size for _, size in self.points)

    def peak(self, n: int) -> int:
        """Return the bytes for batches of n samples, on the line through the nearest two points."""
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
        known = [n for n in sizes if self.clear or n <= self.points[-1][0]]
        return next((n for n in known if self.peak(n) <= budget), 0)


class Meter:
    """Measures a job's peak memory above what is taken when the meter is made.

    What the first rehearsal leaves behind for good (code that is loaded when it is first used) so
    counts in every later one, as it does in a run.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._device = job, job.scope.problem.device
        gc.collect()  # a peak is above what is in use
        release_freed_memory()
        self._base = taken(self._device)

    def of(self, job: Job) -> "Meter":
        """Return a meter of another job, above what was taken when this one was made."""
        found = copy.copy(self)
        found._job = job
        return found

    def peak(self, n: int) -> int | None:
        """Return the peak bytes with batches of n samples; None if unknown, or too much.

        Raises:
            RefusedError: What a run would be refused for.
        """
        with peak_memory(self._device) as above:
            start = taken(self._device)
            fits = rehearse(self._job, n)
        if self._base is None or start is None or not above or not fits:
            return None
        return _WRITER + start + above[0] - self._base

    def footprint(self, most: int, budget: float) -> Footprint | None:
        """Measure small batches; None where the system does not tell how much memory is taken.

        Args:
            most: The largest batch of interest.
            budget: Bytes; no batch is tried that would seem to take more.
        """
        self.peak(1)  # what is loaded now is not the samples'
        first = self.peak(1)
        if first is None:
            return None
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
