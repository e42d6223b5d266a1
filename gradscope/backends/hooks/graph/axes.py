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
) -> tuple[int, int] | None:
    """Compare an output's shapes at n and at m samples.

    Returns:
        (axis, entries a sample), or None when nothing changed.

    Raises:
        ValueError: Several axes changed, or one that is no multiple of the number of samples.
    """
    changed = [k for k, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not changed:
        return None
    axis = changed[0]
    if len(changed) > 1:
        raise ValueError(f"axes {changed} of an output {first} all grow with the batch")
    if first[axis] % n or second[axis] % m or first[axis] // n != second[axis] // m:
        raise ValueError(f"axis {axis} of an output {first} is no multiple of the {n} samples")
    return axis, first[axis] // n


def layouts(axis: int, positions: int) -> list[SampleAxis]:
    """Return every way to interleave the samples with `positions` entries, batch-major first."""
    divisors = [d for d in range(1, positions + 1) if positions % d == 0]
    return [SampleAxis(axis, before, positions // before) for before in divisors]


def support(gradient: Tensor, axis: int) -> Tensor:
    """Return a mask over the axis: where the gradient is not zero (NaN counts as not zero)."""
    return (gradient != 0).movedim(axis, 0).reshape(gradient.shape[axis], -1).any(1).cpu()


def consistent(
    candidates: Sequence[SampleAxis], n: int, supports: dict[int, Tensor]
) -> list[SampleAxis]:
    """Keep the layouts under which each sample's loss touches only entries of that sample."""

    def fits(layout: SampleAxis) -> bool:
        owners = layout.owners(n)
        return all(bool((owners[mask] == sample).all()) for sample, mask in supports.items())

    return [layout for layout in candidates if fits(layout)]
