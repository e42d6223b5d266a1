"""What lies in a result file's groups, read when it is asked for."""

from collections.abc import Callable, Iterator, Mapping

import h5py
import numpy as np

from gradscope.errors import ResultFileError
from gradscope.storage import integrity
from gradscope.storage.arrays import StoredArray, reading
from gradscope.storage.names import unescape

Make = Callable[[str, h5py.HLObject], StoredArray]


class ArraysByName(Mapping[str, StoredArray]):
    """Arrays of a group by parameter name, in the model's order."""

    def __init__(self, group: h5py.Group, order: list[str], make: Make = StoredArray) -> None:
        found = {unescape(name): name for name in group}
        names = [*(n for n in order if n in found), *(n for n in found if n not in order)]
        self._make, self._group, self._keys = make, group, {name: found[name] for name in names}
        self._arrays: dict[str, StoredArray] = {}

    def __getitem__(self, name: str) -> StoredArray:
        key = self._keys[name]
        if name not in self._arrays:
            with reading(f"{self._group.file.filename}: {self._group.name}"):
                self._arrays[name] = self._make(name, self._group[key])
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

    def __init__(self, group: h5py.Group, order: list[str], make: Make = StoredArray) -> None:
        super().__init__(group, order, make)
        self.text = str(group.attrs["chain"])
        self.reduced = bool(group.attrs["reduced"])


class Norms(Mapping[str, np.ndarray]):
    """{parameter: (N,)}, each read and checked when asked for."""

    def __init__(self, group: h5py.Group, order: list[str]) -> None:
        self._columns = {unescape(name): dataset for name, dataset in group.items()}
        self._names = [n for n in order if n in self._columns]

    def __getitem__(self, name: str) -> np.ndarray:
        return read_column(self._columns[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_column(dataset: h5py.Dataset) -> np.ndarray:
    """Return a column (N,) of a table; texts as text.

    Raises:
        ResultFileError: It is damaged.
    """
    values = stored_column(dataset)
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values


def stored_column(dataset: h5py.Dataset) -> np.ndarray:
    """Return a column (N,) of a table as it is stored.

    Raises:
        ResultFileError: It is damaged.
    """
    where = f"{dataset.file.filename}: {dataset.name}"
    with reading(where):
        values: np.ndarray = dataset[()]
        expected = dataset.attrs["sha256"]
    if integrity.column_digest(values) != expected:
        raise ResultFileError(
            "the column's data are damaged: its checksum does not match",
            where=where,
            remedy="Take another copy of the file, or compute it again.",
        )
    return values


def number_attributes(dataset: h5py.Dataset) -> dict[str, float]:
    """Return the attributes that are floating-point numbers."""
    items = dataset.attrs.items()
    return {key: float(value) for key, value in items if isinstance(value, float | np.floating)}
