"""Arrays of a result file, read by row when asked, whichever way they are stored."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from math import prod
from types import EllipsisType
from typing import TypeVar

import h5py
import numpy as np

from gradscope.errors import ResultFileError
from gradscope.storage.format.files import reading
from gradscope.storage.format.layout import AXES, KEYS, KINDS
from gradscope.storage.format.numbers import named, numpy_dtype, unescape
from gradscope.storage.format.seal import REMEDY, Checks

T = TypeVar("T")
Selection = int | slice | np.ndarray | list[int] | list[bool] | EllipsisType


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
            self.representation = "factored"
            with reading(self._where):
                self.shape = _factored_shape(item)
                self.dtype = numpy_dtype(named(str(item.attrs["dtype"])))

    @property
    def nbytes(self) -> int:
        """The bytes it takes in the file."""
        is_dense = isinstance(self._item, h5py.Dataset)
        own = [self._item] if is_dense else [self._item[k] for k in self._item if k in AXES]
        return sum(int(dataset.id.get_storage_size()) for dataset in own)

    @property
    def overflowed(self) -> int:
        """How many of its numbers were finite, but are infinite in the stored format."""
        with reading(self._where):
            return int(self._item.attrs.get("overflowed", 0))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Selection) -> np.ndarray:
        """Return the entries `rows` of the first axis: all the others are whole."""
        if not self.shape:
            with reading(self._where):
                return self._checks.whole(self._item)
        if isinstance(rows, EllipsisType):
            return self._read(0, self.shape[0])
        if isinstance(rows, int | np.integer):
            position = range(self.shape[0])[rows]
            one: np.ndarray = self._read(position, position + 1)[0]
            return one
        if not isinstance(rows, slice):
            return self._listed(np.asarray(rows))
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
                return self._checks.dense(self._item, start, stop)
            return self._checks.rows(self._item, start, stop)

    def __repr__(self) -> str:
        return f"<StoredArray {self.name!r} {self.shape} {self.dtype} {self.representation}>"


class Lazy(Mapping[str, T]):
    """{name: value}, each read when it is asked for, once where it is `kept`."""

    def __init__(
        self, names: Iterable[str], read: Callable[[str], T], *, kept: bool = False
    ) -> None:
        self._names, self._read = dict.fromkeys(names), cache(read) if kept else read

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class StoredChain(Lazy[StoredArray]):
    """One chain: {name: StoredArray}, in the model's order.

    Attributes:
        text: The chain's canonical spelling.
        reduced: Whether its arrays are aggregates rather than rows.
    """

    def __init__(
        self,
        group: h5py.Group,
        checks: Checks,
        order: list[str],
        make: Callable[[str, h5py.HLObject, Checks], StoredArray] = StoredArray,
    ) -> None:
        self.text = str(group.attrs["chain"])
        self.reduced = bool(group.attrs["reduced"])
        found = {unescape(name): name for name in group}

        def read(name: str) -> StoredArray:
            with reading(f"{group.file.filename}: {group.name}"):
                return make(name, group[found[name]], checks)

        names = [name for name in dict.fromkeys([*order, *found]) if name in found]
        super().__init__(names, read, kept=True)


def stored_states(group: h5py.Group, checks: Checks) -> Lazy[np.ndarray]:
    """Return the state of one reducer, {key: tensor}."""
    if KEYS not in group.attrs:  # as in the first version
        found = {unescape(name): name for name in group}
        return Lazy(found, lambda key: checks.whole(group[found[key]]))
    places: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    ends = dict.fromkeys(group, 0)
    for key, name, shape in json.loads(group.attrs[KEYS]):
        places[key] = name, ends[name], tuple(shape)
        ends[name] += prod(shape)

    def read(key: str) -> np.ndarray:
        name, start, shape = places[key]
        with reading(f"{group.file.filename}: {group.name}"):
            return checks.rows(group[name], start, start + prod(shape)).reshape(shape)

    return Lazy(places, read)


def column(dataset: h5py.Dataset, checks: Checks, *, decode: bool = True) -> np.ndarray:
    """Return a column (N,) of a table; texts as text, or as stored without `decode`."""
    where = f"{dataset.file.filename}: {dataset.name}"
    with reading(where):
        values = checks.whole(dataset)
        wanted = dataset.attrs.get("sha256")  # of files of the first version
    digest = wanted and hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()
    if digest != wanted:
        raise ResultFileError(
            "the column's data are damaged: its checksum does not match", where=where, remedy=REMEDY
        )
    return np.char.decode(values, "utf-8") if decode and values.dtype.kind == "S" else values


def _factored_shape(group: h5py.Group) -> tuple[int, ...]:
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
            remedy="The file is damaged; compute it again.",
        )
    return (n, *shape)
