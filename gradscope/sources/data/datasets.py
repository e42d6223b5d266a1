"""A data set: samples of data files or of the user's own code, and batches made from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from gradscope.config import DatasetSpec, parse_samples
from gradscope.core.batch import Batch, map_tensors
from gradscope.core.registry import suggestion
from gradscope.errors import DatasetError
from gradscope.sources.conversion import converter, dtype_name
from gradscope.sources.data.columns import Column, Ragged, Texts
from gradscope.sources.data.files import FileRows, open_files
from gradscope.sources.data.ids import Ids, ids_of
from gradscope.sources.data.python import PythonRows
from gradscope.sources.digests import sha256_of_sources


class Samples(Protocol):
    """Where samples come from."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say about it."""

    def __len__(self) -> int:
        """N, all of them."""

    def read(self, rows: Sequence[int]) -> Mapping[str, Any]:
        """Return the samples `rows` by array name, sample axis first."""


@dataclass(frozen=True)
class Dataset:
    """Samples, all of those there are or some.

    Attributes:
        spec: Which arrays, and how they are made into tensors.
        format: The reader's name, or "python".
        samples: Where they come from.
        chosen: (N,), the positions of those that were selected, None for all.
        named: Returns the ids of samples of all that there are, None where they have none.
    """

    spec: DatasetSpec
    format: str
    samples: Samples
    chosen: Tensor | None = None
    named: Ids | None = None

    def __len__(self) -> int:
        return len(self.samples) if self.chosen is None else int(self.chosen.shape[0])

    @property
    def notes(self) -> tuple[str, ...]:
        """What was noticed when the data were opened."""
        return self.samples.notes

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the file; of several files, of the list of theirs."""
        if isinstance(self.samples, PythonRows):
            return self.samples.sha256
        return sha256_of_sources(self.spec.sources)

    @property
    def code(self) -> dict[str, str]:
        """The digests of the user's code that makes the samples, by file."""
        return self.samples.code if isinstance(self.samples, PythonRows) else {}

    def rows(self, samples: str | None) -> range:
        """Return the positions that "A:B" selects, all of them for None.

        Raises:
            SpecError: It has another form.
            DatasetError: It reaches beyond the data set.
        """
        chosen = parse_samples(":" if samples is None else samples)
        stop = len(self) if chosen.stop is None else chosen.stop
        start = chosen.start or 0
        if start >= len(self) or stop > len(self):
            raise self._error(
                f"the samples {samples} are out of range: the data set holds {len(self):,} samples",
                f"Samples are counted from 0; give A:B with B at most {len(self)}.",
            )
        return range(start, stop)

    def batch(self, rows: range | slice) -> Batch:
        """Return the samples at `rows`; index (n,) says where in the data set each one is.

        Raises:
            DatasetError: A row is out of range, there is none, or a value does not fit its dtype.
        """
        chosen = range(*rows.indices(len(self))) if isinstance(rows, slice) else rows
        if not chosen or chosen.step < 1 or chosen[0] < 0 or chosen[-1] >= len(self):
            raise self._error(
                f"the rows {rows} are out of range: the data set holds {len(self):,} samples",
                f"Rows are counted upwards, from 0 to {len(self) - 1}.",
            )
        places: Sequence[int] = chosen
        if self.chosen is not None:
            places = self.chosen[chosen.start : chosen.stop : chosen.step].tolist()
        found = self.samples.read(places)
        index = torch.arange(chosen.start, chosen.stop, chosen.step)
        return Batch.of(self._inputs(found), self._targets(found), index)

    def ids(self, index: Tensor) -> Tensor | None:
        """Return the ids of the samples at some positions (n,), None where they have none.

        Returns:
            Integers (n,) int64, or UTF-8 texts (n, w) uint8 with zeros behind a text.
        """
        if self.named is None:
            return None
        return self.named(index if self.chosen is None else self.chosen[index])

    def describe(self) -> dict[str, Any]:
        """Return what a message or `--dry-run` shows of the data set."""
        inputs = self.spec.inputs
        return {
            "path": str(self.spec.path),
            "format": self.format,
            "samples": len(self),
            "inputs": inputs if isinstance(inputs, dict) else [*inputs],
            "targets": [*self.spec.targets],
            "arrays": self._arrays(),
        }

    def _arrays(self) -> dict[str, Any]:
        found = self.samples.read(range(1))
        arrays: dict[str, Any] = {}
        for name in self.spec.arrays:
            value = found.get(name)
            if isinstance(value, Tensor):
                arrays[name] = {"sample": [*value.shape[1:]], "dtype": dtype_name(value.dtype)}
                if isinstance(self.samples, FileRows):
                    column = self.samples.columns[name]
                    arrays[name] |= {
                        "stored": [*column.shape],
                        "stored_dtype": dtype_name(column.dtype),
                    }
        return arrays

    def _inputs(self, found: Mapping[str, Any]) -> Any:
        names = self.spec.inputs
        if isinstance(names, dict):
            return {keyword: self._value(found, name) for keyword, name in names.items()}
        return _one_or_all(tuple(self._value(found, name) for name in names))

    def _targets(self, found: Mapping[str, Any]) -> Any:
        values = tuple(self._value(found, name) for name in self.spec.targets)
        return _one_or_all(values) if values else None

    def _value(self, found: Mapping[str, Any], name: str) -> Any:
        """Return an array of a batch; what the user's code made is converted here."""
        if name not in found:
            raise self._error(
                f"a sample holds no {name!r}",
                suggestion(name, [*found]).replace("Supported", "It holds")
                + " [dataset] inputs and targets say what is what; targets = [] for none.",
            )
        if isinstance(self.samples, FileRows):
            return found[name]
        return map_tensors(lambda t: self._converted(name, t), found[name])

    def _converted(self, name: str, values: Tensor) -> Tensor:
        spec = self.spec
        if not values.dim() or not any(name in t for t in (spec.dtype, spec.scale, spec.reshape)):
            return values
        options = (spec.dtype.get(name), spec.scale.get(name), spec.reshape.get(name))
        dtype, scale, reshape = options
        make = converter(values.shape[1:], values.dtype, dtype=dtype, scale=scale, reshape=reshape)
        return make(values)

    def _error(self, what: str, remedy: str) -> DatasetError:
        return DatasetError(what, where=str(self.spec.path), remedy=remedy)


def open_dataset(spec: DatasetSpec) -> Dataset:
    """Open a data file, a folder or the user's own data set, and check it against the spec.

    Raises:
        InputError: It cannot be read, or it and the spec do not fit together.
    """
    if spec.factory is not None:
        return _own(spec)
    files = open_files(spec)
    n = len(files)
    ids = None if spec.id is None else _of_file(files, spec.id, n)
    return Dataset(spec, files.format, files, _chosen(spec, files, n), ids)


def _own(spec: DatasetSpec) -> Dataset:
    for key in ("files", "columns", "classes", "tokenizer", "pad", "length", "id"):
        if getattr(spec, key):
            raise DatasetError(
                f"[dataset] {key} is for data files",
                where=str(spec.path),
                remedy="Do it in the data set itself.",
            )
    rows = PythonRows(spec)
    return Dataset(spec, "python", rows, _chosen(spec, None, len(rows)))


def _of_file(files: FileRows, name: str, n: int) -> Ids:
    try:
        return ids_of(files.load(name), n)
    except DatasetError as error:
        raise error.at(f"{files.spec.path}: {name}") if error.where is None else error from None


def _chosen(spec: DatasetSpec, files: FileRows | None, n: int) -> Tensor | None:
    """Return the positions (N,) that `select` names."""
    select = spec.select
    if select is None:
        return None
    where = f"{spec.path}: select"
    if isinstance(select, str):
        stored = None if files is None else files.load(select)
        if stored is None or isinstance(stored, Texts | Ragged) or not _is_mask(stored, n):
            raise DatasetError(
                f"{select!r} is no array of {n:,} booleans",
                where=where,
                remedy="Name one with true for the samples to take, or list their positions.",
            )
        found = torch.nonzero(stored[0:n]).flatten()
    else:
        found = torch.tensor(select)
        if int(found.max()) >= n or len(set(select)) < len(select):
            raise DatasetError(
                f"a position is out of range or there twice; the data set holds {n:,} samples",
                where=where,
                remedy=f"Positions are counted from 0 to {n - 1}, each once.",
            )
    if not len(found):
        raise DatasetError(
            f"there are no samples: {select!r} is false for all",
            where=where,
            remedy="Select at least one sample.",
        )
    return found


def _is_mask(column: Column, n: int) -> bool:
    return tuple(column.shape) == (n,) and column.dtype == torch.bool


def _one_or_all(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values
