"""Sample axes of operations' outputs, and the owners of entries, found from measurements.

Two forward passes with different numbers of samples are compared: the axis that changes is the
sample axis. If its size is a multiple of n, other axes are merged with it. The owners of the slices
of a merged axis follow from gradients of single losses, or of losses with distinct weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb, prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks.base import precise

_EVEN = 1.25  # padded entries per real entry, at most
_AXES = 3  # axes along which positions may lie, plus one


class SpreadError(Exception):
    """Values that are not finite may have spread from one sample to others."""


Growth = tuple[int, int | None]  # (the axis that grows, entries per sample if equal for all)


@dataclass(frozen=True)
class SampleAxis:
    """An axis of size before · n · after with the samples."""

    axis: int  # its position
    before: int = 1  # entries of other axes merged before the samples (time-major: T)
    after: int = 1  # entries of other axes merged after the samples (batch-major: T)

    def first(self, values: Tensor, n: int) -> Tensor:
        """Move the samples to the front: (..., before·n·after, ...) to (n, ..., positions, ...)."""
        k = self.axis
        if self.before * self.after == 1:
            return (values.movedim(k, 0) if k else values).unsqueeze(k + 1)
        return self._split(values, n).movedim(k + 1, 0).flatten(k + 1, k + 2)

    def only(self, values: Tensor, n: int, sample: int) -> Tensor:
        """Return `values` with zeros at all other samples."""
        split = self._split(values, n)
        kept = torch.zeros_like(split)
        kept.select(self.axis + 1, sample).copy_(split.select(self.axis + 1, sample))
        return kept.flatten(self.axis, self.axis + 2)

    def owners(self, n: int, device: torch.device) -> Tensor:
        """Return the sample that owns each entry of the axis (before·n·after,)."""
        every = torch.arange(n, device=device)
        return every.repeat_interleave(self.after).repeat(self.before)

    def _split(self, values: Tensor, n: int) -> Tensor:
        """Split the axis into (before, n, after)."""
        shape = (self.before, n, self.after)
        return values.reshape(*values.shape[: self.axis], *shape, *values.shape[self.axis + 1 :])

    def fits(self, n: int, entries: dict[int, np.ndarray]) -> bool:
        """Whether each sample's loss touches only its own entries of the axis."""
        return all((own // self.after % n == k).all() for k, own in entries.items())


@dataclass(frozen=True, eq=False)
class OwnedAxis:
    """An axis on which each sample has any set of entries: masked, sorted or packed rows.

    Token rows may lie along several axes together: the sample axis and axes of positions.
    """

    axis: int  # its position
    # (entries of these axes together,) int64, the sample or token row that owns each entry; -1
    # where the gradient is zero
    owner: Tensor
    position_axes: tuple[int, ...] = ()  # the positions' axes

    @property
    def own(self) -> tuple[int, ...]:
        """The sample axis and the axes of positions."""
        return (self.axis, *self.position_axes)

    def first(self, values: Tensor, n: int) -> Tensor:
        """Move the samples to the front, padded with zeros to the largest number of entries.

        The entries lie along `axis`; the other axes have size 1.
        """
        kept = torch.nonzero(self.owner >= 0).squeeze(1)
        kept = kept[torch.argsort(self.owner[kept], stable=True)]
        owner = self.owner[kept]
        counts = torch.bincount(owner, minlength=n)
        place = torch.arange(len(kept), device=owner.device) - (counts.cumsum(0) - counts)[owner]
        rows = merge_axes(values, self.own)
        padded = rows.new_zeros(n, max(1, int(counts.max())), *rows.shape[1:])
        padded[owner, place] = rows[kept]
        return self._back(
            padded.reshape(*padded.shape[:2], *[1] * len(self.position_axes), *rows.shape[1:])
        )

    def only(self, values: Tensor, n: int, sample: int) -> Tensor:
        """Return `values` with zeros at all other samples."""
        if not values.dim():
            return self.only(values[None], n, sample)[0]
        shape = [values.shape[k] for k in self.own] + [1] * (values.dim() - len(self.own))
        mine = (self.owner == sample).reshape(shape).movedim([*range(len(self.own))], self.own)
        return torch.where(mine, values, torch.zeros_like(values))

    def owners(self, n: int, device: torch.device) -> Tensor:
        """Return the sample that owns each entry of the axes together, or -1."""
        return self.owner.to(device)

    def summed(self, values: Tensor, shape: tuple[int, ...], n: int) -> Tensor:
        """Sum each sample's entries to (n, *shape), undoing a broadcast of `shape`.

        A parameter with an entry for each position keeps the positions separate.
        """
        values = values if values.dim() else values[None]
        padded = (1,) * (values.dim() - len(shape)) + shape
        axes = [k for k, size in enumerate(padded) if size == 1 and k not in self.own]
        rows = precise(merge_axes(values.sum(axes, keepdim=True) if axes else values, self.own))
        places = torch.zeros((), dtype=torch.int64, device=values.device)
        for k in self.own:
            at = torch.arange(values.shape[k], device=values.device)
            places = places.unsqueeze(-1) * padded[k] + at * (padded[k] > 1)
        count = prod(padded[k] for k in self.own)
        # entries without an owner come last
        place = torch.where(self.owner < 0, n * count, self.owner * count + places.flatten())
        found = rows.new_zeros(n * count + 1, *rows.shape[1:]).index_add_(0, place, rows)
        by_sample = found[:-1].reshape(n, *(padded[k] for k in self.own), *rows.shape[1:])
        return self._back(by_sample).reshape(n, *shape).to(values.dtype)

    def is_even(self, n: int) -> bool:
        """Whether the samples have about as many entries as the sample with the most."""
        counts = torch.bincount(self.owner[self.owner >= 0], minlength=n)
        return n * int(counts.max()) <= _EVEN * int(counts.sum())

    def _back(self, values: Tensor) -> Tensor:
        """Move the axes of (n, *own, ...) back to their positions."""
        return values.movedim([*range(1, 1 + len(self.own))], [k + 1 for k in self.own])


Axis = SampleAxis | OwnedAxis


def merge_axes(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return (entries, ...): merge some axes into the first axis, keep the others."""
    return values.movedim(axes, [*range(len(axes))]).flatten(0, len(axes) - 1)


CONSTANT: Growth = (-1, None)


def growth(first: tuple[int, ...], n: int, second: tuple[int, ...], m: int) -> Growth | None:
    """Compare an output's shapes at n and at m samples, or return None if several axes differ."""
    changed = [k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
    if len(first) != len(second) or len(changed) > 1:
        return None
    if not changed:
        return CONSTANT
    axis = changed[0]
    even = first[axis] % n == 0 and second[axis] % m == 0 and first[axis] // n == second[axis] // m
    return axis, first[axis] // n if even else None


def layouts(axis: int, positions: int, n: int, supports: dict[int, Tensor]) -> list[SampleAxis]:
    """Return every way to interleave n samples with `positions` entries that fits the supports."""
    entries = {sample: mask.nonzero().flatten().numpy() for sample, mask in supports.items()}
    divisors = (d for d in range(1, positions + 1) if positions % d == 0)  # batch-major first
    candidates = [SampleAxis(axis, before, positions // before) for before in divisors]
    return [layout for layout in candidates if layout.fits(n, entries)]


def support(gradient: Tensor, axis: int) -> Tensor:
    """Return a mask over the axis: entries with a gradient that is neither zero nor NaN.

    A sample that is not finite turns zeros of other samples into NaN, which proves nothing.
    """
    most = _largest(_entries(gradient, (axis,)))
    if bool(most.isnan().any()):
        return nonzero(torch.where(gradient.isnan(), 0, gradient), (axis,)).cpu()
    return (most != 0).cpu()


@dataclass(frozen=True, eq=False)
class OwnerWeights:
    """Weights of the losses that make the owner of each gradient visible.

    A sample's number is written in digits. Each digit is encoded as a weight in one backward pass.
    Neighbouring weights differ by about the same factor. The numbers are assigned at random, so an
    entry that two samples share matches the weight of neither. In half precision, weights are
    powers of two, which rounding does not change. There, one more pass with new random numbers is a
    check.
    """

    weights: Tensor  # (passes, n), weights of the samples' losses
    values: Tensor  # (base,) increasing, the weight of each digit
    samples: Tensor  # (base ** digits,), the sample with each number, or -1
    digits: int  # the number of passes with digits; one more may be the check
    eps: float = 0.0  # relative rounding error of the narrowest dtype of gradients

    @classmethod
    def of(cls, losses: Tensor, seed: int, reached: Iterable[torch.dtype] = ()) -> "OwnerWeights":
        """Return weights for losses (n,); `reached` are the dtypes of their gradients."""
        n, digits = len(losses), 1
        dtypes = {dtype.to_real() for dtype in (losses.dtype, *reached)}
        base = min(max(n, 2), *(_DIGITS.get(dtype, 2**3) for dtype in dtypes))
        while base**digits < n:
            digits += 1
        generator = torch.Generator().manual_seed(seed)
        jitter = 0.4 * torch.rand(base, generator=generator, dtype=torch.float64) - 0.2
        half = any(dtype.itemsize < 4 for dtype in dtypes)
        every = torch.arange(base)
        spaced = 2.0 ** (every - base // 2) if half else base ** ((every + jitter) / base)
        values = spaced.to(losses.dtype)
        numbers = torch.randperm(n, generator=generator)
        written = [numbers // base**k % base for k in range(digits)]
        written += [torch.randperm(n, generator=generator) % base] * half
        samples = torch.full((base**digits,), -1)
        samples[numbers] = torch.arange(n)
        found = [t.to(losses.device) for t in (values[torch.stack(written)], values, samples)]
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        return cls(found[0], found[1], found[2], digits, eps)

    def owners(self, ratios: Sequence[Tensor]) -> Tensor:
        """Return the sample (m,) that each entry's ratios (m,) encode, or -1.

        Each pass has a ratio: weighted gradients divided by unweighted gradients.
        """
        middles = (self.values[1:] + self.values[:-1]) / 2
        digits = [torch.bucketize(ratio, middles) for ratio in ratios[: self.digits]]
        base = len(self.values)
        return self.samples[torch.stack([d * base**k for k, d in enumerate(digits)]).sum(0)]


@dataclass(frozen=True, eq=False)
class OwnerPasses:
    """Backward passes with subsets of the losses that determine owners exactly.

    Each sample has its own subset of the passes; all subsets have the same size. A gradient to
    which no loss contributes is exactly zero. So a sample owns an entry if the entry is nonzero in
    that sample's passes and zero in all others. This holds for tiny entries and with any rounding.
    Entries of two samples are nonzero in more passes. An entry that is only rounding error may be
    zero in some passes of its owner. Then only a pass for each single sample decides.
    """

    weights: Tensor  # (passes, n), weights of the losses: 0, or between 1 and 2
    chosen: Tensor  # (n, passes) bool

    @classmethod
    def of(cls, losses: Tensor, seed: int) -> "OwnerPasses":
        """Return passes for losses (n,), with random weights so that samples do not cancel."""
        n, passes = len(losses), 1
        while comb(passes, passes // 2) < n:
            passes += 1
        chosen = torch.zeros(n, passes, dtype=torch.bool)
        for sample, own in enumerate(islice(combinations(range(passes), passes // 2), n)):
            chosen[sample, list(own)] = True
        generator = torch.Generator().manual_seed(seed)
        weights = 1 + torch.rand(passes, n, generator=generator, dtype=torch.float64)
        found = torch.where(chosen.T, weights, 0).to(losses.device, losses.dtype)
        return cls(found, chosen.to(losses.device))

    def owners(self, passes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sample that owns each entry, and which entries several samples share.

        The owner is -1 for no owner, and -2 if only a pass for each single sample decides.

        Args:
            passes: int32, the passes in which an entry is nonzero, as a binary number, lowest digit
                first.
        """
        numbers, order = binary(self.chosen.T).sort()
        at = torch.searchsorted(numbers, passes.contiguous()).clamp(max=len(numbers) - 1)
        owner = torch.where(numbers[at] == passes, order[at], -1)
        left = (owner < 0) & (passes != 0)
        if not bool(left.any()):
            return owner, left
        distinct, place = passes[left].unique(return_inverse=True)  # type: ignore[no-untyped-call]
        within = ((distinct.unsqueeze(1) & ~numbers) == 0).any(1)[place]
        owner[left] = torch.where(within, -2, -1)
        return owner, left & (owner == -1)


_NOISE = 64.0  # an entry below this many roundings of the largest entry may be rounding error
SEVERAL_OWNERS = "an entry's gradient comes from the losses of several samples"
_DIGITS = {torch.float64: 2**16, torch.float32: 2**10, torch.bfloat16: 2**6}


def owned(
    gradient: Tensor, weighted: Sequence[Tensor], axes: tuple[int, ...], marks: OwnerWeights
) -> OwnedAxis:
    """Find the owner of each entry of an axis from weights; rounding may hide an owner.

    Args:
        gradient: The gradient of Σᵢ Lᵢ.
        weighted: For each pass, the gradient of Σᵢ wᵢ Lᵢ: wᵢ times as large at sample i's entries.
        axes: The axis, or several axes that are merged.
        marks: The weights w.

    Raises:
        SpreadError: An entry is not finite, so it shows no weight.
        ValueError: An entry has no single owner, and is not only rounding error.
    """
    (found,) = owned_alike([gradient], [weighted], axes, marks)
    if found is None:
        raise ValueError(SEVERAL_OWNERS)
    return found.axis


class FoundAxis(NamedTuple):
    """Owners read in one batch."""

    axis: OwnedAxis
    in_order: bool  # whether each entry along the axis belongs to the samples in their order


def owned_alike(
    gradients: Sequence[Tensor],
    weighted: Sequence[Sequence[Tensor]],
    axes: tuple[int, ...],
    marks: OwnerWeights,
) -> list[FoundAxis | None]:
    """Find the owners of entries as `owned` does, of several gradients of one shape at once.

    The result has None for a gradient with an entry that has no single owner.
    """
    count = len(gradients)
    once, *often = (_rows(passing, axes) for passing in (gradients, *zip(*weighted, strict=True)))
    size, sizes = _largest(once), [_largest(t) for t in often]
    if not bool(torch.stack([size, *sizes]).isfinite().all()):
        raise SpreadError
    ratios = [torch.where(size == 0, 1, t / size).to(marks.values.dtype) for t in sizes]
    owner = marks.owners(ratios)
    eps = max(torch.finfo(once.dtype).eps, marks.eps)
    torn = owner < 0
    for entries, weights in zip(often, marks.weights, strict=True):
        factor = weights[owner].to(size)
        own = factor.to(once.dtype).unsqueeze(1)
        gap = _largest(torch.addcmul(entries, own, once, value=-1))
        torn |= ~(gap <= eps**0.5 * size * factor)
    # shared entries may cancel with all weights 1, but not with other weights
    most = torch.stack([size, *(t / marks.values[-1].to(t.dtype) for t in sizes)]).amax(0)
    owner = torch.where((most == 0) | torn, -1, owner)
    most, torn, owner = (t.view(count, -1) for t in (most, torn, owner))
    if not owner.shape[1]:
        return [FoundAxis(OwnedAxis(axes[0], own, axes[1:]), False) for own in owner]
    noise = most <= min(_NOISE * eps, eps**0.75) * most.amax(1, keepdim=True)
    n, size_of_axis = marks.weights.shape[1], owner.shape[1]
    usual = torch.arange(n, device=owner.device).repeat_interleave(-(-size_of_axis // n))
    in_order = (owner == usual[:size_of_axis]) | (most == 0)
    facts = torch.stack([(torn & ~noise).any(1), in_order.all(1)]).tolist()
    return [
        None if several else FoundAxis(OwnedAxis(axes[0], own, axes[1:]), placed)
        for own, several, placed in zip(owner, *facts, strict=True)
    ]


def owned_exactly(
    touched: Sequence[Tensor], axes: tuple[int, ...], passes: OwnerPasses
) -> OwnedAxis:
    """Find the owner of each entry of an axis, or of several, from the nonzero passes.

    Raises:
        ValueError: An entry has no single owner, or its owner is not visible.
    """
    owner, shared = passes.owners(binary(torch.stack([*touched])))
    if bool((shared | (owner == -2)).any()):
        raise ValueError(SEVERAL_OWNERS)
    return OwnedAxis(axes[0], owner, axes[1:])


def owned_singly(touched: Sequence[Tensor], axes: tuple[int, ...]) -> OwnedAxis:
    """Find the owner of each entry of an axis, or of several, from one pass per sample.

    Raises:
        ValueError: An entry has no single owner.
    """
    nonzero = torch.stack([*touched]).to(torch.int32)
    count, owner = nonzero.sum(0), nonzero.argmax(0)
    if bool((count > 1).any()):
        raise ValueError(SEVERAL_OWNERS)
    return OwnedAxis(axes[0], torch.where(count == 1, owner, -1), axes[1:])


def nonzero(gradient: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return a mask over the entries of the axes (m,): where the gradient is not zero."""
    return _largest(_entries(gradient, axes)) != 0


def binary(digits: Tensor) -> Tensor:
    """Return the numbers (m,) int32 with the binary digits (k, m) bool, lowest first."""
    place = torch.arange(len(digits), dtype=torch.int32, device=digits.device)
    return (digits.to(torch.int32) << place.unsqueeze(1)).sum(0, dtype=torch.int32)


def _entries(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return a matrix with one row for each entry of the axes."""
    return merge_axes(values, axes).unsqueeze(-1).flatten(1)


def _rows(values: Sequence[Tensor], axes: tuple[int, ...]) -> Tensor:
    """Return the entries of several tensors of one shape, one tensor after the other."""
    if len(values) == 1:
        return _entries(values[0], axes)
    if not values[0].dim():
        return torch.stack([*values]).unsqueeze(1)
    stacked = torch.stack([*values]).movedim([k + 1 for k in axes], [*range(1, 1 + len(axes))])
    return stacked.flatten(0, len(axes)).unsqueeze(-1).flatten(1)


def _largest(rows: Tensor) -> Tensor:
    """Return the largest magnitude in each row of a matrix (m, entries); 0 for empty rows."""
    return rows.abs().amax(1) if rows.shape[1] else rows.abs().sum(1)


def row_axis(
    gradient: Tensor, weighted: Sequence[Tensor], axis: Axis, rows: Tensor, marks: OwnerWeights
) -> Axis:
    """Find the row that owns each entry of an output, if positions stay separate.

    Args:
        gradient: The gradient of Σᵢₜ Lᵢₜ over the requested rows.
        weighted: For each pass, the gradient of Σᵢₜ wₜ Lᵢₜ.
        axis: The sample axis.
        rows: (n, t) int64, the row of each position, or -1.
        marks: The weights w of the positions (t,).

    Raises:
        ValueError: An entry has no single position as its owner.
    """
    sample, m = axis.owners(len(rows), rows.device), int((rows >= 0).sum())
    free = [k for k in range(gradient.dim()) if k != axis.axis]
    sets = [c for size in range(_AXES) for c in combinations(free, size)]

    def unlikely(others: tuple[int, ...]) -> bool:  # fewer entries than rows, or no entry inside
        return not m <= prod(gradient.shape[k] for k in (axis.axis, *others)) < gradient.numel()

    for others in sorted(sets, key=unlikely):
        own = (axis.axis, *others)
        try:
            position = owned(gradient, weighted, own, marks).owner
        except ValueError:
            continue
        samples = sample.repeat_interleave(len(position) // len(sample))
        nobody = (position < 0) | (samples < 0)
        owner = torch.where(nobody, -1, rows[samples, position])
        if others:
            return OwnedAxis(axis.axis, owner, others)
        in_order = len(owner) == m and bool((owner == torch.arange(m, device=owner.device)).all())
        return SampleAxis(axis.axis) if in_order else OwnedAxis(axis.axis, owner)
    raise ValueError("an entry's gradient comes from the losses of several positions")
