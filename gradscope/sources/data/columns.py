"""What a data file holds, by name: arrays of numbers, sequences of them, texts; read in slices.

Only the rows that are asked for are in memory, so a data set may be larger than that. N is the
number of samples, the first axis of everything.
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

# of sequences: lengths (N,) int64, shape of an entry
SequenceSizes = tuple[Tensor, tuple[int, ...]]

_SMALL = 2**27  # bytes that nobody asks for
# torch hardly computes with these
_WIDER = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}


@dataclass(frozen=True)
class NumberColumn:
    """Numbers whose rows are read when they are asked for."""

    shape: tuple[int, ...]  # (N, ...)
    dtype: torch.dtype  # of its rows
    read: Callable[[int, int], Tensor]  # returns the rows (n, ...) from a start up to a stop

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, step = rows.indices(self.shape[0])
        return self.read(start, stop)[::step]


@dataclass(frozen=True)
class SequenceColumn:
    """Sequences of numbers, one a sample, of different lengths."""

    dtype: torch.dtype  # of the numbers
    # returns the sequences (length, *row) from a start up to a stop
    read: Callable[[int, int], Sequence[Tensor]]
    # returns their lengths and the shape `row` of an entry; called once, when needed
    sizes: Callable[[], SequenceSizes]

    @cached_property
    def measured(self) -> SequenceSizes:
        """Their lengths (N,) int64, and the shape of an entry."""
        return self.sizes()

    @property
    def lengths(self) -> Tensor:
        """(N,) int64."""
        return self.measured[0]


@dataclass(frozen=True)
class TextColumn:
    """Texts, one a sample."""

    n: int  # N
    read: Callable[[int, int], Sequence[str]]  # returns those from a start up to a stop


Numbers = Tensor | NumberColumn
StoredColumn = Numbers | SequenceColumn | TextColumn


@dataclass(frozen=True)
class StoredArrays:
    """What a file holds, each array opened when it is asked for."""

    names: tuple[str, ...]  # what there is
    # returns the array of that name: a tensor, or a column that is read in slices
    load: Callable[[str], StoredColumn]
    notes: tuple[str, ...] = ()  # what there is to say about the file


def with_clear_errors(arrays: StoredArrays, path: Path) -> StoredArrays:
    """Return the arrays of a file, with whatever is raised as they are read in our own words."""

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

        return replace(stored, read=read, sizes=sizes)

    return StoredArrays(arrays.names, load, arrays.notes)


def length_of(stored: StoredColumn) -> int:
    """Return N."""
    if isinstance(stored, TextColumn):
        return stored.n
    if isinstance(stored, SequenceColumn):
        return len(stored.lengths)
    return int(stored.shape[0]) if stored.shape else 0


def even(stored: Numbers | SequenceColumn) -> Numbers:
    """Return numbers, and sequences that are all of one length as an array (N, length, ...)."""
    if not isinstance(stored, SequenceColumn):
        return stored
    lengths = stored.lengths
    shortest, longest = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    if shortest != longest:
        raise DatasetError(
            f"its samples have from {shortest:,} to {longest:,} entries",
            remedy="[dataset] pad = { NAME = 0 } fills the shorter ones up with that number; "
            "NAME_mask then says which entries are a sample's own.",
        )
    read = stored.read
    shape = (len(lengths), longest, *stored.measured[1])
    return NumberColumn(shape, stored.dtype, lambda a, b: torch.stack(list(read(a, b))))


def runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the stretches of neighbouring positions in `rows`, in their order."""
    if isinstance(rows, range) and rows.step == 1:
        yield rows.start, rows.stop
        return
    ends = [k for k in range(1, len(rows)) if rows[k] != rows[k - 1] + 1]
    for first, end in pairwise([0, *ends, len(rows)]):
        yield rows[first], rows[end - 1] + 1


def in_order(rows: Sequence[int]) -> tuple[Sequence[int], Tensor | None]:
    """Return positions in ascending order, and where each of `rows` is in it; None if that is so.

    Files that can be read only forwards are then gone through once.
    """
    if isinstance(rows, range) or all(a < b for a, b in pairwise(rows)):
        return rows, None
    order = torch.tensor(rows).argsort(stable=True)
    return torch.tensor(rows)[order].tolist(), order.argsort()


def from_numpy(array: np.ndarray) -> Tensor:
    """Return an array of numbers as a tensor, in a dtype that torch computes with."""
    if array.dtype.name == "uint64" and array.size and array.max() >= 2**63:
        raise too_large(int(array.max()))
    if array.dtype.hasobject:
        raise objects()
    goal = _WIDER.get(array.dtype.name, array.dtype.newbyteorder("="))
    native = array.astype(goal, copy=not array.flags.writeable)
    try:
        return torch.from_numpy(native)
    except TypeError:
        remedy = "Store numbers: floats, integers, booleans or complex numbers."
        what = f"its dtype {array.dtype} cannot be made a tensor"
        raise DatasetError(what, remedy=remedy) from None


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """Return the dtype that `from_numpy` makes of a numpy one."""
    return from_numpy(np.empty(0, dtype)).dtype


def too_large(number: int) -> DatasetError:
    """Return the error for an integer beyond int64."""
    return DatasetError(
        f"it holds {number}, which int64 cannot hold",
        remedy="Store smaller integers, or floating-point numbers.",
    )


def objects() -> DatasetError:
    """Return the error for Python objects where numbers should be."""
    return DatasetError(
        "this array holds Python objects, which could execute code and are never loaded",
        remedy="Store numbers; pad ragged rows to one length.",
    )


def require_distinct(names: Iterable[str], kind: str) -> None:
    """Refuse `kind` ("columns", "arrays") of which several have one name."""
    twice = [repr(name) for name, count in Counter(names).items() if count > 1]
    if twice:
        what = f"several {kind} are called {listed(twice, 3)}"
        raise DatasetError(what, remedy="Write the data again, each under a name of its own.")


def require_available(
    needed: int, memory: Callable[[torch.device], int | None] = available
) -> None:
    """Raise MemoryError for bytes that cannot fit: the system may promise more than it has."""
    there = memory(torch.device("cpu")) if needed > _SMALL else None
    if there is not None and needed > there:
        raise MemoryError(f"{memory_text(needed)} are needed, there are {memory_text(there)}")
