"""Data sets from user code: FILE.py:NAME is or returns a torch Dataset with a length.

A sample is (inputs, targets), a mapping from array names, only the inputs, or a longer tuple.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from gradscope.config import DatasetSpec
from gradscope.core.batch import map_tensors, strided, tensors
from gradscope.core.texts import article, listed
from gradscope.errors import DatasetError, ModelError, located
from gradscope.model.locate import first_line
from gradscope.model.randomness import seeded
from gradscope.sources.code import (
    as_config,
    code_digests,
    import_notes,
    load_value,
    loading,
    user_file,
)
from gradscope.sources.data.columns import as_index
from gradscope.sources.data.recipes import converter

Collate = Callable[[Any], Any]  # takes a list of samples

_END = object()
_PADDED = 16  # number of samples to collate for the note on padding
_PADS = (
    "the collate function pads samples to the longest sample of their batch. If the model does not "
    "mask the padding, a gradient depends on the other samples of its batch; batch_size = 1 avoids "
    "this"
)
_ALONE = (
    "samples have no common axis, as graphs of different sizes: each batch has one sample, and the "
    "model takes what the collate function makes of it"
)
_COLUMNS = "each of the arrays has one entry a sample: (inputs, targets)"
_RANDOM = (
    "samples are random, as with augmentation: each sample is one draw, seeded with its position"
)
_LABELS = {"label", "labels", "target", "targets"}
INDICES = {"id", "ids", "idx", "index", "indices"}  # names of arrays with numbers of samples
_FILES_ONLY = ("files", "columns", "classes", "tokenizer", "pad", "length", "id")


class PythonSamples:
    """The samples of a data set that the spec's `factory` makes.

    If a sample is a tuple with more than `taken` entries, its first `taken` entries are the inputs,
    and the rest are the targets.

    `most` is the end of the selected samples, if known: an iterable without a length needs no more.

    `code` is {file: digest} of the user's code. `sha256` is the digest of the code, the arguments,
    the length and the first sample.
    """

    format = "python"

    def __init__(
        self, spec: DatasetSpec, taken: int | None = None, most: int | None = None
    ) -> None:
        factory = spec.factory
        assert factory is not None
        for key in _FILES_ONLY:
            if getattr(spec, key):
                raise DatasetError(
                    f"[dataset] {key} applies to data files only",
                    where=str(spec.path),
                    remedy=f"Remove {key}, and do this step in the code of the data set.",
                )
        self._spec, self._where, self._taken = spec, f"data set {spec.factory}", taken
        made = load_value(factory, "data set", lambda v: callable(v) or _is_data(v))
        if "," in factory.rpartition(":")[2]:
            with located(self._where):
                made = _from_columns(made, factory.rpartition(":")[2].split(","))
        if not _is_data(made):
            _require_arguments(made, spec, self._where)
            with user_file(self._where), loading(factory, "data set"):
                made = made(**{key: as_config(value) for key, value in spec.kwargs.items()})
        elif spec.kwargs:
            kind = article(type(made).__name__)
            what = f"[dataset.kwargs] applies to a function, but this is {kind}"
            raise DatasetError(what, where=self._where, remedy="Remove [dataset.kwargs].")
        if _is_data_module(made):
            with user_file(self._where), loading(factory, "data set"):
                made.setup("fit")
                made = made.train_dataloader()
        with located(self._where):
            self._data, self._collate, self.notes = _parts(made)
            self._iterable = isinstance(self._data, IterableDataset)
            self._iterable |= not hasattr(self._data, "__getitem__")
            self._n = self._length(most)
        if _is_sliced(self._data) and self._collate is default_collate:
            self._data, self._collate = _Sliced(self._data.tensors), _joined
        self._iterator: tuple[int, Iterator[Any]] | None = None
        self._seen: dict[range | str, str] = {}  # {rows, or their digest: digest of the samples}
        self._random = False
        with nullcontext() if self._iterable else seeded(0):
            first = self._batch(self._samples(range(1)))
        self._first = _digest(first)
        self.tables = {name: [*value] for name, value in first.items() if isinstance(value, dict)}
        if not self._iterable:
            with seeded(1):
                self._random = _digest(self._batch(self._samples(range(1)))) != self._first
        self.notes += (_RANDOM,) * self._random
        if self._collate is not default_collate and not _is_alone(first):
            several = self._batch(self._samples(range(min(self._n, _PADDED))))
            pairs = [(a, b) for a, b in _pairs(first, several) if a.dim() == b.dim() > 0]
            if any(a.shape[1:] != b.shape[1:] for a, b in pairs):
                self.notes += (_PADS,)
        known = {*spec.model_fields_set, *first}
        named = {} if "inputs" in known else _selected([k for k in first if k != spec.group])
        if selected := {k: v for k, v in named.items() if k not in spec.model_fields_set}:
            spec = spec.model_copy(update=selected)
            used = f"inputs {listed([*selected['inputs']])}; targets {listed(spec.targets)}"
            self.notes += (f"the entries of a sample are used by their names: {used}",)
        if "targets" not in {*known, *selected}:
            spec = spec.model_copy(update={"targets": ()})
        self.notes += import_notes(factory, "data set")
        self.spec = self._spec = spec
        # whether a batch cannot hold two samples: the model takes what one sample is collated to
        self.alone = _is_alone({name: first.get(name) for name in spec.input_arrays})
        if self.alone:
            self.notes += (_ALONE,)
        self.unused = [name for name in first if name not in (*spec.arrays, spec.group)]
        self.code = code_digests(factory, "data set")
        facts = [self.code, spec.kwargs, self._n, self._first]
        self.sha256 = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()

    def __len__(self) -> int:
        return self._n

    @property
    def whole(self) -> dict[str, Any]:
        """The inputs that all samples share, which are attributes of the data set."""
        names = self._spec.whole
        missing = [name for name in names if not hasattr(self._data, name)]
        if missing:
            raise DatasetError(
                f"{missing[0]!r} is listed in whole, but the data set has no such attribute",
                where=self._where,
                remedy=f"Set it in the data set, self.{missing[0]} = ..., and leave it out of "
                "samples.",
            )
        return {name: getattr(self._data, name) for name in names}

    def stored(self, name: str) -> dict[str, Any]:
        """Always empty: nothing is stored."""
        return {}

    def read(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return collated and converted samples, {name: ...}; raise if they differ when reread."""
        samples = self._samples(rows)
        found = self._batch(samples)
        if rows[0] == 0 and _digest(self._batch(samples[:1])) != self._first:
            raise self._other("sample 0 is")
        key = rows if isinstance(rows, range) else _digest({"rows": as_index(rows)})
        digest = _digest(found)
        if self._seen.setdefault(key, digest) != digest:
            raise self._other(f"samples {rows[0]} to {rows[-1]} are")
        used = {name: found[name] for name in self._spec.arrays if name in found}
        for k in {0, len(rows) - 1}:
            if len(rows) > 1 and not _alike(self._batch(samples[k : k + 1]), used, k):
                raise DatasetError(
                    f"sample {rows[k]} is collated to different numbers alone than in a batch of "
                    f"{len(rows)}",
                    where=self._where,
                    remedy="Do not mix samples in the collate function, and scale every batch by "
                    "the same numbers.",
                )
        spec = self._spec
        changed = {*spec.dtype, *spec.scale, *spec.reshape} & {*spec.arrays}
        for name in filter(changed.__contains__, found):

            def convert(t: Tensor, name: str = name) -> Tensor:
                return converter(spec, name, t.shape[1:], t.dtype)(t) if t.dim() else t

            with located(f"{self._where}: {name}"):
                found[name] = map_tensors(convert, found[name])
        return found

    def _batch(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return samples as a batch, {name: ...}."""
        try:
            with user_file(self._where):
                batch = self._collate(samples)
        except ModelError as error:
            if self._collate is not default_collate or "equal size" not in error.what:
                raise
            raise DatasetError(
                f"its samples have different shapes: {first_line(error.__cause__ or error)}",
                where=self._where,
                remedy="For batches of one sample, write batch_size = 1 under [compute]. For "
                "larger batches, pad the samples, or return (dataset, collate_fn) with a "
                "collate_fn that pads.",
            ) from error
        with located(self._where):
            return _named(batch, len(samples), self._taken)

    def _other(self, what: str) -> DatasetError:
        return DatasetError(
            f"{what} different when read again",
            where=self._where,
            remedy="Make each sample depend on its position only: do not shuffle, and draw random "
            "numbers from the global generators of Python, NumPy or torch, which are seeded with "
            "the position.",
        )

    def _samples(self, rows: Sequence[int]) -> Sequence[Any]:
        if self._iterable:
            return self._iterated(rows)
        if isinstance(self._data, _Sliced):
            return self._data.at(rows)
        found = []
        with user_file(self._where):
            for row in rows:
                with seeded(row) if self._random else nullcontext():
                    found.append(self._data[row])
        return found

    def _iterated(self, rows: Sequence[int]) -> list[Any]:
        """Return samples of an iterable data set; samples between them are skipped."""
        found: list[Any] = []
        (at, iterator), self._iterator = self._iterator or (0, None), None
        with user_file(self._where):
            for row in rows:
                if iterator is None or at > row:
                    at, iterator = 0, iter(self._data)
                sample: Any = _END
                while at <= row and (sample := next(iterator, _END)) is not _END:
                    at += 1
                if sample is _END:
                    break
                found.append(sample)
        if iterator is None or len(found) < len(rows):
            raise DatasetError(
                f"it ended after {at:,} samples, but {self._n:,} are expected",
                where=self._where,
                remedy="Correct its __len__, or select fewer `samples`.",
            )
        self._iterator = (at, iterator)
        return found

    def _length(self, most: int | None) -> int:
        with user_file(self._where):
            sized = getattr(type(self._data), "__len__", None) is not None
            if not sized and self._iterable and most is not None:
                sized, n = True, most
            else:
                n = len(self._data) if sized else 0
            once = self._iterable and n > 0 and iter(self._data) is self._data
        if not sized:
            what = "it has no __len__, so the number of samples is unknown"
            remedy = "Define __len__, or return a map-style Dataset."
            if self._iterable:
                remedy += " Or select `samples` with an end, such as :1000."
            raise DatasetError(what, remedy=remedy)
        if n == 0:
            raise DatasetError("there are no samples", remedy="Give at least one sample.")
        if once:
            remedy = "Let __iter__ return a new iterator each time, or define __getitem__."
            raise DatasetError("it can be iterated only once", remedy=remedy)
        return n


class _Sliced(Sequence[Any]):
    """The samples of a `TensorDataset`, read in slices instead of one by one.

    Args:
        tensors: One for each entry of a sample, with the samples along the first axis.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: Any) -> Any:
        found = [t[rows] for t in self.tensors]
        return _Sliced(found) if isinstance(rows, slice) else tuple(found)

    def at(self, rows: Sequence[int]) -> "_Sliced":
        """Return the samples at these positions."""
        index = as_index(rows)
        return _Sliced([t[index.to(t.device)] for t in self.tensors])


def _joined(samples: _Sliced) -> list[Tensor]:
    """Return what `default_collate` makes of the same samples."""
    return [t.clone(memory_format=torch.contiguous_format) for t in samples.tensors]


def _is_sliced(data: Any) -> bool:
    """Whether samples can be read in slices: a plain `TensorDataset` of plain tensors."""
    if type(data) is not TensorDataset or not data.tensors:
        return False
    return all(type(t) is Tensor and t.layout == torch.strided for t in data.tensors)


def _is_data_module(found: Any) -> bool:
    """Whether an object is a LightningDataModule, which is not a class."""
    parts = hasattr(found, "train_dataloader") and hasattr(found, "setup")
    return parts and not isinstance(found, type)


def _is_data(found: Any) -> bool:
    """Whether an object of a script is a data set, not a function that returns a data set."""
    if isinstance(found, DataLoader | Dataset) or _is_data_module(found):
        return True
    plain = not callable(found) and not isinstance(found, str | bytes | Mapping)
    return plain and hasattr(found, "__getitem__")


def _parts(made: Any) -> tuple[Any, Collate, tuple[str, ...]]:
    """Split the result of a factory into samples, collate function and notes."""
    if _are_columns(made):
        return TensorDataset(*map(torch.as_tensor, made)), default_collate, (_COLUMNS,)
    if isinstance(made, tuple | list) and any(isinstance(v, DataLoader | Dataset) for v in made):
        kind = DataLoader if any(isinstance(v, DataLoader) for v in made) else Dataset
        first = next(k for k, value in enumerate(made) if isinstance(value, kind))
        if not (len(made) == 2 and first == 0 and callable(made[1])):
            data, collate, notes = _parts(made[first])
            which = f"number {first} of the {len(made)} values that the function returns is used"
            return data, collate, (which, *notes)
    if isinstance(made, DataLoader):
        note = "only dataset and collate_fn of the DataLoader are used, in the data set's order"
        return made.dataset, made.collate_fn or default_collate, (note,)
    if isinstance(made, tuple) and len(made) == 2 and callable(made[1]):
        return made[0], made[1], ()
    if not hasattr(made, "__getitem__") and not hasattr(made, "__iter__"):
        remedy = "Return a torch.utils.data.Dataset, (dataset, collate_fn), or a DataLoader."
        raise DatasetError(f"the function returned {type(made).__name__}", remedy=remedy)
    own = getattr(made, "collate_fn", None)
    return made, own if callable(own) else default_collate, ()


def _is_array(value: Any) -> bool:
    """Whether a value is a tensor, or a numpy array of numbers."""
    of_numpy = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return isinstance(value, Tensor) or of_numpy


def _are_columns(made: Any) -> bool:
    """Whether a pair or a longer tuple has arrays of all samples: (inputs, targets)."""
    if not isinstance(made, tuple | list) or not all(map(_is_array, made)):
        return False
    if any(isinstance(v, Tensor) and v.layout != torch.strided for v in made):
        return False  # parts of a graph
    shapes = [tuple(value.shape) for value in made]
    lengths = {shape[:1] for shape in shapes}
    several = isinstance(made, tuple) or len(made) == 2 or len(set(shapes)) > 1
    return len(made) > 1 and several and len(lengths) == 1 and lengths != {()}


def _from_columns(made: Sequence[Any], names: Sequence[str]) -> Any:
    """Return the data set of several variables that have one entry a sample each.

    Arrays stay arrays. Lists of entries with different shapes are samples with such entries.

    Raises:
        DatasetError: The variables are not arrays or lists of one length.
    """
    if _are_columns(made):
        return made
    with suppress(TypeError, ValueError, RuntimeError):
        columns = [[torch.as_tensor(entry) for entry in column] for column in made]
        if len({len(column) for column in columns}) == 1 and columns[0]:
            return [*zip(*columns, strict=True)]

    def told(value: Any) -> str:
        shape = getattr(value, "shape", None)
        if shape is not None:
            return f"{tuple(shape)}"
        return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else "?"

    kinds = (f"{name} {told(value)}" for name, value in zip(names, made, strict=True))
    raise DatasetError(
        f"these variables do not have one entry a sample each: {listed(kinds)}",
        remedy="Name arrays, tensors or lists of numbers with one length. Or name a data set.",
    )


def _selected(names: Sequence[str]) -> dict[str, Any]:
    """Return the inputs and targets of samples with an entry named as labels, {} without one.

    Several inputs are passed to the model by keyword.
    """
    targets = tuple(name for name in names if name.lower() in _LABELS)
    inputs = [name for name in names if name.lower() not in _LABELS | INDICES]
    if len(targets) != 1 or not inputs:
        return {}
    of = tuple(inputs) if len(inputs) == 1 else {name: name for name in inputs}
    return {"inputs": of, "targets": targets}


def _require_arguments(function: Callable[..., Any], spec: DatasetSpec, where: str) -> None:
    """Raise if a function or class cannot be called with the arguments of [dataset.kwargs]."""
    with suppress(TypeError, ValueError):  # a builtin without a signature: the call checks it
        signature = inspect.signature(function)
        try:
            signature.bind(**spec.kwargs)
        except TypeError as error:
            taken = ", ".join(map(str, signature.parameters.values())) or "none"
            file, _, name = str(spec.factory).rpartition(":")
            free = "samples" if Path("data.py").exists() or Path("data").exists() else "data"
            what = f"its arguments do not fit: {error}"
            remedy = (
                f"It takes: {taken}. Write these values in the run file, under [dataset.kwargs]. "
                f"Or write a function without arguments, in a file {free}.py in this folder:\n"
                f"    from {_module_of(Path(file))} import {name}\n"
                f"    def data():\n        return {name}(...)\n"
                f"Then give {free}.py:data as the data set."
            )
            raise DatasetError(what, where=where, remedy=remedy) from error


def _module_of(file: Path) -> str:
    """Return the dotted name of a file below the working directory, or the name of the file."""
    place, here = file.absolute().with_suffix(""), Path.cwd()
    return ".".join(place.relative_to(here).parts) if place.is_relative_to(here) else place.name


def _is_entry(kind: type) -> bool:
    """Whether objects of a type may be in a collated batch."""
    plain = (Tensor, bool, int, float, complex, str, bytes, NoneType, Mapping, tuple, list)
    return issubclass(kind, plain) or hasattr(kind, "__array__")


def _is_alone(batch: dict[str, Any]) -> bool:
    """Whether the collated batch of one sample has a tensor without a sample axis."""
    return any(t.dim() and t.shape[0] != 1 for t in tensors(batch))


def _is_text(value: Any) -> bool:
    """Whether a collated value is a text, or a list of texts."""
    several = isinstance(value, tuple | list) and len(value) > 0
    return isinstance(value, str | bytes) or (several and all(map(_is_text, value)))


def _named(batch: Any, n: int, taken: int | None) -> dict[str, Any]:
    """Return {name: value} from the collated batch of n samples; texts are left out."""
    if isinstance(batch, tuple | list) and len(batch) > 2:  # of (x, text) the text is the target
        batch = (*batch[:1], *(value for value in batch[1:] if not _is_text(value)))
    parts = {"inputs": batch}
    if isinstance(batch, Mapping):
        parts = {str(name): value for name, value in batch.items()}
    elif isinstance(batch, tuple | list) and len(batch) in (1, 2):
        parts = dict(zip(("inputs", "targets"), batch, strict=False))
    elif isinstance(batch, tuple | list) and taken and taken < len(batch):
        for name, part in (("inputs", batch[:taken]), ("targets", batch[taken:])):
            parts[name] = part if len(part) > 1 else part[0]
    kept = {"inputs", *_LABELS}  # a text in one of these is an error
    parts = {k: v for k, v in parts.items() if k.lower() in kept or not _is_text(v)} or parts
    for name, value in parts.items():
        kinds = {type(v) for v in value} if isinstance(value, tuple | list) else set()
        if kinds and len(value) == n and not any(map(_is_entry, kinds)):
            kind = listed(sorted(each.__name__ for each in kinds))
            what = f"{n} samples were collated to {name} that are a list of {kind}, not tensors"
            remedy = (
                "gradscope selects samples along the first axis of tensors. Return tensors from "
                "the collate function, padded to one size, and make the objects in the model."
            )
            raise DatasetError(what, remedy=remedy)
    found = {name: _tree(value) for name, value in parts.items()}
    for name, value in found.items():
        for tensor in tensors(value):
            if tensor.dim() and tensor.shape[0] != n > 1:
                what = f"{n} samples were collated to {name} of shape {tuple(tensor.shape)}"
                remedy = "Put the sample axis first in the collate function. Or write "
                remedy += "batch_size = 1 under [compute]."
                raise DatasetError(what, remedy=remedy)
    return found


def _tree(value: Any) -> Any:
    """Return a collated value as nested dicts and tuples of tensors, as models take them."""
    if isinstance(value, Mapping):
        return {str(key): _tree(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tree(v) for v in value)
    if isinstance(value, str | bytes):
        remedy = "Convert it to numbers in the data set or its collate function."
        raise DatasetError(f"a sample has text: {value[:40]!r}", remedy=remedy)
    return strided(value) if isinstance(value, Tensor) else value


def _alike(alone: Any, batch: Any, k: int) -> bool:
    """Whether sample k of a batch equals the sample alone, except for rounding and padding.

    With padding, values that all samples share may also differ, such as the length.
    """
    pairs = [(a, b) for a, b in _pairs(alone, batch) if a.dim() == b.dim()]
    whole = [(a[0], b[k]) for a, b in pairs if a.dim() and a.shape[1:] == b.shape[1:]]
    shared = [(a, b) for a, b in pairs if not a.dim()]
    padded = len(whole) + len(shared) < len(pairs)
    return all(_close(a, b) for a, b in (*whole, *(() if padded else shared)))


def _pairs(one: Any, other: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pairs of tensors at equal positions of two trees."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        yield one, other
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() & other.keys():
            yield from _pairs(one[key], other[key])
    elif isinstance(one, tuple) and isinstance(other, tuple):
        for pair in zip(one, other, strict=False):
            yield from _pairs(*pair)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.is_complex() and b.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if torch.equal(a, b) or not a.dtype.is_floating_point:
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    scale = float(a.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(a, b, rtol=0, atol=1e-3 * scale, equal_nan=True)


def _digest(batch: dict[str, Any]) -> str:
    digest = hashlib.sha256()

    def add(tensor: Tensor) -> None:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(plain.view(torch.uint8).numpy().data)

    map_tensors(add, batch)
    return digest.hexdigest()
