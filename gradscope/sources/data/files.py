"""The samples of data files: opens files and folders, and reads rows as tensors."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gradscope.config import DatasetSpec
from gradscope.core.precision import dtype_name
from gradscope.core.registry import suggestion
from gradscope.core.texts import listed
from gradscope.errors import DatasetError, located
from gradscope.model.locate import WHOLE
from gradscope.process.memory import available
from gradscope.sources.data import tensors, text  # noqa: F401 (they register their readers)
from gradscope.sources.data.arrays import open_npy_folder
from gradscope.sources.data.arrow import (
    open_arrow_files,
    open_parquet_files,
    open_saved_dataset,
)
from gradscope.sources.data.columns import (
    Numbers,
    StoredArrays,
    StoredColumn,
    as_index,
    in_order,
    require_available,
    runs,
    with_clear_errors,
)
from gradscope.sources.data.images import image_files, open_image_folder
from gradscope.sources.data.recipes import (
    Convert,
    converter,
    encode_arrays,
    headings,
    used,
    with_columns,
)
from gradscope.sources.formats import (
    HEAD,
    dataset_readers,
    find_reader,
    reachable,
    reading,
    sha256_of_sources,
)

_COPIES = 4  # copies of a sample in memory: as stored, converted, in the model, and results
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"}
_TEXTS = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


@dataclass(frozen=True)
class FileSamples:
    """The samples of data files."""

    spec: DatasetSpec
    format: str
    columns: Mapping[str, Numbers]  # {name: stored array (N, ...)} of the used arrays
    convert: Mapping[str, Convert]  # {name: function from stored rows (n, ...) to a tensor}
    load: Callable[[str], StoredColumn]  # returns any stored array of the file, also texts
    notes: tuple[str, ...]
    stamp: tuple[tuple[int, int], ...]  # size and modification time of each file at opening
    names: tuple[str, ...] = ()  # the names of all arrays in the file
    whole: Mapping[str, Tensor] = field(default_factory=dict)  # inputs that all samples share
    memory: Callable[[torch.device], int | None] = available  # returns the available bytes

    def __len__(self) -> int:
        return int(next(iter(self.columns.values())).shape[0])

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the file, or of the list of digests for several files."""
        return sha256_of_sources(self.spec.sources)

    @property
    def code(self) -> dict[str, str]:
        """Always empty: no user code makes the samples."""
        return {}

    @property
    def unused(self) -> list[str]:
        """The names of the user's arrays that the spec does not use."""
        found = used((*self.spec.files, *self.names), self.spec)
        made = self.format == "images"  # gradscope makes the arrays of an image folder
        return [] if made else [name for name in self.names if name not in found]

    def stored(self, name: str) -> dict[str, Any]:
        """Return the stored shape and dtype of an array, for a description."""
        column = self.columns[name]
        return {"stored": [*column.shape], "stored_dtype": dtype_name(column.dtype)}

    def headings(self, name: str) -> list[str]:
        """Return the names of an array's columns if several columns form the array, else []."""
        return headings(self.names, self.spec.columns.get(name))

    def in_memory(self, most: int) -> Self:
        """Return the samples with their arrays in memory if these have at most `most` bytes.

        Most files are slow to read in another order than their own.
        """
        free = self.memory(torch.device("cpu"))
        size = len(self) * sum(map(_row_bytes, self.columns.values()))
        if size > (most if free is None else min(most, free // _COPIES)):
            return self
        return replace(self, columns={k: v[0 : len(self)] for k, v in self.columns.items()})

    def read(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return {name: (n, ...)} for the samples `rows`; raise MemoryError for too many rows."""
        if _stamp(self.spec) != self.stamp:
            raise DatasetError(
                "the file has changed since it was opened",
                where=str(self.spec.path),
                remedy="Start again, and do not change the file while a run reads it.",
            )
        sample = _COPIES * sum(map(_row_bytes, self.columns.values()))
        require_available(len(rows) * sample, self.memory)
        ascending, back = in_order(rows)
        in_file = {k: v for k, v in self.columns.items() if not isinstance(v, Tensor)}
        parts: dict[str, list[Tensor]] = {name: [] for name in in_file}
        for start, stop in runs(ascending) if in_file else ():
            for name, column in in_file.items():  # all columns of a run of rows: files store rows
                with located(f"{self.spec.path}: {name}, rows {start} to {stop - 1}"):
                    parts[name].append(column[start:stop])
        stored = {k: p[0] if len(p) == 1 else torch.cat(p) for k, p in parts.items()}
        found: dict[str, Tensor] = {}
        for name, held in self.columns.items():
            if isinstance(held, Tensor):
                stored[name] = held[as_index(ascending)]
            with located(f"{self.spec.path}: {name}, rows {ascending[0]} to {ascending[-1]}"):
                found[name] = self.convert[name](stored.pop(name))
        return found if back is None else {name: t[back] for name, t in found.items()}


def open_files(spec: DatasetSpec) -> FileSamples:
    """Open a data file or folder, and check its arrays against the spec."""
    if spec.kwargs:
        raise DatasetError(
            "[dataset] kwargs cannot be combined with a data file",
            where=str(spec.path),
            remedy="Remove kwargs, or give path = FILE.py:FACTORY, a function that takes them.",
        )
    with reachable(spec.path, DatasetError):
        stamp = _stamp(spec)
    kind, own = open_arrays(spec.path)
    arrays = with_columns(_with_files(own, spec.files), spec)
    names, column = encode_arrays(arrays, spec)
    with located(spec.path):
        _check_names(spec, names)
    columns: dict[str, Numbers] = {}
    for name in spec.divided:
        with located(f"{spec.path}: {name}"):
            columns[name] = column(name)
            try:
                require_available(_COPIES * _row_bytes(columns[name]))
            except MemoryError as error:
                shape = tuple(columns[name].shape[1:])
                what = f"a sample of shape {shape} is too large: {error}"
                remedy = "Check [dataset] length, and the shape in the file."
                raise DatasetError(what, remedy=remedy) from error
    whole = {}
    for name in spec.whole:
        with located(f"{spec.path}: {name}"):
            stored = column(name)
            _check_lengths({name: tuple(map(int, stored.shape))})
            rows = stored[0 : stored.shape[0]]
            whole[name] = converter(spec, name, stored.shape[1:], stored.dtype)(rows)
    with located(spec.path):
        _check_lengths({name: tuple(map(int, c.shape)) for name, c in columns.items()})
    convert = {}
    for name, stored in columns.items():
        with located(f"{spec.path}: {name}"):
            convert[name] = converter(spec, name, stored.shape[1:], stored.dtype)
    known = own.notes, stamp, own.names
    return FileSamples(spec, kind, columns, convert, arrays.load, *known, whole=whole)


def open_arrays(path: Path) -> tuple[str, StoredArrays]:
    """Return the format of a file or folder, and its arrays."""
    with reachable(path, DatasetError):
        folder = path.is_dir()
    if folder:
        with reading(DatasetError, path):
            kind, arrays = _open_folder(path)
        return kind, with_clear_errors(arrays, path)
    try:
        kind = find_reader(dataset_readers, path, DatasetError)
    except DatasetError:  # a single column of text has no separators
        kind = _TEXTS.get(path.suffix.lower(), "")
        if not kind or not path.is_file():
            raise
        with path.open("rb") as file:
            head = file.read(HEAD)
        if not head.strip() or b"\0" in head or head.startswith((b"<", b"version ")):
            raise
    with reading(DatasetError, path):
        arrays = dataset_readers.get(kind)(path)
    return kind, with_clear_errors(arrays, path)


def _open_folder(path: Path) -> tuple[str, StoredArrays]:
    """Return the format of a folder, and its arrays."""
    if (path / "dataset_dict.json").is_file():
        parts = sorted(p.name for p in path.iterdir() if (p / "state.json").is_file())
        raise DatasetError(
            f"this folder has several data sets: {', '.join(parts)}",
            remedy=f"Give the folder of one data set, such as "
            f"{path / (parts[0] if parts else 'train')}.",
        )
    if (path / "state.json").is_file():
        return "arrow", open_saved_dataset(path)
    shards = {suffix: sorted(path.glob(f"*.{suffix}")) for suffix in ("parquet", "arrow")}
    _require_one_split(shards["parquet"] or shards["arrow"])
    if shards["parquet"]:
        return "parquet", open_parquet_files(shards["parquet"])
    if shards["arrow"]:
        return "arrow", open_arrow_files(shards["arrow"])
    if any(path.glob("*.npy")):
        return "npy", open_npy_folder(path)
    if images := image_files(path):
        _require_classes({file.relative_to(path).parts[0] for file in images})
        return "images", open_image_folder(path)
    raise DatasetError(
        "this directory has no data in a supported format",
        remedy="Give a file in it. Or give a folder of class folders with images, a folder of "
        ".npy, .parquet or .arrow files, or a folder written by Hugging Face's save_to_disk.",
    )


def _splits(name: str) -> set[str]:
    """Return the words of a file or folder name that name a split, such as "train"."""
    return _SPLITS & set(re.split(r"[\W_\d]+", name.lower()))


def _require_one_split(files: Sequence[Path]) -> None:
    """Raise for a folder with files of several splits, such as train and test."""
    words = {file.name: " ".join(sorted(_splits(file.stem))) for file in files}
    firsts = {word: name for name, word in reversed(words.items())}
    if len(firsts) > 1:
        raise DatasetError(
            f"the names of the files in this folder belong to several data sets: "
            f"{listed(sorted(firsts.values()))}",
            remedy="Give one of the files, or a folder with the files of a single data set.",
        )


def _require_classes(folders: Collection[str]) -> None:
    """Raise for folders such as train and test, which would be read as classes."""
    if len(folders) > 1 and all(_splits(name) for name in folders):
        raise DatasetError(
            f"the names of the folders {listed(sorted(folders))} are data sets, not classes",
            remedy="Give one of the folders, with a folder for each class in it.",
        )


def _with_files(own: StoredArrays, files: Mapping[str, Path]) -> StoredArrays:
    """Return the arrays of a file, and the arrays in the separate files `files`."""

    def load(name: str) -> StoredColumn:
        if name not in files:
            return own.load(name)
        _, arrays = open_arrays(files[name])
        if name in arrays.names or len(arrays.names) == 1:
            return arrays.load(name if name in arrays.names else arrays.names[0])
        raise DatasetError(
            f"there is no array {name!r} in the file",
            where=str(files[name]),
            remedy=f"The file has {listed(arrays.names)}.",
        )

    return StoredArrays(tuple(dict.fromkeys((*files, *own.names))), load, own.notes)


def _stamp(spec: DatasetSpec) -> tuple[tuple[int, int], ...]:
    """Return size and modification time of every file."""
    found = [path.stat() for path in spec.sources if path.exists()]
    return tuple((status.st_size, status.st_mtime_ns) for status in found)


def _row_bytes(column: Numbers) -> int:
    return prod(map(int, column.shape[1:])) * column.dtype.itemsize


def _check_names(spec: DatasetSpec, names: tuple[str, ...]) -> None:
    """Raise if an array that the spec names is missing, also if only its dtype is set."""
    keys = ("dtype", "scale", "reshape", "classes", "tokenizer", "pad", "length")
    used: dict[str, Any] = {"inputs": spec.input_arrays, "targets": spec.targets}
    used |= {key: getattr(spec, key) for key in keys}
    names_of = {key: getattr(spec, key) for key in ("id", "group", "select")}
    used |= {key: [name] for key, name in names_of.items() if isinstance(name, str)}
    known = set(names)
    for key, name in ((key, name) for key, some in used.items() for name in some):
        if name not in known:
            if {"samples/index", "samples/norm"} <= known:
                raise DatasetError(
                    "this is a result file of gradscope, not data",
                    remedy="Give the data of its run.",
                )
            some = list(names) if len(names) <= 20 else [*names[:20], f"... ({len(names)} in all)"]
            raise DatasetError(
                f"{key}: there is no array {name!r} in the file",
                remedy=suggestion(name, some).replace("Supported", "It has")
                + " Name inputs and targets in a dataset.toml; without targets, write "
                "targets = []." * (key in ("inputs", "targets")),
            )


def _check_lengths(shapes: Mapping[str, tuple[int, ...]]) -> None:
    what, remedy = "", "Make the sample axis the first axis of each array."
    lengths = {name: shape[0] for name, shape in shapes.items() if shape}
    if len(lengths) < len(shapes):
        flat = next(name for name in shapes if name not in lengths)
        what = f"the array {flat} has no axis, so it has no samples"
    elif len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        what = f"the arrays have different numbers of samples: {told}"
        remedy = f"{remedy} {WHOLE}"
    elif 0 in lengths.values():
        what = f"there are no samples: the arrays {', '.join(lengths)} are empty"
        remedy = "Give at least one sample."
    if what:
        raise DatasetError(what, remedy=remedy)
