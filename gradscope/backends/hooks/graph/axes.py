"""Which axis of an operation's output is the sample axis, found from evidence.

Two forward passes with different numbers of samples are compared: the axis that changes is the
sample axis, and when it is a multiple of n it is merged with others. Which slices of a merged axis
are whose is found from the gradients of single losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SampleAxis:
    """An axis of size before · n · after that holds the samples.

    Attributes:
        axis: Its position.
        before: Entries of other axes merged in front of the samples (time-major: T).
        after: Entries of other axes merged behind them (batch-major: T).
    """

    axis: int
    before: int = 1
    after: int = 1

    @property
    def positions(self) -> int:
        """How many entries of the axis belong to one sample."""
        return self.before * self.after

    def first(self, values: Tensor, n: int) -> Tensor:
        """Move the samples to the front: (..., before·n·after, ...) to (n, ..., positions, ...)."""
        if self.positions == 1:
            return values.movedim(self.axis, 0).unsqueeze(self.axis + 1)
        return (
            self._split(values, n).movedim(self.axis + 1, 0).flatten(self.axis + 1, self.axis + 2)
        )

    def only(self, values: Tensor, n: int, sample: int) -> Tensor:
        """Return `values` with zeros everywhere but at `sample`."""
        split = self._split(values, n)
        kept = torch.zeros_like(split)
        kept.select(self.axis + 1, sample).copy_(split.select(self.axis + 1, sample))
        return kept.flatten(self.axis, self.axis + 2)

    def _split(self, values: Tensor, n: int) -> Tensor:
        shape = (self.before, n, self.after)
        return values.reshape(*values.shape[: self.axis], *shape, *values.shape[self.axis + 1 :])

    def owners(self, n: int) -> Tensor:
        """Return (before·n·after,), the sample that owns each entry of the axis."""
        return torch.arange(n).repeat_interleave(self.after).repeat(self.before)


def changed_axis(
    first: tuple[int, ...], n: int, second: tuple[int, ...], m: int
) -> tuple[int, int | None] | None:
    """Compare an output's shapes at n and at m samples.

    Returns:
        (axis, entries a sample), where None entries means that samples hold different numbers of
        them; or None when nothing changed.

    Raises:
        ValueError: Several axes changed.
    """
    if len(first) != len(second):
        raise ValueError(f"an output has shape {first} or {second}")
    changed = [k for k, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if len(changed) > 1:
        raise ValueError(f"axes {changed} of an output {first} all grow with the batch")
    if not changed:
        return None
    axis = changed[0]
    even = first[axis] % n == 0 and second[axis] % m == 0 and first[axis] // n == second[axis] // m
    return axis, first[axis] // n if even else None


@dataclass(frozen=True, eq=False)
class OwnedAxis:
    """An axis on which samples hold any entries: masked, sorted or packed rows.

    Attributes:
        axis: Its position.
        owner: (entries,) int64, the sample that owns each entry, -1 where the gradient is zero.
    """

    axis: int
    owner: Tensor

    def first(self, values: Tensor, n: int) -> Tensor:
        """Move the samples to the front, padded with zeros to the largest number of entries."""
        kept = torch.nonzero(self.owner >= 0).squeeze(1)
        kept = kept[torch.argsort(self.owner[kept], stable=True)]
        owner = self.owner[kept]
        counts = torch.bincount(owner, minlength=n)
        place = torch.arange(len(kept), device=owner.device) - (counts.cumsum(0) - counts)[owner]
        rows = values.movedim(self.axis, 0)
        padded = rows.new_zeros(n, max(1, int(counts.max())), *rows.shape[1:])
        padded[owner, place] = rows[kept]
        return padded.movedim(1, self.axis + 1)

    def only(self, values: Tensor, n: int, sample: int) -> Tensor:
        """Return `values` with zeros everywhere but at `sample`."""
        mine = (self.owner == sample).reshape(-1, *[1] * (values.dim() - self.axis - 1))
        return torch.where(mine, values, torch.zeros_like(values))


Axis = SampleAxis | OwnedAxis


def owned(gradient: Tensor, weighted: Tensor, axis: int, n: int) -> OwnedAxis:
    """Find the owner of each entry from two gradients.

    Args:
        gradient: Of Σᵢ Lᵢ.
        weighted: Of Σᵢ (i+1) Lᵢ: at sample i's entries it is (i+1) times as large.
        axis: The axis in question.
        n: The number of samples.

    Raises:
        ValueError: An entry belongs to no single sample.
    """
    a, b = (_entries(t, axis) for t in (gradient, weighted))
    peak = a.abs().argmax(1, keepdim=True)
    one, many = (t.gather(1, peak).squeeze(1) for t in (a, b))
    factor = torch.where(one == 0, torch.zeros_like(one), many / one).real.round()
    gap = (b - factor.unsqueeze(1) * a).abs().amax(1)
    tolerance = torch.finfo(a.dtype).eps ** 0.5 * one.abs() * factor.abs().clamp_min(1)
    if not bool(((gap <= tolerance) & (factor >= 0) & (factor <= n)).all()):
        raise ValueError("an entry's gradient comes from the losses of several samples")
    return OwnedAxis(axis, factor.long() - 1)


def _entries(values: Tensor, axis: int) -> Tensor:
    """Return a matrix with one row for each entry of the axis."""
    return values.movedim(axis, 0).unsqueeze(-1).flatten(1)


def layouts(axis: int, positions: int) -> list[SampleAxis]:
    """Return every way to interleave the samples with `positions` entries, batch-major first."""
    divisors = [d for d in range(1, positions + 1) if positions % d == 0]
    return [SampleAxis(axis, before, positions // before) for before in divisors]


def support(gradient: Tensor, axis: int) -> Tensor:
    """Return a mask over the axis: where the gradient is a number, and not zero.

    A sample that is not finite makes the zeros of others NaN, which proves nothing.
    """
    return _entries((gradient != 0) & ~gradient.isnan(), axis).any(1).cpu()


def consistent(
    candidates: Sequence[SampleAxis], n: int, supports: dict[int, Tensor]
) -> list[SampleAxis]:
    """Keep the layouts under which each sample's loss touches only entries of that sample."""

    def fits(layout: SampleAxis) -> bool:
        owners = layout.owners(n)
        return all(bool((owners[mask] == sample).all()) for sample, mask in supports.items())

    return [layout for layout in candidates if fits(layout)]
