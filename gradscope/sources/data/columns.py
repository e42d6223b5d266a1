"""Columns of a data file: named arrays of numbers, sequences of numbers, or texts.

Columns are read in slices. Only the requested rows are in memory, so a data set may be larger than
the memory. N is the number of samples, the first axis of every column.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.config import memory_text
from gradscope.core.texts import listed
from gradscope.errors import DatasetError
from gradscope.process.memory import available
from gradscope.sources.formats import reading

# the lengths (N,) int64 of sequences, and the shape of an entry
SequenceSizes = tuple[Tensor, tuple[int, ...]]

_SMALL = 2**27  # bytes that need no check of the available memory
# torch supports few operations for these dtypes
_WIDER = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


@dataclass(frozen=True)
class NumberColumn:
    """Numbers with rows that are read on demand."""

    shape: tuple[int, ...]  # (N, ...)
    dtype: torch.dtype  # the dtype of its rows
    read: Callable[[int, int], Tensor]  # returns the rows (n, ...) from a start up to a stop

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, step = rows.indices(self.shape[0])
        return self.read(start, stop)[::step]


@dataclass(frozen=True)
class SequenceColumn:
    """Sequences of numbers with different lengths, one for each sample."""

    dtype: torch.dtype  # the dtype of the numbers
    # returns the sequences (length, *row) from a start up to a stop
    read: Callable[[int, int], Sequence[Tensor]]
    # returns the lengths and the shape `row` of an entry; called once, if needed
    sizes: Callable[[], SequenceSizes]
    # returns these sequences one after the other, without an object for each
    joined: Callable[[int, int], Tensor] | None = None

    @cached_property
    def measured(self) -> SequenceSizes:
        """The lengths (N,) int64, and the shape of an entry."""
        return self.sizes()

    @property
    def lengths(self) -> Tensor:
        """The lengths (N,) int64."""
        return self.measured[0]


@dataclass(frozen=True)
class TextColumn:
    """Texts, one for each sample."""

    n: int  # N
    read: Callable[[int, int], Sequence[str]]  # returns the texts from a start up to a stop


Numbers = Tensor | NumberColumn
StoredColumn = Numbers | SequenceColumn | TextColumn


@dataclass(frozen=True)
class StoredArrays:
    """The arrays of a file; each is opened on demand."""

    names: tuple[str, ...]  # the names of all arrays
    # returns the array with a name: a tensor, or a column that is read in slices
    load: Callable[[str], StoredColumn]
    notes: tuple[str, ...] = ()  # notes about the file


def with_clear_errors(arrays: StoredArrays, path: Path) -> StoredArrays:
    """Return the arrays of a file with clear errors for exceptions that reading raises."""

    def load(name: str) -> StoredColumn:
        with reading(DatasetError, f"{path}: {name}"):
            stored = arrays.load(name)
        if isinstance(stored, Tensor):
            return stored

        def read(start: int, stop: int) -> Any:
            with reading(DatasetError, f"{path}: {name}, rows {start} to {stop - 1}"):
                return stored.read(start, stop)

        if isinstance(stored, NumberColumn):
            return replace(stored, read=read)
        if isinstance(stored, TextColumn):
            return replace(stored, read=read)

        def sizes() -> SequenceSizes:
            with reading(DatasetError, f"{path}: {name}"):
                return stored.sizes()

        joined = stored.joined

        def read_joined(start: int, stop: int) -> Tensor:
            assert joined is not None
            with reading(DatasetError, f"{path}: {name}, rows {start} to {stop - 1}"):
                return joined(start, stop)

        return replace(stored, read=read, sizes=sizes, joined=joined and read_joined)

    return StoredArrays(arrays.names, load, arrays.notes)


def length_of(stored: StoredColumn) -> int:
    """Return the number of samples N."""
    if isinstance(stored, TextColumn):
        return stored.n
    if isinstance(stored, SequenceColumn):
        return len(stored.lengths)
    return int(stored.shape[0]) if stored.shape else 0


def even(stored: Numbers | SequenceColumn) -> Numbers:
    """Return numbers unchanged, and sequences of equal length as an array (N, length, ...)."""
    if not isinstance(stored, SequenceColumn):
        return stored
    lengths = stored.lengths
    shortest, longest = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    if shortest != longest:
        raise DatasetError(
            f"its samples have from {shortest:,} to {longest:,} entries",
            remedy="Pad the shorter samples with [dataset] pad = { NAME = 0 }. The array NAME_mask "
            "then marks the entries that are not padding.",
        )
    read, joined, row = stored.read, stored.joined, (longest, *stored.measured[1])

    def rows(start: int, stop: int) -> Tensor:
        if joined is None:
            return torch.stack(list(read(start, stop)))
        return joined(start, stop).reshape(stop - start, *row)

    return NumberColumn((len(lengths), *row), stored.dtype, rows)


def as_index(rows: Sequence[int]) -> Tensor:
    """Return positions as a tensor (n,) int64."""
    if isinstance(rows, range):  # without an object for each position
        return torch.arange(rows.start, rows.stop, rows.step)
    return torch.tensor(rows)


def runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) for each run of consecutive positions in `rows`, in order."""
    if isinstance(rows, range) and rows.step == 1:
        yield rows.start, rows.stop
        return
    ends = [k for k in range(1, len(rows)) if rows[k] != rows[k - 1] + 1]
    for first, end in pairwise([0, *ends, len(rows)]):
        yield rows[first], rows[end - 1] + 1


def in_order(rows: Sequence[int]) -> tuple[Sequence[int], Tensor | None]:
    """Return sorted positions and the index of each of `rows` in them (None if already sorted).

    A file that can only be read forwards is then read once.
    """
    if isinstance(rows, range) or all(a < b for a, b in pairwise(rows)):
        return rows, None
    order = torch.tensor(rows).argsort(stable=True)
    return torch.tensor(rows)[order].tolist(), order.argsort()


def from_numpy(array: np.ndarray) -> Tensor:
    """Return an array of numbers as a tensor, in a dtype that torch supports."""
    if array.dtype.name == "uint64" and array.size and array.max() >= 2**63:
        raise too_large(int(array.max()))
    if array.dtype.hasobject:
        raise objects()
    goal = _WIDER.get(array.dtype.name, array.dtype.newbyteorder("="))
    native = array.astype(goal, copy=not array.flags.writeable)
    try:
        return torch.from_numpy(native)
    except TypeError:
        remedy = "Store floats, integers, booleans or complex numbers."
        what = f"its dtype {array.dtype} cannot be converted to a tensor"
        raise DatasetError(what, remedy=remedy) from None


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """Return the torch dtype for a numpy dtype, as in `from_numpy`."""
    return from_numpy(np.empty(0, dtype)).dtype


def too_large(number: int) -> DatasetError:
    """Return the error for an integer beyond int64."""
    return DatasetError(
        f"it has the number {number}, which is too large for int64",
        remedy="Store smaller integers, or floating-point numbers.",
    )


def objects() -> DatasetError:
    """Return the error for an array of Python objects."""
    return DatasetError(
        "this array has Python objects, which could execute code and are never loaded",
        remedy="Store numbers, and pad ragged rows to equal length.",
    )


def require_distinct(names: Iterable[str], kind: str) -> None:
    """Raise if several `kind` ("columns", "arrays") have the same name."""
    twice = [repr(name) for name, count in Counter(names).items() if count > 1]
    if twice:
        what = f"several {kind} are called {listed(twice, 3)}"
        raise DatasetError(what, remedy="Write the data again with different names.")


def require_available(
    needed: int, memory: Callable[[torch.device], int | None] = available
) -> None:
    """Raise MemoryError for too many bytes: the system may allocate more than it has."""
    there = memory(torch.device("cpu")) if needed > _SMALL else None
    if there is not None and needed > there:
        raise MemoryError(
            f"{memory_text(needed)} are needed, but {memory_text(there)} are available"
        )
