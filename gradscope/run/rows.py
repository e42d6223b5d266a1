"""The rows of a run that are not samples: tokens, and groups of samples or tokens."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradscope.core.batch import Batch, Tokens, require_positions
from gradscope.core.groups import GroupIds, Groups, Reduction, fitting_groups, spans
from gradscope.engine.session import Session
from gradscope.errors import SpecError

Load = Callable[[Sequence[int]], Batch]  # reads the samples at some positions of the data set

_AT_A_TIME = 256  # samples per batch when the positions that count are collected


@dataclass(frozen=True)
class TokenRows:
    """The token rows of a run: the positions of some samples that count towards the loss."""

    samples: range  # positions of the samples in the data set
    positions: int  # t, the number of positions of each sample
    # (m,) int64, for each row: sample's index in `samples` · t + position, or None if all count
    row_numbers: Tensor | None

    @classmethod
    def of(cls, session: Session, load: Load, samples: range) -> "TokenRows":
        """Find the positions that count; a loss with a position mask is called for each sample.

        Raises:
            SpecError: The loss does not return (n, t), t differs, or no position counts.
        """
        first, said = session.problem.position_mask(load(samples[:1]))
        t = first.shape[1]
        if not said:
            return cls(samples, t, None)
        found: list[Tensor] = []
        for start in range(0, len(samples), _AT_A_TIME):
            mask, _ = session.problem.position_mask(load(samples[start : start + _AT_A_TIME]))
            if mask.shape[1] != t:
                raise SpecError(
                    f"the loss has {t} positions for the first sample, but {mask.shape[1]} for "
                    "later samples",
                    where="rows token",
                    remedy="Pad all samples to the same length, and mark padding as ignored in "
                    "the loss.",
                )
            found.append(mask.cpu().flatten().nonzero().flatten() + start * t)
        counted = torch.cat(found)
        require_positions(len(counted))
        return cls(samples, t, counted)

    def __len__(self) -> int:
        rows = self.row_numbers
        return len(self.samples) * self.positions if rows is None else len(rows)

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sample (m,), as an index in `samples`, and the position (m,) of rows (m,)."""
        places = rows if self.row_numbers is None else self.row_numbers[rows]
        return places // self.positions, places % self.positions

    def batch(self, load: Load, rows: Tensor) -> Tokens:
        """Return the rows (m,), with their samples."""
        sample, position = self.places(rows)
        used, own = torch.unique(sample, return_inverse=True)
        loaded = load((used + self.samples.start).tolist())
        data = (loaded.inputs, loaded.targets, rows, loaded.index, own, position)
        return Tokens(*data, self.positions)

    def some(self, rows: Tensor) -> tuple["TokenRows", Tensor]:
        """Return a `TokenRows` of only these rows (m,), and their samples (n,)."""
        sample, position = self.places(rows)
        used, own = torch.unique(sample, return_inverse=True)
        counted = own * self.positions + position
        part = TokenRows(range(len(used)), self.positions, counted)
        return part, used + self.samples.start

    def record(self) -> dict[str, Any]:
        """Return plain data that identify these rows."""
        counted = (
            None if self.row_numbers is None else int(self.row_numbers.double().square().sum())
        )
        span = [self.samples.start, self.samples.stop]
        return {"samples": span, "positions": self.positions, "rows": len(self), "sum": counted}


@dataclass(frozen=True)
class GroupRows:
    """The groups of a run, in the order of their ids. A batch holds whole groups."""

    ids: Tensor  # (g,) int64, or UTF-8 texts (g, w) uint8
    sizes: Tensor  # (g,) int64, the number of members of each group
    # (m,) int64, group after group: positions in the data set, or row numbers of tokens
    members: Tensor
    reduction: Reduction
    tokens: TokenRows | None  # the token rows, if the members are tokens

    @classmethod
    def of(cls, groups: GroupIds, samples: range, tokens: TokenRows | None) -> "GroupRows":
        """Return the groups of some samples, or of token rows.

        Raises:
            DatasetError: An id is missing.
        """
        if tokens is None:
            members = torch.arange(samples.start, samples.stop)
            codes = groups.of_rows(members)
        else:
            members = torch.arange(len(tokens))
            sample, position = tokens.places(members)
            codes = groups.of_rows(sample + tokens.samples.start, position, tokens.positions)
        order, which, sizes = groups.split(codes)
        return cls(groups.ids[which], sizes, members[order], groups.reduction, tokens)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def largest(self) -> int:
        """The number of members of the largest group."""
        return int(self.sizes.max())

    @cached_property
    def starts(self) -> Tensor:
        """The first member of each group, and the number of members (g + 1,)."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.sizes.cumsum(0)])

    def batch(self, load: Load, rows: range, most: int) -> Groups:
        """Return the first of some groups, with at most `most` members.

        Raises:
            SpecError: The first group has more.
        """
        span = slice(rows.start, rows.stop)
        fitting = fitting_groups(self.sizes[span], self.ids[span], most)
        own = slice(rows.start, rows.start + fitting)
        members = self.members[self.starts[own.start] : self.starts[own.stop]]
        found = load(members.tolist()) if self.tokens is None else self.tokens.batch(load, members)
        index = torch.arange(own.start, own.stop)
        return Groups.of_members(found, index, self.sizes[own], self.ids[own], self.reduction)

    def some(self, rows: Tensor) -> "GroupRows":
        """Return a `GroupRows` of only these groups (m,)."""
        sizes = self.sizes[rows]
        members = self.members[spans(self.starts[rows], sizes)]
        return replace(self, ids=self.ids[rows], sizes=sizes, members=members)

    def record(self) -> dict[str, Any]:
        """Return plain data that identify these groups."""
        data = (self.ids, self.sizes, self.members)
        digest = hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in data))
        return {"groups": len(self), "members": len(self.members), "sha256": digest.hexdigest()}
