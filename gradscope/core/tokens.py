"""Rows of positions: batches in which a row is one position t of a sample i, with its loss L_it.

A loss that returns (n, t) keeps the positions of a sample apart. ∂L_it/∂θ is defined for any
model: it goes through all that position t depends on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradscope.core.batch import Batch
from gradscope.errors import SpecError


@dataclass(frozen=True)
class Tokens(Batch):
    """Some positions of some samples: m rows of n samples, of which each is held once.

    Inputs and targets are those of the samples (n, ...); the index (m,) tells rows apart.
    """

    held: Tensor  # (n,) int64, where in the data set each sample is
    sample: Tensor  # (m,) int64, which of the samples at hand each row is of
    position: Tensor  # (m,) int64, and which of its positions
    positions: int  # t

    @classmethod
    def among(cls, batch: Batch, counted: Tensor) -> "Tokens":
        """Return the rows of a batch that count, by a mask (n, t), sample after sample."""
        sample, position = counted.cpu().nonzero().unbind(1)
        t = counted.shape[1]
        used, own = torch.unique(sample, return_inverse=True)
        held = batch if len(used) == len(batch) else batch.select(used)
        index = batch.index[sample] * t + position
        return cls(held.inputs, held.targets, index, held.index, own, position, t)

    @property
    def whole(self) -> Batch:
        """The samples (n, ...)."""
        return Batch(self.inputs, self.targets, self.held)

    @property
    def samples(self) -> Tensor:
        """Where in the data set the sample of each row is (m,)."""
        return self.held[self.sample]

    def apart(self) -> Batch:
        """Return m samples, one a row, for `Problem.apart`: targets (targets, position (m,))."""
        many = self.whole.select(self.sample)
        return Batch(many.inputs, (many.targets, self.position), many.index)

    def select(self, rows: slice | Tensor) -> "Tokens":
        """Return the rows `rows` of this batch, with the samples that they are of."""
        used, sample = torch.unique(self.sample[rows], return_inverse=True)
        held = self.whole
        held = held if len(used) == len(held) else held.select(used)
        own = {"index": self.index[rows], "sample": sample, "position": self.position[rows]}
        return replace(self, inputs=held.inputs, targets=held.targets, held=held.index, **own)

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Tokens":
        """Return the batch with `fn` applied to every tensor among inputs and targets."""
        mapped = self.whole.map(fn)
        return replace(self, inputs=mapped.inputs, targets=mapped.targets)


def whole_of(batch: Batch) -> Batch:
    """Return the samples that a batch is of: itself, unless its rows are tokens."""
    return batch.whole if isinstance(batch, Tokens) else batch


def samples_of(batch: Batch) -> Tensor:
    """Return which of the samples at hand each row is of (m,): itself, unless it is a token's."""
    return batch.sample if isinstance(batch, Tokens) else torch.arange(len(batch))


def token_losses(found: Any, n: int, name: str) -> tuple[Tensor, Tensor | None]:
    """Check what a loss has returned: losses (n, t), or these and which of them count (n, t) bool.

    Raises:
        SpecError: It has another shape.
    """
    values, counted = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    fits = isinstance(values, Tensor) and values.dim() == 2 and values.shape[0] == n
    if not fits or not values.is_floating_point():
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise SpecError(
            f"with rows token the loss {name!r} must return one number a position, shape ({n}, t) "
            f"of floating point; it returned {shape}",
            where="loss",
            remedy="Use reduction='none', and flatten all axes but the first into one; or rows "
            "sample. Of positions that do not count, return (losses, counted), both (n, t).",
        )
    mask = isinstance(counted, Tensor) and counted.dtype == torch.bool
    if counted is not None and not (mask and counted.shape == values.shape):
        raise SpecError(
            f"the loss {name!r} must say which positions count as booleans {tuple(values.shape)}",
            where="loss",
        )
    return values, counted
