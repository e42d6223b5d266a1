"""What a data file holds, by name: arrays of numbers, ragged rows, texts; read in slices.

Only the rows that are asked for are in memory, so a data set may be larger than that. N is the
number of samples, the first axis of everything.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gradscope.config import memory_text
from gradscope.core.locate import first_line
from gradscope.core.memory import available
from gradscope.errors import DatasetError, GradscopeError
from gradscope.sources.damage import damage

_SMALL = 2**27  # bytes that nobody asks for
_WIDER = {"uint16": np.int32, "uint32": np.int64}  # torch hardly computes with these


class Column(Protocol):
    """An array with the sample axis first; a tensor is one, and so may be a part of a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, ...)."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its rows."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Return some rows (n, ...)."""


@dataclass(frozen=True)
class Sliced:
    """A `Column` whose rows are read when they are asked for.

    Attributes:
        shape: (N, ...).
        dtype: Of its rows.
        read: Returns the rows from a start up to a stop.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, step = rows.indices(self.shape[0])
        return self.read(start, stop)[::step]


@dataclass(frozen=True)
class Ragged:
    """Sequences of numbers, one a sample, of different lengths.

    Attributes:
        lengths: (N,) int64.
        row: The shape of one entry of a sequence.
        dtype: Of the numbers.
        read: Returns the sequences (length, *row) from a start up to a stop.
    """

    lengths: Tensor
    row: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Sequence[Tensor]]


@dataclass(frozen=True)
class Texts:
    """Texts, one a sample.

    Attributes:
        n: N.
        read: Returns those from a start up to a stop.
    """

    n: int
    read: Callable[[int, int], Sequence[str]]


Stored = Column | Ragged | Texts


class Arrays(Protocol):
    """What a data file holds."""

    @property
    def names(self) -> tuple[str, ...]:
        """What there is."""

    def load(self, name: str) -> Stored:
        """Return one of them."""


@dataclass(frozen=True)
class StoredArrays:
    """What a file holds, each opened when it is asked for.

    Attributes:
        names: What there is.
        load: Returns the array of that name.
        notes: What there is to say about the file.
    """

    names: tuple[str, ...]
    load: Callable[[str], Stored]
    notes: tuple[str, ...] = ()


def length_of(stored: Stored) -> int:
    """Return N."""
    if isinstance(stored, Texts):
        return stored.n
    return int(stored.lengths.shape[0] if isinstance(stored, Ragged) else stored.shape[0])


def runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the stretches of neighbouring positions in `rows`, in their order."""
    if isinstance(rows, range) and rows.step == 1:
        yield rows.start, rows.stop
        return
    start = last = rows[0]
    for row in rows[1:]:
        if row != last + 1:
            yield start, last + 1
            start = row
        last = row
    yield start, last + 1


def in_order(rows: Sequence[int]) -> tuple[Sequence[int], Tensor | None]:
    """Return positions in ascending order, and where each of `rows` is in it; None if that is so.

    Files that can be read only forwards are then gone through once.
    """
    if isinstance(rows, range) or all(a < b for a, b in pairwise(rows)):
        return rows, None
    order = torch.tensor(rows).argsort(stable=True)
    return torch.tensor(rows)[order].tolist(), order.argsort()


def from_numpy(array: np.ndarray) -> Tensor:
    """Return an array of numbers as a tensor, in a dtype that torch computes with.

    Raises:
        DatasetError: It holds something else, or a number that int64 cannot hold.
    """
    if array.dtype.name in _WIDER:
        array = array.astype(_WIDER[array.dtype.name])
    if array.dtype.name == "uint64":
        if array.size and array.max() >= 2**63:
            raise DatasetError(
                f"it holds {array.max()}, which int64 cannot hold",
                remedy="Store smaller integers, or floating-point numbers.",
            )
        array = array.astype(np.int64)
    if array.dtype.hasobject:
        raise objects()
    native = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise DatasetError(
            f"its dtype {array.dtype} cannot be made a tensor",
            remedy="Store numbers: floats, integers, booleans or complex numbers.",
        ) from None


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """Return the dtype that `from_numpy` makes of a numpy one.

    Raises:
        DatasetError: There is none.
    """
    return from_numpy(np.empty(0, dtype)).dtype


def require_memory(needed: int) -> None:
    """Refuse what cannot fit, before it is tried: the system may promise more than it has.

    Raises:
        MemoryError: More bytes are needed than there are.
    """
    there = available(torch.device("cpu")) if needed > _SMALL else None
    if there is not None and needed > there:
        raise MemoryError(f"{memory_text(needed)} are needed, there are {memory_text(there)}")


def objects() -> DatasetError:
    """Return the error for Python objects where numbers should be."""
    return DatasetError(
        "this array holds Python objects, which could execute code and are never loaded",
        remedy="Store numbers; pad ragged rows to one length.",
    )


@contextmanager
def reading(path: Path, name: str | None = None) -> Iterator[None]:
    """Turn what the libraries raise about a file into a `DatasetError` of our own words."""
    where = str(path) if name is None else f"{path}: {name}"
    try:
        yield
    except GradscopeError as error:
        raise error if error.where else error.at(where) from None
    except MemoryError as error:
        raise DatasetError(
            f"it needs more memory than there is: {first_line(error)}",
            where=where,
            remedy="Split the file, or write it again if it should not be that large.",
        ) from error
    except Exception as error:  # a damaged file can make a parser raise anything
        if isinstance(error, ValueError) and "allow_pickle" in str(error):
            raise objects().at(where) from error
        raise DatasetError(
            f"the data are damaged or cut off: {damage(error)}",
            where=where,
            remedy="Write or download the file again.",
        ) from error


def even(ragged: Ragged) -> Column:
    """Return sequences that are all of one length as an array (N, length, ...).

    Raises:
        DatasetError: They are not.
    """
    lengths = ragged.lengths
    shortest, longest = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    if shortest != longest:
        raise DatasetError(
            f"its samples have from {shortest:,} to {longest:,} entries",
            remedy="[dataset] pad = { NAME = 0 } fills the shorter ones up with that number; "
            "NAME_mask then says which entries are a sample's own.",
        )

    def read(start: int, stop: int) -> Tensor:
        return torch.stack(list(ragged.read(start, stop)))

    return Sliced((len(lengths), longest, *ragged.row), ragged.dtype, read)
