"""A data set: samples of data files or of the user's own code, and batches made from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradscope.config import DatasetSpec, parse_samples
from gradscope.core.batch import Batch, Whole, WholeInputs
from gradscope.core.precision import dtype_name
from gradscope.core.registry import suggestion
from gradscope.core.texts import count, listed
from gradscope.errors import DatasetError, located
from gradscope.sources.data.columns import NumberColumn
from gradscope.sources.data.files import FileSamples, open_files
from gradscope.sources.data.python import PythonSamples
from gradscope.sources.data.recipes import ids_of, words

__all__ = ["Dataset", "open_dataset", "words"]


@dataclass(frozen=True)
class Dataset:
    """Samples, all of those there are or some."""

    spec: DatasetSpec  # which arrays, and how they are made into tensors
    samples: FileSamples | PythonSamples  # where they come from
    chosen: Tensor | None = None  # (N,), the positions of those that were selected, None for all
    # returns the ids of samples of all that there are, None where they have none
    named: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.samples) if self.chosen is None else int(self.chosen.shape[0])

    @property
    def notes(self) -> tuple[str, ...]:
        """What was noticed when the data were opened."""
        return self.samples.notes

    @property
    def unused(self) -> str:
        """A sentence on the arrays that no option of the spec uses, "" if all are used."""
        names = self.samples.unused
        what = f"{self.spec.path}: the array {listed(names)} is used nowhere"
        if len(names) > 1:
            what = f"{self.spec.path}: the arrays {listed(names)} are used nowhere"
        return f"{what}; [dataset] inputs and targets say what is used" if names else ""

    @property
    def sha256(self) -> str:
        """The SHA-256 of the file; of several files, of the list of theirs."""
        return self.samples.sha256

    @property
    def code(self) -> dict[str, str]:
        """The digests of the user's code that makes the samples, by file."""
        return self.samples.code

    def headings(self, name: str) -> list[str]:
        """Return what the columns of an array are called in the file; empty where it is none."""
        return self.samples.headings(name) if isinstance(self.samples, FileSamples) else []

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
                f"the samples {samples} are out of range: the data set holds "
                f"{count(len(self), 'sample')}",
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
                f"the rows {rows} are out of range: the data set holds "
                f"{count(len(self), 'sample')}",
                f"Rows are counted upwards, from 0 to {len(self) - 1}.",
            )
        positions: Sequence[int] = chosen
        if self.chosen is not None:
            positions = self.chosen[chosen.start : chosen.stop : chosen.step].tolist()
        found = self.samples.read(positions)
        spec = self.spec

        def array(name: str) -> Any:
            if name not in found:
                raise self._error(
                    f"a sample holds no {name!r}",
                    suggestion(name, [*found]).replace("Supported", "It holds")
                    + " [dataset] inputs and targets say what is what; targets = [] for none.",
                )
            return found[name]

        def arrays(names: Sequence[str] | dict[str, str], whole: Mapping[str, Whole]) -> Any:
            def value(name: str) -> Any:
                return whole[name] if name in whole else array(name)

            if isinstance(names, dict):
                return {keyword: value(name) for keyword, name in names.items()}
            values = tuple(map(value, names))
            return values if len(values) > 1 else next(iter(values), None)

        index = torch.arange(chosen.start, chosen.stop, chosen.step)
        inputs = arrays(spec.inputs, self.whole)
        if {*spec.input_arrays} <= {*spec.whole}:
            inputs = WholeInputs(inputs, torch.tensor(positions), len(self.samples))
        return Batch.of(inputs, arrays(spec.targets, {}), index)

    @cached_property
    def whole(self) -> dict[str, Whole]:
        """The inputs that every sample has whole, by name."""
        return {name: Whole(value) for name, value in self.samples.whole.items()}

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
        found = self.samples.read(range(1))
        arrays = {
            name: {"sample": [*value.shape[1:]], "dtype": dtype_name(value.dtype)}
            | self.samples.stored(name)
            for name in self.spec.arrays
            if isinstance(value := found.get(name), Tensor)
        } | {
            name: {"whole": [*value.shape], "dtype": dtype_name(value.dtype)}
            for name, held in self.whole.items()
            if isinstance(value := held.value, Tensor)
        }
        return {
            "path": str(self.spec.path),
            "format": self.samples.format,
            "samples": len(self),
            "inputs": inputs if isinstance(inputs, dict) else [*inputs],
            "targets": [*self.spec.targets],
            "arrays": arrays,
        }

    def _error(self, what: str, remedy: str) -> DatasetError:
        return DatasetError(what, where=str(self.spec.path), remedy=remedy)


def open_dataset(spec: DatasetSpec) -> Dataset:
    """Open a data file, a folder or the user's own data set, and check it against the spec.

    Raises:
        InputError: It cannot be read, or it and the spec do not fit together.
    """
    _check_whole(spec)
    if spec.factory is not None:
        own = PythonSamples(spec)
        return Dataset(spec, own, _chosen(spec, None, len(own)))
    files = open_files(spec)
    ids = None
    if spec.id is not None:
        with located(f"{spec.path}: {spec.id}"):
            ids = ids_of(files.load(spec.id), len(files))
    return Dataset(spec, files, _chosen(spec, files, len(files)), ids)


def _check_whole(spec: DatasetSpec) -> None:
    """Refuse `whole` where it names no input, or where no array says how many samples there are."""
    wrong = [name for name in spec.whole if name not in spec.input_arrays]
    if wrong:
        raise DatasetError(
            f"{wrong[0]!r} is not an input, and only inputs can be whole",
            where=f"{spec.path}: whole",
            remedy=f"Inputs are {listed(spec.input_arrays)}.",
        )
    if not spec.divided:
        raise DatasetError(
            "all inputs are whole and there are no targets, so the number of samples is unknown",
            where=f"{spec.path}: whole",
            remedy='Give targets with a row for each sample, targets = ["labels"]; or the '
            "positions of the samples as an input that is not whole.",
        )


def _chosen(spec: DatasetSpec, files: FileSamples | None, n: int) -> Tensor | None:
    """Return the positions (N,) that `select` names."""
    select = spec.select
    if select is None:
        return None
    what, found = "", torch.empty(0, dtype=torch.int64)
    if not isinstance(select, str):
        found = torch.tensor(select)
        if int(found.max()) >= n or len(set(select)) < len(select):
            held = count(n, "sample")
            what = f"a position is out of range or there twice; the data set holds {held}"
    else:
        stored = None if files is None else files.load(select)
        what = f"{select!r} is no array of {n:,} booleans"
        numbers = stored if isinstance(stored, Tensor | NumberColumn) else torch.empty(0)
        if tuple(numbers.shape) == (n,) and numbers.dtype == torch.bool:
            found = torch.nonzero(numbers[0:n]).flatten()
            what = "" if len(found) else f"there are no samples: {select!r} is false for all"
    if what:
        remedy = "Name an array of booleans, one a sample, or list positions from 0, each once."
        raise DatasetError(what, where=f"{spec.path}: select", remedy=remedy)
    return found
