"""The rows of a run of tokens: which positions of which samples they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscope.core.batch import Batch, Tokens, require_counted
from gradscope.engine.session import Session
from gradscope.errors import SpecError

_AT_A_TIME = 256  # samples whose losses are looked at


@dataclass(frozen=True)
class TokenRows:
    """The positions that count of some samples, in order: the rows 0, 1, ... of a run."""

    samples: range  # of the data set
    positions: int  # t, of each sample
    counted: Tensor | None  # (m,) int64, row by row: the sample's place · t + position; None: all

    @classmethod
    def of(cls, session: Session, load: Callable[[range], Batch], samples: range) -> "TokenRows":
        """Find out which positions count: by the first sample, or where a loss says so, by each.

        Raises:
            SpecError: The loss does not return (n, t), t differs, or no position counts.
        """
        first, said = session.problem.counted(load(samples[:1]))
        t = first.shape[1]
        if not said:
            return cls(samples, t, None)
        found: list[Tensor] = []
        for start in range(0, len(samples), _AT_A_TIME):
            mask, _ = session.problem.counted(load(samples[start : start + _AT_A_TIME]))
            if mask.shape[1] != t:
                raise SpecError(
                    f"the loss has {mask.shape[1]} positions of some samples, {t} of others",
                    where="rows token",
                    remedy="Pad all samples to one length, and let the loss say what counts.",
                )
            found.append(mask.cpu().flatten().nonzero().flatten() + start * t)
        counted = torch.cat(found)
        require_counted(len(counted))
        return cls(samples, t, counted)

    def __len__(self) -> int:
        return len(self.samples) * self.positions if self.counted is None else len(self.counted)

    def batch(self, load: Callable[[range], Batch], rows: range) -> Tokens:
        """Return some rows, which are next to each other, with the samples that they are of."""
        places = torch.arange(rows.start, rows.stop)
        places = places if self.counted is None else self.counted[places]
        sample, position = places // self.positions, places % self.positions
        used, own = torch.unique(sample, return_inverse=True)
        first = int(used[0])
        held = load(self.samples[first : int(used[-1]) + 1]).select(used - first)
        index = torch.arange(rows.start, rows.stop)
        data = (held.inputs, held.targets, index, held.index, own, position)
        return Tokens(*data, self.positions)

    def some(self, rows: Tensor) -> tuple["TokenRows", Tensor]:
        """Return some rows (m,) as the only ones, and the samples (n,) that they are of."""
        places = rows if self.counted is None else self.counted[rows]
        used, own = torch.unique(places // self.positions, return_inverse=True)
        counted = own * self.positions + places % self.positions
        part = TokenRows(range(len(used)), self.positions, counted)
        return part, used + self.samples.start

    def record(self) -> dict[str, Any]:
        """Return what tells these rows from others, as plain data."""
        counted = None if self.counted is None else int(self.counted.double().square().sum())
        span = [self.samples.start, self.samples.stop]
        return {"samples": span, "positions": self.positions, "rows": len(self), "sum": counted}
