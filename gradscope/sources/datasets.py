"""A data set: columns of a data file, and batches of samples made from their rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradscope.core.batch import Batch
from gradscope.core.registry import suggestion
from gradscope.core.spec import DatasetSpec, parse_samples
from gradscope.errors import DatasetError
from gradscope.sources import dataset_formats  # noqa: F401 (it registers the readers)
from gradscope.sources.conversion import converter, dtype_name
from gradscope.sources.digests import sha256
from gradscope.sources.readers import Arrays, Column, dataset_readers, find_dataset_reader


@dataclass(frozen=True)
class Dataset:
    """The samples of a data file.

    Attributes:
        spec: Which arrays, and how they are made into tensors.
        format: The reader's name.
        columns: {name: array (N, ...)} as stored, those that are used.
        convert: {name: what makes rows (n, ...) of it into a tensor (n, ...)}.
    """

    spec: DatasetSpec
    format: str
    columns: Mapping[str, Column]
    convert: Mapping[str, Callable[[Tensor], Tensor]]

    def __len__(self) -> int:
        return int(next(iter(self.columns.values())).shape[0])

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the file."""
        return sha256(self.spec.path)

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
        index = torch.arange(chosen.start, chosen.stop, chosen.step)
        return Batch.of(self._inputs(chosen), self._targets(chosen), index)

    def describe(self) -> dict[str, Any]:
        """Return what a message or `--dry-run` shows of the data set."""
        arrays = {}
        for name, column in self.columns.items():
            row = self._tensor(name, range(1))
            arrays[name] = {
                "stored": [*column.shape],
                "stored_dtype": dtype_name(column.dtype),
                "sample": [*row.shape[1:]],
                "dtype": dtype_name(row.dtype),
            }
        inputs = self.spec.inputs
        return {
            "path": str(self.spec.path),
            "format": self.format,
            "samples": len(self),
            "inputs": inputs if isinstance(inputs, dict) else [*inputs],
            "targets": [*self.spec.targets],
            "arrays": arrays,
        }

    def _inputs(self, rows: range) -> Any:
        names = self.spec.inputs
        if isinstance(names, dict):
            return {keyword: self._tensor(name, rows) for keyword, name in names.items()}
        return _one_or_all(tuple(self._tensor(name, rows) for name in names))

    def _targets(self, rows: range) -> Any:
        tensors = tuple(self._tensor(name, rows) for name in self.spec.targets)
        return _one_or_all(tensors) if tensors else None

    def _tensor(self, name: str, rows: range) -> Tensor:
        try:
            return self.convert[name](self.columns[name][slice(rows.start, rows.stop, rows.step)])
        except DatasetError as error:
            raise error.at(f"{self.spec.path}: {name}, rows {rows.start} to {rows[-1]}") from None

    def _error(self, what: str, remedy: str) -> DatasetError:
        return DatasetError(what, where=str(self.spec.path), remedy=remedy)


def open_dataset(spec: DatasetSpec) -> Dataset:
    """Open a data file and check its arrays against what the spec says of them.

    Raises:
        DatasetError: The file cannot be read, or it and the spec do not fit together.
    """
    name = find_dataset_reader(spec.path)
    arrays = dataset_readers.get(name)(spec.path)
    _check_names(spec, arrays)
    columns = {array: arrays.load(array) for array in spec.arrays}
    _check_lengths(spec, columns)
    convert = {}
    for array, column in columns.items():
        try:
            convert[array] = converter(
                column.shape[1:],
                column.dtype,
                dtype=spec.dtype.get(array),
                scale=spec.scale.get(array),
                reshape=spec.reshape.get(array),
            )
        except DatasetError as error:
            raise error.at(f"{spec.path}: {array}") from None
    return Dataset(spec, name, columns, convert)


def _check_names(spec: DatasetSpec, arrays: Arrays) -> None:
    """Every array that is named must be in the file, also where only a dtype is given for it."""
    for name in dict.fromkeys((*spec.arrays, *spec.dtype, *spec.scale, *spec.reshape)):
        if name not in arrays.names:
            raise DatasetError(
                f"there is no array {name!r} in the file",
                where=str(spec.path),
                remedy=suggestion(name, list(arrays.names)).replace("Supported", "It holds")
                + " A dataset.toml says which are inputs and targets.",
            )


def _check_lengths(spec: DatasetSpec, columns: Mapping[str, Column]) -> None:
    for name, column in columns.items():
        if not column.shape:
            raise DatasetError(
                "this array has no axes, so no samples",
                where=f"{spec.path}: {name}",
                remedy="Its first axis must be the sample axis.",
            )
    lengths = {name: int(column.shape[0]) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DatasetError(
            "the arrays have different numbers of samples: "
            + ", ".join(f"{name} {length:,}" for name, length in lengths.items()),
            where=str(spec.path),
            remedy="The first axis of each must be the sample axis.",
        )
    if 0 in lengths.values():
        raise DatasetError(
            f"there are no samples: the arrays {', '.join(lengths)} are empty",
            where=str(spec.path),
            remedy="Give at least one sample.",
        )


def _one_or_all(tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return tensors[0] if len(tensors) == 1 else tensors
