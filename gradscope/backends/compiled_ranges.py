"""Whole numbers that the uncompiled way has accepted: a compiled program cannot refuse any.

A class or token that is out of range is an error of torch; in a compiled program it ends the
process. So a batch with a number beyond those seen before goes the uncompiled way first.
"""

import torch
from torch import Tensor

from gradscope.core.batch import Batch, tensors

_COLUMNS = 64  # entries a sample that are looked at one by one: they may be different things

_LARGEST = torch.iinfo(torch.int64).max


class Ranges:
    """The ranges of whole numbers among inputs and targets; negative ones are told apart."""

    def __init__(self) -> None:
        self._seen: dict[tuple[torch.Size, ...], list[Tensor]] = {}

    def hold(self, batch: Batch) -> bool:
        """Whether every whole number of a batch is within what has been accepted."""
        numbers = _whole_numbers(batch)
        seen = self._seen.get(_columns(numbers))
        if seen is None:
            return False
        return all(
            bool((_bounds(t) <= accepted).all()) for t, accepted in zip(numbers, seen, strict=True)
        )

    def widen(self, batch: Batch) -> None:
        """Add a batch that was accepted."""
        numbers = _whole_numbers(batch)
        found = [_bounds(t) for t in numbers]
        seen = self._seen.setdefault(_columns(numbers), found)
        seen[:] = map(torch.maximum, seen, found)


def _whole_numbers(batch: Batch) -> list[Tensor]:
    """Return the integers among inputs and targets, each (n, columns)."""
    found = [
        t.reshape(t.shape[0] if t.dim() else 1, -1).long()
        for t in tensors((batch.inputs, batch.targets))
        if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool) and t.numel()
    ]
    return [t if t.shape[1] <= _COLUMNS else t.reshape(-1, 1) for t in found]


def _columns(numbers: list[Tensor]) -> tuple[torch.Size, ...]:
    return tuple(t.shape[1:] for t in numbers)


def _bounds(t: Tensor) -> Tensor:
    """Return (4, columns): −least and largest of those ≥ 0, −least and largest of those < 0."""
    below = t < 0
    return torch.stack(
        [
            -torch.where(below, _LARGEST, t).amin(0),
            torch.where(below, -1, t).amax(0),
            -torch.where(below, t, 0).amin(0),
            torch.where(below, t, -_LARGEST).amax(0),
        ]
    )
