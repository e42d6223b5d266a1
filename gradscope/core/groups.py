"""Groups of samples or tokens: the ids of the groups, and batches whose rows are groups.

A group's row belongs to the sum, or the mean, of the losses of its members. The members of a group
are in one batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradscope.core.batch import Batch, Tokens, require_positions
from gradscope.core.texts import count, listed
from gradscope.errors import DatasetError, SpecError

Reduction = Literal["sum", "mean"]

_OWN_ID = "Give each sample the id of its group: an integer or a text that is not empty."


@dataclass(frozen=True)
class Groups(Batch):
    """Groups of samples or tokens: g rows. Inputs and targets belong to the samples.

    The index (g,) has the position of each group in the sorted ids.
    """

    members: Batch  # the samples or tokens; the members of a group are adjacent
    sizes: Tensor  # (g,) int64, the number of members of each group
    ids: Tensor  # (g,) int64, or UTF-8 texts (g, w) uint8, padded with zeros
    reduction: Reduction

    @classmethod
    def of_members(
        cls, members: Batch, index: Tensor, sizes: Tensor, ids: Tensor, reduction: Reduction
    ) -> Self:
        """Return the groups of adjacent members."""
        return cls(members.inputs, members.targets, index, members, sizes, ids, reduction)

    @property
    def work(self) -> int:
        """The number of samples or tokens."""
        return len(self.members)

    @property
    def shares(self) -> Tensor | None:
        """The factor of each group's sum (g,), or None for sums."""
        return 1 / self.sizes.double() if self.reduction == "mean" else None

    @property
    def computed(self) -> Batch:
        """The members."""
        return self.members

    @property
    def sample_batch(self) -> Batch:
        """The samples (n, ...)."""
        return self.members.sample_batch

    @property
    def description(self) -> str:
        """The groups of the batch in words."""
        names = [repr(name) for name in decoded(self.ids)]
        if len(names) == 1:
            return f"group {names[0]}"
        return f"groups {names[0]} to {names[-1]}" if names else "no group"

    def select(self, rows: slice | Tensor) -> Self:
        """Return the selected groups, with their members."""
        sizes = self.sizes[rows]
        own = spans((self.sizes.cumsum(0) - self.sizes)[rows], sizes)
        every = len(own) == len(self.members) and bool((own[1:] > own[:-1]).all())
        members = self.members if every else self.members.select(own)
        return self.of_members(members, self.index[rows], sizes, self.ids[rows], self.reduction)

    def map(self, fn: Callable[[Tensor], Tensor], *, whole: bool = False) -> Self:
        """Return the batch with `fn` applied to every tensor among inputs and targets."""
        members = self.members.map(fn, whole=whole)
        return replace(self, inputs=members.inputs, targets=members.targets, members=members)

    def head(self, most: int) -> Self:
        """Return the first groups with at most `most` members.

        Raises:
            SpecError: The first group has more.
        """
        fitting = fitting_groups(self.sizes, self.ids, most)
        return self if fitting == len(self) else self.select(slice(0, fitting))

    def split(self, most: int) -> list[Self]:
        """Return the groups in parts of at most `most` members, or of one larger group."""
        parts, start = [], 0
        while start < len(self):
            fitting = int((self.sizes[start:].cumsum(0) <= most).sum())
            parts.append(self.select(slice(start, start := start + max(1, fitting))))
        return parts


def spans(starts: Tensor, sizes: Tensor) -> Tensor:
    """Return the positions (n,) in several spans, given their first positions and lengths."""
    before = sizes.cumsum(0) - sizes
    return (starts - before).repeat_interleave(sizes) + torch.arange(int(sizes.sum()))


def fitting_groups(sizes: Tensor, ids: Tensor, most: int) -> int:
    """Return how many of the first groups (g,) have at most `most` members together.

    Raises:
        SpecError: The first group has more.
    """
    fitting = int((sizes.cumsum(0) <= most).sum())
    if not fitting:
        (name,), size = decoded(ids[:1]), int(sizes[0])
        raise SpecError(
            f"group {name!r} has {size:,} members, but a batch holds {most:,}, and a group must be "
            "in one batch",
            remedy=f"Give a `batch_size` of at least {size:,}. If memory ran out, compute fewer "
            "`parameters` at a time, or divide the group.",
        )
    return fitting


def decoded(ids: Tensor) -> list[int | str]:
    """Return the ids (g,) as integers or texts."""
    if ids.dim() == 1:
        return [*map(int, ids)]
    return [bytes(row.tolist()).rstrip(b"\0").decode("utf-8", "surrogatepass") for row in ids]


@dataclass(frozen=True)
class GroupIds:
    """The groups of all samples of a data set, or of all positions in its samples."""

    ids: Tensor  # the different ids, sorted: (g,) int64, or UTF-8 texts (g, w) uint8
    # (N,) or (N, t) int64: the position in `ids` of each sample's or position's id; -1 if missing
    codes: Tensor
    reduction: Reduction = "sum"

    @classmethod
    def of(cls, given: Any, reduction: Reduction = "sum") -> Self:
        """Return the groups for ids (N,) or (N, t).

        Args:
            given: A tensor, array, series or list of integers or texts. None, NaN, "" and masked
                entries are missing.
            reduction: "sum" or "mean".

        Raises:
            DatasetError: An id is neither an integer nor a text.
        """
        given = given.detach().cpu().numpy() if isinstance(given, Tensor) else given
        # numpy would turn a list of numbers and texts into texts
        values = np.asarray(given, object if isinstance(given, list | tuple) else None)
        if values.ndim not in (1, 2) or not values.size:
            raise DatasetError(f"the ids have shape {tuple(values.shape)}", remedy=_OWN_ID)
        flat = values.reshape(-1)
        missing = _missing(flat)
        present = _uniform(flat[~missing])
        names, own = np.unique(present, return_inverse=True)
        codes = np.full(flat.shape, -1, np.int64)
        codes[~missing] = own
        return cls(_encoded(names), torch.from_numpy(codes.reshape(values.shape)), reduction)

    def of_rows(self, samples: Tensor, positions: Tensor | None = None, t: int = 0) -> Tensor:
        """Return the codes (m,) of samples, or of tokens with their positions.

        Args:
            samples: (m,) int64, positions in the data set.
            positions: (m,) int64, the position of each token in its sample.
            t: The number of positions of each sample.

        Raises:
            DatasetError: An id is missing, or ids have another shape than the rows.
        """
        top = int(samples.max()) if len(samples) else 0
        if top >= len(self.codes):
            raise DatasetError(
                f"there is no id for sample {top}: there are {count(len(self.codes), 'id')}",
                remedy="Give an id for each sample of the data set, in its order.",
            )
        if self.codes.dim() == 1:
            found = self.codes[samples]
        elif positions is None:
            raise DatasetError(
                f"the ids have shape {tuple(self.codes.shape)}, one id for each position of a "
                "sample, but a row is a sample",
                remedy="Use rows token, or give one id for each sample.",
            )
        else:
            if t != self.codes.shape[1]:
                raise DatasetError(
                    f"a sample has {count(self.codes.shape[1], 'id')}, but the loss has "
                    f"{count(t, 'position')}",
                    remedy="Give one id for each position of the loss. A loss of next tokens has "
                    "no loss at position 0: give the ids of positions 1 and later.",
                )
            found = self.codes[samples, positions]
        lost = (found < 0).nonzero().flatten()
        if len(lost):
            names = [f"sample {int(samples[k])}" for k in lost[:3]]
            if positions is not None and self.codes.dim() == 2:
                names = [
                    f"{n}, position {int(positions[k])}" for n, k in zip(names, lost, strict=False)
                ]
            raise DatasetError(
                f"{count(len(lost), 'id')} of {len(found):,} {'is' if len(lost) == 1 else 'are'} "
                f"missing (None, NaN or empty): {'; '.join(names)}{', ...' * (len(lost) > 3)}",
                remedy="Give these samples an id, or leave them out of the data.",
            )
        return found

    def require_length(self, n: int) -> None:
        """Raise if a call without index has another number of samples than there are ids."""
        if n != len(self.codes):
            raise DatasetError(
                f"there are {count(len(self.codes), 'id')} for {count(n, 'sample')}",
                remedy="Give index: the position of each sample of the call among the ids.",
            )

    def split(self, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the order of rows (m,) by group, the groups (g,), and their sizes (g,)."""
        order = codes.argsort(stable=True)
        which, sizes = torch.unique_consecutive(codes[order], return_counts=True)
        return order, which, sizes

    def batch(self, rows: Batch) -> Groups:
        """Return the groups of samples or tokens, in the order of their ids."""
        require_positions(len(rows))
        if isinstance(rows, Tokens):
            codes = self.of_rows(rows.samples, rows.position, rows.positions)
        else:
            codes = self.of_rows(rows.index)
        order, which, sizes = self.split(codes)
        return Groups.of_members(rows.select(order), which, sizes, self.ids[which], self.reduction)


def _missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which ids (N,) are missing: None, NaN, NaT, "" and the like."""
    kind, found = values.dtype.kind, np.zeros(values.shape, np.bool_)
    if kind in "fc":
        found |= np.isnan(values)
    elif kind in "US":
        found |= np.char.str_len(values) == 0
    elif kind == "O":
        found |= np.array([_is_missing(value) for value in values])
    return found


def _is_missing(value: Any) -> bool:
    if isinstance(value, str | bytes):
        return not value
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas' NA
        return True


def _uniform(values: NDArray[Any]) -> NDArray[Any]:
    """Return ids as one array of integers or texts."""
    kind = values.dtype.kind
    if kind == "O":
        kinds = {type(value).__name__ for value in values}
        texts = all(isinstance(value, str) for value in values)
        numbers = all(isinstance(value, int | float | np.number) for value in values)
        if not (texts or numbers):
            raise DatasetError(f"the ids are of type {listed(sorted(kinds))}", remedy=_OWN_ID)
        return _uniform(np.array([*values], np.str_ if texts else None))
    if kind == "S":
        return np.char.decode(values, "utf-8")
    if kind == "U":
        return values
    with np.errstate(invalid="ignore"):  # of infinity
        whole = values.astype(np.int64) if kind in "iubf" else None
    if whole is None or not np.array_equal(whole, values):
        wrong = values[0] if whole is None else values[whole != values][0]
        raise DatasetError(f"found the id {wrong}", remedy=_OWN_ID)
    return whole


def _encoded(names: NDArray[Any]) -> Tensor:
    """Return ids as integers (g,) int64, or as UTF-8 texts (g, w) uint8, padded with zeros."""
    if names.dtype.kind != "U":
        return torch.from_numpy(np.asarray(names, np.int64))
    texts = [str(name).encode("utf-8", "surrogatepass") for name in names]
    if any(b"\0" in text for text in texts):
        raise DatasetError("an id has a NUL character", remedy="Remove it.")
    width = max((len(text) for text in texts), default=1)
    content = b"".join(text.ljust(width, b"\0") for text in texts)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(len(texts), width)
