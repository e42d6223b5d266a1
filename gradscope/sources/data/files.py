"""The samples of data files: which file holds what, and rows of it as tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradscope.config import DatasetSpec
from gradscope.core.registry import suggestion
from gradscope.errors import DatasetError
from gradscope.sources.conversion import converter
from gradscope.sources.data import formats as dataset_formats  # noqa: F401 (it registers the readers)
from gradscope.sources.data.columns import (
    Column,
    Stored,
    StoredArrays,
    in_order,
    require_memory,
    runs,
)
from gradscope.sources.data.folders import open_folder
from gradscope.sources.data.made import made
from gradscope.sources.data.parts import composed
from gradscope.sources.data.readers import HEAD, dataset_readers, find_dataset_reader, reachable
from gradscope.sources.listing import listed

_COPIES = 4  # of a sample at a time: stored, converted, the model's own, and what comes of it
_TEXTS = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


@dataclass(frozen=True)
class FileRows:
    """The samples of data files.

    Attributes:
        spec: What is read.
        format: What kind of file it is.
        columns: {name: array (N, ...)} as stored, those that are used.
        convert: {name: what makes rows (n, ...) of it into a tensor (n, ...)}.
        load: Returns any array of the file as it is stored, also texts.
        notes: What there is to say about the file.
        stamp: Size and time of change of each file when it was opened.
    """

    spec: DatasetSpec
    format: str
    columns: Mapping[str, Column]
    convert: Mapping[str, Callable[[Tensor], Tensor]]
    load: Callable[[str], Stored]
    notes: tuple[str, ...]
    stamp: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return int(next(iter(self.columns.values())).shape[0])

    @cached_property
    def _row(self) -> int:
        """The bytes that one sample takes."""
        return _COPIES * sum(map(_row_bytes, self.columns.values()))

    def read(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return {name: (n, ...)} of the samples `rows`, in this order.

        Raises:
            DatasetError: A value does not fit its dtype, or a file has changed meanwhile.
            MemoryError: So many samples are more than the machine can hold.
        """
        if _stamp(self.spec) != self.stamp:
            raise DatasetError(
                "the file has changed since it was opened",
                where=str(self.spec.path),
                remedy="Leave it as it is while a run reads it, and begin again.",
            )
        require_memory(len(rows) * self._row)
        ascending, back = in_order(rows)
        parts: dict[str, list[Tensor]] = {name: [] for name in self.columns}
        for start, stop in runs(ascending):  # all columns of one stretch: files come in rows
            for name, column in self.columns.items():
                with self._at(name, start, stop):
                    parts[name].append(self.convert[name](column[start:stop]))
        found = {k: p[0] if len(p) == 1 else torch.cat(p) for k, p in parts.items()}
        return found if back is None else {name: t[back] for name, t in found.items()}

    @contextmanager
    def _at(self, name: str, start: int, stop: int) -> Iterator[None]:
        try:
            yield
        except DatasetError as error:
            where = f"{self.spec.path}: {name}, rows {start} to {stop - 1}"
            raise error.at(where) if error.where is None else error from None


def open_files(spec: DatasetSpec) -> FileRows:
    """Open a data file or folder and check its arrays against what the spec says of them.

    Raises:
        DatasetError: A file cannot be read, or it and the spec do not fit together.
    """
    with reachable(spec.path, DatasetError):
        stamp = _stamp(spec)
    kind, own = open_arrays(spec.path)
    arrays = composed(_with_files(own, spec.files), spec.columns)
    names, column = made(spec, arrays)
    _check_names(spec, names)
    columns, convert = {}, {}
    for name in spec.arrays:
        with _at(spec, name):
            columns[name] = column(name)
            _check_row(columns[name])
    _check_lengths(spec, {name: tuple(map(int, c.shape)) for name, c in columns.items()})
    for name, stored in columns.items():
        with _at(spec, name):
            convert[name] = converter(
                stored.shape[1:],
                stored.dtype,
                dtype=spec.dtype.get(name),
                scale=spec.scale.get(name),
                reshape=spec.reshape.get(name),
            )
    return FileRows(spec, kind, columns, convert, arrays.load, own.notes, stamp)


def open_arrays(path: Path) -> tuple[str, StoredArrays]:
    """Return what kind of file or folder it is, and its arrays.

    Raises:
        DatasetError: It cannot be read.
    """
    with reachable(path, DatasetError):
        folder = path.is_dir()
    if folder:
        return open_folder(path)
    try:
        name = find_dataset_reader(path)
    except DatasetError:
        name = _TEXTS.get(path.suffix.lower(), "")
        if not name or not _is_text(path):
            raise
    arrays = dataset_readers.get(name)(path)
    return name, StoredArrays(arrays.names, arrays.load, getattr(arrays, "notes", ()))


def _is_text(path: Path) -> bool:
    """Whether a file that is called a text table may be one: a column alone has no separators."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(HEAD)
    return bool(head.strip()) and b"\0" not in head and not head.startswith((b"<", b"version "))


def _with_files(own: StoredArrays, files: Mapping[str, Path]) -> StoredArrays:
    """Return the arrays of a file and those that lie in files of their own."""

    def load(name: str) -> Stored:
        if name not in files:
            return own.load(name)
        _, arrays = open_arrays(files[name])
        if name in arrays.names or len(arrays.names) == 1:
            return arrays.load(name if name in arrays.names else arrays.names[0])
        raise DatasetError(
            f"there is no array {name!r} in the file",
            where=str(files[name]),
            remedy=f"It holds {listed(arrays.names)}.",
        )

    return StoredArrays(tuple(dict.fromkeys((*files, *own.names))), load, own.notes)


@contextmanager
def _at(spec: DatasetSpec, name: str) -> Iterator[None]:
    """Say which array an error is about, where that is not known."""
    try:
        yield
    except DatasetError as error:
        raise error.at(f"{spec.path}: {name}") if error.where is None else error from None


def _stamp(spec: DatasetSpec) -> tuple[tuple[int, int], ...]:
    """Return size and time of change of every file."""
    found = [path.stat() for path in spec.sources if path.exists()]
    return tuple((status.st_size, status.st_mtime_ns) for status in found)


def _row_bytes(column: Column) -> int:
    return prod(map(int, column.shape[1:])) * column.dtype.itemsize


def _check_row(column: Column) -> None:
    try:
        require_memory(_COPIES * _row_bytes(column))
    except MemoryError as error:
        raise DatasetError(
            f"one sample of the shape {tuple(column.shape[1:])} is too large: {error}",
            remedy="Check [dataset] length, or what the file says of its shape.",
        ) from error


def _check_names(spec: DatasetSpec, names: tuple[str, ...]) -> None:
    """Every array that is named must be there, also where only a dtype is given for it."""
    tables = (spec.dtype, spec.scale, spec.reshape, spec.classes, spec.tokenizer, spec.pad)
    others = (n for n in (spec.id, spec.select) if isinstance(n, str))
    known = set(names)
    for name in dict.fromkeys((*spec.arrays, *chain(*tables, spec.length), *others)):
        if name not in known:
            some = list(names) if len(names) <= 20 else [*names[:20], f"... ({len(names)} in all)"]
            raise DatasetError(
                f"there is no array {name!r} in the file",
                where=str(spec.path),
                remedy=suggestion(name, some).replace("Supported", "It holds")
                + " A dataset.toml says which are inputs and targets.",
            )


def _check_lengths(spec: DatasetSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if not shape:
            raise DatasetError(
                "this array has no axes, so no samples",
                where=f"{spec.path}: {name}",
                remedy="Its first axis must be the sample axis.",
            )
    lengths = {name: shape[0] for name, shape in shapes.items()}
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
