"""Arrays of a result file, read by row when asked, whichever way they are stored."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from types import EllipsisType

import h5py
import numpy as np

from gradscope.core.shortage import is_shortage
from gradscope.errors import ResultFileError
from gradscope.storage.checks import Checks
from gradscope.storage.factors import AXES, KINDS, stored_rows
from gradscope.storage.formats import named, numpy_dtype

Selection = int | slice | np.ndarray | list[int] | list[bool] | EllipsisType


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn what HDF5 raises while `where` is read into a `ResultFileError`."""
    try:
        yield
    except ResultFileError as error:
        raise error if error.where else error.at(where) from error.__cause__
    except (OSError, RuntimeError, KeyError, ValueError, MemoryError) as error:
        if is_shortage(error):
            raise ResultFileError(
                f"memory does not suffice for what is to be read ({_reason(error)})",
                where=where,
                remedy="Read fewer rows at a time. If one is too much, the file may claim more "
                "than any run has written.",
            ) from error
        closed = "identifier" in str(error)
        raise ResultFileError(
            "the file is closed" if closed else f"its data are damaged ({_reason(error)})",
            where=where,
            remedy=(
                "Read it inside the with statement that opened it."
                if closed
                else "A checksum or the structure does not match what was written; take another "
                "copy of the file, or compute it again."
            ),
        ) from error


class StoredArray:
    """One parameter's array in the file.

    Attributes:
        name: The parameter's name.
        representation: "dense" or "factored".
        shape: (N, *shape) for rows, (*shape) for an aggregate.
        dtype: The dtype of what is returned: float32 also where bfloat16 is stored.
    """

    def __init__(self, name: str, item: h5py.HLObject, checks: Checks) -> None:
        self.name = name
        self._item, self._checks = item, checks
        self._where = f"{item.file.filename}: {item.name}"
        if isinstance(item, h5py.Dataset):
            self.representation = "dense"
            self.shape = tuple(int(s) for s in item.shape)
            self.dtype = item.dtype
        else:
            with reading(self._where):
                self.representation = "factored"
                self.shape = _factored_shape(item, self._where)
                self.dtype = numpy_dtype(named(str(item.attrs["dtype"])))

    @property
    def nbytes(self) -> int:
        """The bytes it takes in the file."""
        return sum(int(d.id.get_storage_size()) for d in self._datasets)

    @property
    def overflowed(self) -> int:
        """How many of its numbers were finite, but are infinite in the stored format."""
        with reading(self._where):
            return int(self._item.attrs.get("overflowed", 0))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Selection) -> np.ndarray:
        """Return the entries `rows` of the first axis: all the others are whole.

        Raises:
            ResultFileError: The data are damaged.
            IndexError: A row does not exist.
        """
        if not self.shape or isinstance(rows, EllipsisType):
            return self._whole()
        if isinstance(rows, int | np.integer):
            position = range(self.shape[0])[rows]
            one: np.ndarray = self._read(position, position + 1)[0]
            return one
        if isinstance(rows, slice):
            return self._slice(rows)
        return self._listed(np.asarray(rows))

    def _whole(self) -> np.ndarray:
        if self.shape:
            return self._read(0, self.shape[0])
        with reading(self._where):
            return self._checks.whole(self._item)

    def _slice(self, rows: slice) -> np.ndarray:
        chosen = range(self.shape[0])[rows]
        if len(chosen) == 0:
            return np.empty((0, *self.shape[1:]), self.dtype)
        if abs(chosen.step) > 1:
            return self._listed(np.array(chosen))
        found = self._read(min(chosen), max(chosen) + 1)
        return found if chosen.step == 1 else found[::-1]

    def _listed(self, rows: np.ndarray) -> np.ndarray:
        """Read each run of neighbouring rows once, then put them in the order asked for."""
        positions = np.arange(self.shape[0])[rows.astype(int) if rows.size == 0 else rows]
        wanted, order = np.unique(positions, return_inverse=True)
        with reading(self._where):
            found = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        at = 0
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1):
            if len(run):
                found[at : at + len(run)] = self._read(int(run[0]), int(run[-1]) + 1)
                at += len(run)
        return found[order]

    def _read(self, start: int, stop: int) -> np.ndarray:
        with reading(self._where):
            if isinstance(self._item, h5py.Group):
                return stored_rows(self._item, slice(start, stop), self._checks)
            return self._checks.rows(self._item, start, stop)

    @property
    def _datasets(self) -> list[h5py.Dataset]:
        if isinstance(self._item, h5py.Dataset):
            return [self._item]
        return [self._item[name] for name in self._item if name in AXES]

    def __repr__(self) -> str:
        return f"<StoredArray {self.name!r} {self.shape} {self.dtype} {self.representation}>"


def _factored_shape(group: h5py.Group, where: str) -> tuple[int, ...]:
    """Return (N, *shape), having checked that the factors make up such an array."""
    shape = tuple(int(s) for s in group.attrs["shape"])
    first, second = (group[name] for name in KINDS[str(group.attrs["kind"])])
    n, t = first.shape[0], first.shape[-2] if first.ndim == 4 else first.shape[-1]
    if first.ndim == 4:  # outer
        fits = second.ndim == 4 and second.shape[:3] == (n, first.shape[1], t)
        fits = fits and first.shape[1] * first.shape[3] * second.shape[3] == prod(shape)
    else:
        fits = first.ndim == 2 and second.ndim == 3 and second.shape[:2] == (n, t)
        fits = fits and len(shape) == 2 and second.shape[2] == shape[1]
    if not fits or min(shape, default=1) < 0:
        raise ResultFileError(
            f"factors of {first.shape} and {second.shape} do not make an array of {shape}",
            where=where,
            remedy="The file is damaged; compute it again.",
        )
    return (n, *shape)


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text or type(error).__name__
