"""Data sets: samples from data files or from user code, and their batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradscope.config import DatasetSpec, is_script, parse_samples
from gradscope.core import batch as batches
from gradscope.core.batch import Batch, Whole, WholeInputs
from gradscope.core.groups import GroupIds, Reduction
from gradscope.core.precision import dtype_name
from gradscope.core.registry import suggestion
from gradscope.core.texts import count, listed
from gradscope.errors import DatasetError, located
from gradscope.sources.data.columns import NumberColumn, as_index
from gradscope.sources.data.files import FileSamples, open_files
from gradscope.sources.data.python import PythonSamples
from gradscope.sources.data.recipes import groups_of, ids_of, words

__all__ = ["Dataset", "open_dataset", "words"]

_AT_A_TIME = 256  # samples to read at a time for their ids
_HELD = 2**28  # the most bytes of arrays in memory if samples are read in another order


@dataclass(frozen=True)
class Dataset:
    """All samples of a source, or a selection."""

    spec: DatasetSpec  # the arrays, and their conversion to tensors
    samples: FileSamples | PythonSamples  # the source
    chosen: Tensor | None = None  # (N,), the positions of the selected samples; all if None
    # (positions in the source) -> ids, if the samples have ids
    named: Callable[[Tensor], Tensor] | None = None
    as_mapping: bool = False  # whether a model's only argument is the mapping of inputs

    def __len__(self) -> int:
        return len(self.samples) if self.chosen is None else int(self.chosen.shape[0])

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes from opening the data."""
        what = f"the model takes the inputs as one mapping: {listed(self.keywords)}"
        return (*self.samples.notes, *([what] if self.as_mapping else []))

    @property
    def keywords(self) -> Sequence[str]:
        """The keywords of the inputs, () if they are positional."""
        inputs = self.spec.inputs
        if isinstance(inputs, dict):
            return [*inputs]
        tables = self.samples.tables if isinstance(self.samples, PythonSamples) else {}
        return tables.get(inputs[0], ()) if len(inputs) == 1 else ()

    @property
    def unused(self) -> str:
        """A sentence on the arrays that no option of the spec uses, "" if all are used."""
        names = self.samples.unused
        what = f"{self.spec.path}: the array {listed(names)} is not used"
        if len(names) > 1:
            what = f"{self.spec.path}: the arrays {listed(names)} are not used"
        return f"{what}; [dataset] inputs and targets select arrays" if names else ""

    @property
    def sha256(self) -> str:
        """The SHA-256 of the file, or of the list of digests for several files."""
        return self.samples.sha256

    @property
    def code(self) -> dict[str, str]:
        """{file: digest} of the user's code that makes the samples."""
        return self.samples.code

    def headings(self, name: str) -> list[str]:
        """Return the names of an array's columns in the file, or [] without a file."""
        return self.samples.headings(name) if isinstance(self.samples, FileSamples) else []

    def rows(self, samples: str | None) -> range:
        """Return the positions that "A:B" selects, or all positions for None.

        Raises:
            SpecError: The text has a different form.
            DatasetError: The range exceeds the data set.
        """
        chosen = parse_samples(":" if samples is None else samples)
        stop = len(self) if chosen.stop is None else chosen.stop
        start = chosen.start or 0
        if start >= len(self) or stop > len(self):
            raise self._error(
                f"the samples {samples} are out of range: the data set has "
                f"{count(len(self), 'sample')}",
                f"Give A:B with B at most {len(self)}. Samples are counted from 0.",
            )
        return range(start, stop)

    def batch(self, rows: Sequence[int] | slice) -> Batch:
        """Return the samples at `rows`; index (n,) has each sample's position in the data set.

        Raises:
            DatasetError: A row is out of range, `rows` is empty, or a value does not fit its dtype.
        """
        chosen = range(*rows.indices(len(self))) if isinstance(rows, slice) else rows
        ends = chosen if not isinstance(chosen, range) else (*chosen[:1], *chosen[-1:])
        if not chosen or min(ends) < 0 or max(ends) >= len(self):
            raise self._error(
                f"the rows {rows} are out of range: the data set has {count(len(self), 'sample')}",
                f"Give rows from 0 to {len(self) - 1}.",
            )
        index = as_index(chosen)
        positions = chosen if self.chosen is None else self.chosen[index].tolist()
        found = self.samples.read(positions)
        spec = self.spec

        def array(name: str) -> Any:
            if name not in found:
                raise self._error(
                    f"a sample has no {name!r}",
                    suggestion(name, [*found]).replace("Supported", "It has")
                    + " Name the arrays in [dataset] inputs and targets; without targets, write "
                    "targets = [].",
                )
            return found[name]

        def arrays(names: Sequence[str] | dict[str, str], whole: Mapping[str, Whole]) -> Any:
            def value(name: str) -> Any:
                return whole[name] if name in whole else array(name)

            if isinstance(names, dict):
                return {keyword: value(name) for keyword, name in names.items()}
            values = tuple(map(value, names))
            return values if len(values) > 1 else next(iter(values), None)

        inputs = arrays(spec.inputs, self.whole)
        inputs = (inputs,) if self.as_mapping else inputs
        if {*spec.input_arrays} <= {*spec.whole}:
            inputs = WholeInputs(inputs, as_index(positions), len(self.samples))
        alone = len(positions) == 1 and isinstance(self.samples, PythonSamples)
        if alone and any(t.dim() and t.shape[0] != 1 for t in batches.tensors(inputs)):
            inputs = WholeInputs(_undivided(inputs), torch.zeros(1, dtype=torch.int64), 1)
        return Batch.of(inputs, arrays(spec.targets, {}), index)

    @property
    def alone(self) -> bool:
        """Whether a batch cannot hold two samples, because they have no common axis."""
        return isinstance(self.samples, PythonSamples) and self.samples.alone

    @cached_property
    def whole(self) -> dict[str, Whole]:
        """{name: input} of the inputs that all samples share."""
        return {name: Whole(value) for name, value in self.samples.whole.items()}

    def ids(self, index: Tensor) -> Tensor | None:
        """Return the ids of the samples at some positions (n,), or None without ids.

        Returns:
            Integers (n,) int64, or UTF-8 texts (n, w) uint8, padded with zeros.
        """
        if self.named is None:
            return None
        return self.named(index if self.chosen is None else self.chosen[index])

    def groups(self, reduction: Reduction) -> GroupIds | None:
        """Return the groups of all samples, or None without a column of ids.

        Raises:
            DatasetError: An id is neither an integer nor a text.
        """
        name = self.spec.group
        if name is None:
            return None
        with located(f"{self.spec.path}: {name}"):
            if isinstance(self.samples, FileSamples):
                found = groups_of(self.samples.load(name), reduction)
            else:
                found = GroupIds.of(self._column(name), reduction)
            if len(found.codes) != len(self.samples):
                raise DatasetError(
                    f"there are {count(len(found.codes), 'id')} for "
                    f"{count(len(self.samples), 'sample')}",
                    remedy="Give an id for each sample.",
                )
        return found if self.chosen is None else replace(found, codes=found.codes[self.chosen])

    @property
    def in_any_order(self) -> "Dataset":
        """The same samples, to read in any order; small data are in memory."""
        if not isinstance(self.samples, FileSamples):
            return self
        return replace(self, samples=self.samples.in_memory(_HELD))

    def _column(self, name: str) -> Tensor:
        """Return an array of all samples (N, ...); every sample is read."""
        parts = []
        for start in range(0, len(self.samples), _AT_A_TIME):
            found = self.samples.read(range(start, min(start + _AT_A_TIME, len(self.samples))))
            if not isinstance(found.get(name), Tensor):
                raise self._error(f"a sample has no number {name!r}", f"It has {listed([*found])}.")
            parts.append(found[name])
        return torch.cat(parts)

    def describe(self) -> dict[str, Any]:
        """Return the facts on the data set for messages and `--dry-run`."""
        inputs = self.spec.inputs
        found = {} if is_script(str(self.spec.path)) else self.samples.read(range(1))
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


def _undivided(inputs: Any) -> Any:
    """Return inputs of a model, of which each tensor belongs to the only sample."""
    if isinstance(inputs, dict):
        return {key: _undivided((value,))[0] for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(Whole(value) if batches.tensors(value) else value for value in inputs)
    return Whole(inputs)


def open_dataset(
    spec: DatasetSpec, taken: int | None = None, samples: str | None = None
) -> Dataset:
    """Open a data file, a folder or a user's data set, and check it against the spec.

    Args:
        spec: The options of the data set.
        taken: The most inputs that the model takes by position. Further entries of a user's sample
            are targets.
        samples: The selected samples, "A:B". An iterable without a length has B samples.

    Raises:
        InputError: The data cannot be read, or do not fit the spec.
    """
    _check_whole(spec)
    if spec.factory is not None:
        most = None if samples is None else parse_samples(samples).stop
        own = PythonSamples(spec, taken, most)
        return Dataset(own.spec, own, _chosen(own.spec, None, len(own)))
    files = open_files(spec)
    ids = None
    if spec.id is not None:
        with located(f"{spec.path}: {spec.id}"):
            ids = ids_of(files.load(spec.id), len(files))
    return Dataset(spec, files, _chosen(spec, files, len(files)), ids)


def _check_whole(spec: DatasetSpec) -> None:
    """Raise if `whole` names an array that is not an input, or if no array counts the samples."""
    wrong = [name for name in spec.whole if name not in spec.input_arrays]
    if wrong:
        raise DatasetError(
            f"{wrong[0]!r} is not an input",
            where=f"{spec.path}: whole",
            remedy=f"List only inputs: {listed(spec.input_arrays)}.",
        )
    if not spec.divided:
        raise DatasetError(
            "all inputs are whole and there are no targets, so the number of samples is unknown",
            where=f"{spec.path}: whole",
            remedy='Give targets with a row for each sample, such as targets = ["labels"]. Or give '
            "the positions of the samples as an input that is not whole.",
        )


def _chosen(spec: DatasetSpec, files: FileSamples | None, n: int) -> Tensor | None:
    """Return the positions (N,) that `select` selects, or None for all."""
    select = spec.select
    if select is None:
        return None
    what, found = "", torch.empty(0, dtype=torch.int64)
    if not isinstance(select, str):
        found = torch.tensor(select)
        if int(found.max()) >= n or len(set(select)) < len(select):
            held = count(n, "sample")
            what = f"a position is out of range or repeated; the data set has {held}"
    else:
        stored = None if files is None else files.load(select)
        what = f"{select!r} is neither an array of {n:,} booleans nor one of different positions"
        numbers = stored if isinstance(stored, Tensor | NumberColumn) else torch.empty(0)
        if tuple(numbers.shape) == (n,) and numbers.dtype == torch.bool:
            found = torch.nonzero(numbers[0:n]).flatten()
            what = "" if len(found) else f"no sample is selected: {select!r} is false for all"
        elif len(numbers.shape) == 1 and not numbers.dtype.is_floating_point:
            found = numbers[0 : numbers.shape[0]].long()
            inside = ((found >= 0) & (found < n)).all() and len(found)
            what = "" if inside and len(torch.unique(found)) == len(found) else what
    if what:
        remedy = "Name an array with one boolean a sample, or list different positions from 0."
        raise DatasetError(what, where=f"{spec.path}: select", remedy=remedy)
    return found
