"""Arrow, Parquet and saved Hugging Face data sets, read batch by batch through pyarrow."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.errors import DatasetError
from gradscope.sources.data.columns import (
    NumberColumn,
    SequenceColumn,
    SequenceSizes,
    StoredArrays,
    StoredColumn,
    TextColumn,
    from_numpy,
    require_distinct,
    torch_dtype,
)
from gradscope.sources.data.images import decode_image
from gradscope.sources.formats import dataset_readers, matching, need, reading, require_regular

_BATCH_BYTES = 2**22  # bytes of a Parquet file to decode at a time
_BUFFER = 2**18  # bytes of a Parquet file to read at a time
_NUMPYS = {"halffloat": "float16", "float": "float32", "double": "float64"}  # {Arrow: numpy}

Batches = Callable[[Sequence[str]], Iterator[Any]]


@dataset_readers.register("parquet")
@matching(lambda head: head.startswith(b"PAR1"))
def open_parquet(path: Path) -> StoredArrays:
    """Columns of a Parquet file: numbers, texts, lists of numbers, images (needs pyarrow)."""
    return open_parquet_files([path])


@dataset_readers.register("arrow")
@matching(lambda head: head.startswith((b"ARROW1", b"\xff\xff\xff\xff")))
def open_arrow(path: Path) -> StoredArrays:
    """Columns of an Arrow file or stream, such as Hugging Face data sets (needs pyarrow)."""
    return open_arrow_files([path])


def open_parquet_files(paths: Sequence[Path]) -> StoredArrays:
    """Open several Parquet files as one data set."""
    pq = need("pyarrow.parquet", "Parquet")
    n = size = 0
    schemas = []
    for path in paths:
        require_regular(path, DatasetError)
        with reading(DatasetError, path), pq.ParquetFile(path) as file:
            n += file.metadata.num_rows
            groups = range(file.metadata.num_row_groups)
            size += sum(file.metadata.row_group(k).total_byte_size for k in groups)
            schemas.append(file.schema_arrow)
    _require_alike(paths, schemas)
    rows = max(1, _BATCH_BYTES * n // max(1, size))

    def batches(names: Sequence[str]) -> Iterator[Any]:
        for path in paths:
            with (
                reading(DatasetError, path),
                pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file,
            ):
                yield from file.iter_batches(rows, columns=list(names), use_threads=False)

    return _arrays(schemas[0], n, batches)


def open_arrow_files(paths: Sequence[Path]) -> StoredArrays:
    """Open several Arrow files or streams as one data set."""
    pa = need("pyarrow", "Arrow")
    for path in paths:
        require_regular(path, DatasetError)

    def opened(file: Any) -> Any:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file)

    def batches(names: Sequence[str]) -> Iterator[Any]:
        for path in paths:
            with reading(DatasetError, path), pa.memory_map(str(path)) as file:
                source = opened(file)
                if hasattr(source, "get_batch"):  # not a stream
                    source = map(source.get_batch, range(source.num_record_batches))
                for batch in source:
                    chosen = batch.select(list(names))
                    chosen.validate(full=True)  # offsets outside of the file crash pyarrow
                    yield chosen

    schemas = []
    for path in paths:
        with reading(DatasetError, path), pa.memory_map(str(path)) as file:
            schemas.append(opened(file).schema)
    _require_alike(paths, schemas)
    first = list(schemas[0].names[:1])  # decoded to count the rows
    n = sum(batch.num_rows for batch in batches(first))
    return _arrays(schemas[0], n, batches)


def open_saved_dataset(path: Path) -> StoredArrays:
    """Open a folder that Hugging Face's `Dataset.save_to_disk` wrote."""
    state = path / "state.json"
    with reading(DatasetError, state):
        files = json.loads(state.read_text())["_data_files"]
        paths = [path / str(file["filename"]) for file in files]
        outside = [p for p in paths if p.resolve().parent != path.resolve()]
        if outside or not paths:
            what = f"it names a file outside its folder, {outside[0].name!r}" if outside else ""
            remedy = "Save the data set again with save_to_disk."
            raise DatasetError(what or "it names no data files", remedy=remedy)
    return open_arrow_files(paths)


def _require_alike(paths: Sequence[Path], schemas: Sequence[Any]) -> None:
    """Raise if the files of a data set have different names or types of columns."""
    first = {field.name: _plain(field.type) for field in schemas[0]}
    for path, schema in zip(paths, schemas, strict=True):
        found = {field.name: _plain(field.type) for field in schema}
        for name in first | found:
            one, other = (types.get(name, "missing") for types in (first, found))
            if one != other:
                raise DatasetError(
                    f"the column {name!r} is {one} in {paths[0].name} and {other} in {path.name}",
                    remedy="Write all files with the same columns and types.",
                )


def _plain(kind: Any) -> Any:
    """Return the type of a column's values; for a dictionary column, the type of its values."""
    return kind.value_type if need("pyarrow", "Arrow").types.is_dictionary(kind) else kind


def _arrays(schema: Any, n: int, batches: Batches) -> StoredArrays:
    names = tuple(schema.names)
    require_distinct(names, "columns")
    table = _Table(batches, [field.name for field in schema if _is_list(field.type)])

    def load(name: str) -> StoredColumn:
        table.add(name)
        return _column(table, name, schema.field(name).type, n)

    return StoredArrays(names, load)


class _Table:
    """Rows of record batches in file order; reading backwards restarts at the first row.

    `batches` starts reading some columns. `lists` are the columns of lists.
    """

    def __init__(self, batches: Batches, lists: Sequence[str]) -> None:
        self._batches, self._names, self._lists = batches, dict[str, None](), lists
        self._sizes: dict[str, SequenceSizes | DatasetError] = {}
        self._iterator: Iterator[Any] | None = None
        self._batch: Any = None
        self._start = 0  # the first row of the current batch
        self._last: tuple[int, int, list[Any]] = (0, 0, [])

    def add(self, name: str) -> None:
        """Add a column to read."""
        if name not in self._names:
            self._names[name] = None
            self._iterator, self._last = None, (0, 0, [])

    def read(self, name: str, start: int, stop: int) -> list[Any]:
        """Return rows of a column as Arrow arrays; all columns share the rows that were read."""
        if self._last[:2] != (start, stop):
            self._last = (start, stop, self._rows(start, stop))
        return [batch.column(name) for batch in self._last[2]]

    def sizes(self, name: str) -> SequenceSizes:
        """Return the sizes of a column of lists; the second call measures all remaining columns."""
        if name not in self._sizes:
            names = [k for k in self._lists if k not in self._sizes] if self._sizes else [name]
            lengths = {k: [np.empty(0, np.int64)] for k in names}
            rows: dict[str, tuple[int, ...]] = {}
            for batch in self._batches(names):
                for k in names:
                    part = _storage(batch.column(k))
                    try:
                        lengths[k].append(_lengths(part))
                        if len(part) and k not in rows:
                            rows[k] = _values(part.flatten()).shape[1:]
                    except DatasetError as error:
                        self._sizes.setdefault(k, error)
            for k, found in lengths.items():
                sizes = torch.from_numpy(np.concatenate(found)), rows.get(k, ())
                self._sizes.setdefault(k, sizes)
        measured = self._sizes[name]
        if isinstance(measured, DatasetError):
            raise measured
        return measured

    def _rows(self, start: int, stop: int) -> list[Any]:
        if self._iterator is None or start < self._start:
            self._iterator, self._batch, self._start = self._batches([*self._names]), None, 0
        found = []
        while True:
            if self._batch is not None:
                end = self._start + self._batch.num_rows
                if end > start:
                    first = max(start, self._start) - self._start
                    found.append(self._batch.slice(first, min(stop, end) - self._start - first))
                if end >= stop:
                    return found
                self._start = end
            self._batch = next(self._iterator)


def _column(table: _Table, name: str, kind: Any, n: int) -> StoredColumn:
    """Return a column of the Arrow type `kind`, n rows."""
    types = need("pyarrow", "Arrow").types

    def objects(start: int, stop: int) -> list[Any]:
        parts = table.read(name, start, stop)
        return list(chain.from_iterable(part.to_pylist() for part in parts))

    def texts(start: int, stop: int) -> list[str]:
        found = objects(start, stop)
        if None in found:
            raise _missing(f"sample {start + found.index(None)} has no text (null)")
        return found

    def numbers(start: int, stop: int) -> Tensor:
        return from_numpy(np.concatenate([_values(p) for p in table.read(name, start, stop)]))

    def joined(start: int, stop: int) -> Tensor:
        parts = [_storage(part).flatten() for part in table.read(name, start, stop)]
        return from_numpy(np.concatenate([_values(part) for part in parts]))

    def sequences(start: int, stop: int) -> list[Tensor]:
        lengths = [_lengths(part) for part in table.read(name, start, stop)]
        return list(torch.split(joined(start, stop), np.concatenate(lengths).tolist()))

    value = _plain(kind)
    if types.is_string(value) or types.is_large_string(value):
        return TextColumn(n, texts)
    if types.is_struct(kind) and {f.name for f in kind} >= {"bytes", "path"}:  # Hugging Face image
        shape = decode_image(objects(0, 1)[0], 0).shape if n else torch.Size((0,))

        def images(start: int, stop: int) -> Tensor:
            found = enumerate(objects(start, stop), start)
            return torch.stack([decode_image(value, k, shape) for k, value in found])

        return NumberColumn((n, *shape), torch.uint8, images)
    inner = kind
    while _is_list(inner):
        inner = getattr(inner, "storage_type", inner).value_type
    if not (types.is_boolean(inner) or types.is_integer(inner) or types.is_floating(inner)):
        remedy = "Store numbers, texts, or lists of numbers."
        raise DatasetError(f"it has {kind}, not numbers", remedy=remedy)
    dtype = torch_dtype(np.dtype(_NUMPYS.get(str(inner), str(inner))))
    if _is_list(kind):
        return SequenceColumn(dtype, sequences, lambda: table.sizes(name), joined)
    return NumberColumn((n,), dtype, numbers)


def _is_list(kind: Any) -> bool:
    kind = getattr(kind, "storage_type", kind)
    types = need("pyarrow", "Arrow").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _storage(part: Any) -> Any:
    """Return the stored lists of an extension array, such as a fixed-shape tensor."""
    return part.storage if hasattr(part, "storage") else part


def _lengths(part: Any) -> np.ndarray:
    part = _storage(part)
    if part.null_count:
        raise _missing(f"{part.null_count} samples have no list (null)")
    found = need("pyarrow.compute", "Arrow").list_value_length(part)
    return np.asarray(found.to_numpy(zero_copy_only=False), np.int64)


def _values(part: Any) -> np.ndarray:
    """Return the numbers of an array (n, ...); all of its lists must have the same length."""
    part = _storage(part)
    if not _is_list(part.type):
        if part.null_count and not need("pyarrow", "Arrow").types.is_floating(part.type):
            raise _missing(f"{part.null_count} integers are missing (null)")
        found: np.ndarray = part.to_numpy(zero_copy_only=False)
        return found
    lengths = set(_lengths(part).tolist())
    if len(lengths) > 1:
        raise DatasetError(
            f"the lists inside a sample have several lengths, such as {sorted(lengths)[:3]}",
            remedy="Let only the first axis of samples have different lengths.",
        )
    inner = _values(part.flatten())
    return inner.reshape(len(part), lengths.pop() if lengths else 0, *inner.shape[1:])


def _missing(what: str) -> DatasetError:
    return DatasetError(what, remedy="Fill in the missing values, or leave these samples out.")
