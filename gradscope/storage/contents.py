"""What lies in a result file's groups, read when it is asked for."""

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod

import h5py
import numpy as np

from gradscope.errors import ResultFileError
from gradscope.storage import integrity
from gradscope.storage.arrays import StoredArray, reading
from gradscope.storage.build import KEYS
from gradscope.storage.checks import REMEDY, Checks
from gradscope.storage.names import unescape

Make = Callable[[str, h5py.HLObject, Checks], StoredArray]


class ArraysByName(Mapping[str, StoredArray]):
    """Arrays of a group by parameter name, in the model's order."""

    def __init__(
        self, group: h5py.Group, checks: Checks, order: list[str], make: Make = StoredArray
    ) -> None:
        found = {unescape(name): name for name in group}
        known = set(order)
        names = [*(n for n in order if n in found), *(n for n in found if n not in known)]
        self._make, self._group, self._checks = make, group, checks
        self._keys = {name: found[name] for name in names}
        self._arrays: dict[str, StoredArray] = {}

    def __getitem__(self, name: str) -> StoredArray:
        key = self._keys[name]
        if name not in self._arrays:
            with reading(f"{self._group.file.filename}: {self._group.name}"):
                self._arrays[name] = self._make(name, self._group[key], self._checks)
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class StoredChain(ArraysByName):
    """One chain: {name: StoredArray}.

    Attributes:
        text: The chain's canonical spelling.
        reduced: Whether its arrays are aggregates rather than rows.
    """

    def __init__(
        self, group: h5py.Group, checks: Checks, order: list[str], make: Make = StoredArray
    ) -> None:
        super().__init__(group, checks, order, make)
        self.text = str(group.attrs["chain"])
        self.reduced = bool(group.attrs["reduced"])


class Norms(Mapping[str, np.ndarray]):
    """{parameter: (N,)}, each read and checked when asked for."""

    def __init__(self, group: h5py.Group, checks: Checks, order: list[str]) -> None:
        self._checks = checks
        self._group, self._keys = group, {unescape(name): name for name in group}
        self._names = [n for n in order if n in self._keys]

    def __getitem__(self, name: str) -> np.ndarray:
        return read_column(self._group[self._keys[name]], self._checks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class StoredStates(Mapping[str, np.ndarray]):
    """The state of one reducer: {key: tensor}, each read when asked for.

    Raises:
        ResultFileError: The list of its keys is none.
    """

    def __init__(self, group: h5py.Group, checks: Checks) -> None:
        self._group, self._checks = group, checks
        self._places: dict[str, tuple[str, int | None, tuple[int, ...]]] = {
            unescape(name): (name, None, ())
            for name in group  # as in the first version
        }
        if KEYS in group.attrs:
            self._places, ends = {}, dict.fromkeys(group, 0)
            for key, name, shape in json.loads(group.attrs[KEYS]):
                self._places[key] = name, ends[name], tuple(shape)
                ends[name] += prod(shape)

    def __getitem__(self, key: str) -> np.ndarray:
        name, start, shape = self._places[key]
        with reading(f"{self._group.file.filename}: {self._group.name}"):
            dataset = self._group[name]
            if start is None:
                return self._checks.whole(dataset)
            return self._checks.rows(dataset, start, start + prod(shape)).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_column(dataset: h5py.Dataset, checks: Checks) -> np.ndarray:
    """Return a column (N,) of a table; texts as text.

    Raises:
        ResultFileError: It is damaged.
    """
    values = stored_column(dataset, checks)
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values


def stored_column(dataset: h5py.Dataset, checks: Checks) -> np.ndarray:
    """Return a column (N,) of a table as it is stored.

    Raises:
        ResultFileError: It is damaged.
    """
    where = f"{dataset.file.filename}: {dataset.name}"
    with reading(where):
        values = checks.whole(dataset)
        digest = dataset.attrs.get("sha256")  # of files of the first version
    if digest is not None and integrity.column_digest(values) != digest:
        raise ResultFileError(
            "the column's data are damaged: its checksum does not match",
            where=where,
            remedy=REMEDY,
        )
    return values


def number_attributes(dataset: h5py.Dataset) -> dict[str, float]:
    """Return the attributes that are floating-point numbers."""
    found = {}
    for k in range(h5py.h5a.get_num_attrs(dataset.id)):
        attribute = h5py.h5a.open(dataset.id, index=k)
        if attribute.dtype.kind == "f" and attribute.shape == ():
            value = np.empty((), attribute.dtype)
            attribute.read(value)
            found[attribute.name.decode(errors="replace")] = float(value)
    return found
