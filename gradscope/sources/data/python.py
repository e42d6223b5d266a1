"""Data sets of the user's own: FILE.py:FACTORY returns a sized torch Dataset.

A sample is (inputs, targets), a mapping from array names, or the inputs alone.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from gradscope.config import DatasetSpec
from gradscope.core.batch import map_tensors, tensors
from gradscope.core.locate import first_line
from gradscope.errors import DatasetError, ModelError
from gradscope.sources.code import code_digests, load_function, loading, user_file

Collate = Callable[[list[Any]], Any]

_END = object()


class PythonRows:
    """The samples of a data set that the user's code makes.

    Args:
        spec: Its `factory` and the arguments for it.

    Attributes:
        code: The digests of the user's code, by file.
        sha256: Of the code, the arguments, the length and the first sample.
        notes: What there is to say about it.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        assert spec.factory is not None
        self._where = f"data set {spec.factory}"
        factory = load_function(spec.factory, "data set")
        with user_file(self._where), loading(spec.factory, "data set"):
            made = factory(**spec.kwargs)
        self._data, self._collate, self.notes = _parts(made, self._where)
        self._n = self._length()
        self._iterator: tuple[int, Iterator[Any]] | None = None
        self._seen: dict[tuple[int, ...], str] = {}
        self._first: str | None = None
        self._first = _digest(self._batch(range(1)))
        self.code = code_digests(spec.factory, "data set")
        facts = [self.code, spec.kwargs, self._n, self._first]
        self.sha256 = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()

    def __len__(self) -> int:
        return self._n

    def read(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return samples, collated, by name.

        Raises:
            DatasetError: They are not those that were returned for the same rows before.
        """
        found = self._batch(rows)
        key, digest = (rows[0], rows[-1], len(rows)), _digest(found)
        if self._seen.setdefault(key, digest) != digest:
            raise self._other(f"samples {rows[0]} to {rows[-1]} are")
        return found

    def _batch(self, rows: Sequence[int]) -> dict[str, Any]:
        samples = self._samples(rows)
        batch = self._collated(samples)
        alone = self._collated(samples[:1]) if rows[0] == 0 else None
        if alone is not None and self._first is not None:
            again = _digest(_named(alone, 1, self._where))
            if again != self._first:
                raise self._other("sample 0 is")
        return _named(batch, len(rows), self._where)

    def _collated(self, samples: list[Any]) -> Any:
        try:
            with user_file(self._where):
                return self._collate(samples)
        except ModelError as error:
            if self._collate is not default_collate or "equal size" not in error.what:
                raise
            raise DatasetError(
                f"its samples are not all of one shape: {first_line(error.__cause__ or error)}",
                where=self._where,
                remedy="Pad them, or return (dataset, collate_fn) with a function that does.",
            ) from error

    def _other(self, what: str) -> DatasetError:
        return DatasetError(
            f"{what} not the same when read again",
            where=self._where,
            remedy="Make each sample depend on its position alone: no shuffling, and random "
            "augmentation seeded with the position.",
        )

    def _samples(self, rows: Sequence[int]) -> list[Any]:
        if not self._by_position:
            return [self._next(row) for row in rows]
        with user_file(self._where):
            return [self._data[row] for row in rows]

    def _next(self, row: int) -> Any:
        """Return a sample of an iterable: those before it are passed over."""
        with user_file(self._where):
            at, iterator = self._iterator or (0, iter(self._data))
            if at > row:
                at, iterator = 0, iter(self._data)
            sample: Any = _END
            while at <= row and (sample := next(iterator, _END)) is not _END:
                at += 1
        if sample is _END:
            raise DatasetError(
                f"it ended after {at} samples, its length is {self._n}",
                where=self._where,
                remedy="Correct its __len__.",
            )
        self._iterator = (at, iterator)
        return sample

    def _length(self) -> int:
        with user_file(self._where):
            size = getattr(type(self._data), "__len__", None)
            n = None if size is None else len(self._data)
        if n is None:
            raise DatasetError(
                "it has no length (no __len__), so that the number of samples is unknown",
                where=self._where,
                remedy="Define __len__, or return a map-style Dataset.",
            )
        if n == 0:
            raise DatasetError(
                "there are no samples", where=self._where, remedy="Give at least one sample."
            )
        with user_file(self._where):
            once = not self._by_position and iter(self._data) is self._data
        if once:
            raise DatasetError(
                "it can be gone through only once",
                where=self._where,
                remedy="Let __iter__ return a new iterator each time, or define __getitem__.",
            )
        return n

    @property
    def _by_position(self) -> bool:
        return hasattr(self._data, "__getitem__") and not isinstance(self._data, IterableDataset)


def _parts(made: Any, where: str) -> tuple[Any, Collate, tuple[str, ...]]:
    """Split what a factory returned into samples, collate function and notes."""
    if isinstance(made, DataLoader):
        note = "of the DataLoader, its dataset and collate_fn are used; the order is the data set's"
        return made.dataset, made.collate_fn or default_collate, (note,)
    if isinstance(made, tuple) and len(made) == 2 and callable(made[1]):
        return made[0], made[1], ()
    own = getattr(made, "collate_fn", None)
    if not hasattr(made, "__getitem__") and not hasattr(made, "__iter__"):
        raise DatasetError(
            f"it is of type {type(made).__name__}",
            where=where,
            remedy="Return a torch.utils.data.Dataset, (dataset, collate_fn), or a DataLoader.",
        )
    return made, own if callable(own) else default_collate, ()


def _named(batch: Any, n: int, where: str) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        parts = {str(name): value for name, value in batch.items()}
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        parts = {"inputs": batch[0], "targets": batch[1]}
    else:
        parts = {"inputs": batch}
    try:
        found = {name: _tree(value) for name, value in parts.items()}
    except DatasetError as error:
        raise error.at(where) from None
    for name, value in found.items():
        for tensor in tensors(value):
            if tensor.dim() and tensor.shape[0] != n:
                raise DatasetError(
                    f"{n} samples were collated to {name} of the shape {tuple(tensor.shape)}",
                    where=where,
                    remedy="The collate function must put the sample axis first.",
                )
    return found


def _tree(value: Any) -> Any:
    """Return what a collate made in the forms that a model is called with."""
    if isinstance(value, Mapping):
        return {str(key): _tree(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tree(v) for v in value)
    if isinstance(value, str | bytes):
        raise DatasetError(
            f"a sample holds text: {value[:40]!r}",
            remedy="Make numbers of it in the data set or its collate function.",
        )
    return value


def _digest(batch: dict[str, Any]) -> str:
    digest = hashlib.sha256()

    def add(tensor: Tensor) -> None:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(plain.view(torch.uint8).numpy().data)

    map_tensors(add, batch)
    return digest.hexdigest()
