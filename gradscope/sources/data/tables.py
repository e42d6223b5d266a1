"""Arrow and Parquet through pyarrow, read batch by batch; also what Hugging Face saved."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gradscope.errors import DatasetError
from gradscope.sources.data.arrow import Sizes, is_list, sizes_of, stored_column
from gradscope.sources.data.columns import Stored, StoredArrays, reading
from gradscope.sources.data.readers import dataset_readers, matching
from gradscope.sources.extras import need
from gradscope.sources.listing import listed

_BATCH_BYTES = 2**22  # of a Parquet file that are decoded together
_BUFFER = 2**18  # bytes of it that are read together

Batches = Callable[[Sequence[str]], Iterator[Any]]


def is_parquet(head: bytes) -> bool:
    """Whether a file that begins like this is a Parquet file."""
    return head.startswith(b"PAR1")


def is_arrow(head: bytes) -> bool:
    """Whether a file that begins like this is an Arrow file, or a stream as Hugging Face saves."""
    return head.startswith((b"ARROW1", b"\xff\xff\xff\xff"))


@dataset_readers.register("parquet")
@matching(is_parquet)
def open_parquet(path: Path) -> StoredArrays:
    """Columns of a Parquet file: numbers, texts, lists of numbers, images (needs pyarrow)."""
    return parquet([path])


@dataset_readers.register("arrow")
@matching(is_arrow)
def open_arrow(path: Path) -> StoredArrays:
    """Columns of an Arrow file or stream, as Hugging Face saves data sets (needs pyarrow)."""
    return arrow([path])


def parquet(paths: Sequence[Path]) -> StoredArrays:
    """Open Parquet files, one after the other as one data set."""
    pq = need("pyarrow.parquet", "Parquet")
    n = size = 0
    for path in paths:
        with reading(path), pq.ParquetFile(path) as file:
            n += file.metadata.num_rows
            groups = range(file.metadata.num_row_groups)
            size += sum(file.metadata.row_group(k).total_byte_size for k in groups)
            schema = file.schema_arrow
    rows = max(1, _BATCH_BYTES * n // max(1, size))

    def batches(names: Sequence[str]) -> Iterator[Any]:
        for path in paths:
            with reading(path), pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file:
                yield from file.iter_batches(rows, columns=list(names), use_threads=False)

    return _arrays(paths[0], schema, n, batches)


def arrow(paths: Sequence[Path]) -> StoredArrays:
    """Open Arrow files or streams, one after the other as one data set."""
    pa = need("pyarrow", "Arrow")

    def batches(names: Sequence[str]) -> Iterator[Any]:
        for path in paths:
            with reading(path), pa.memory_map(str(path)) as file:
                for batch in _arrow_batches(pa, file):
                    chosen = batch.select(list(names))
                    chosen.validate(full=True)  # offsets that lead out of the file crash pyarrow
                    yield chosen

    with reading(paths[0]), pa.memory_map(str(paths[0])) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        schema = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file).schema
        first = list(schema.names[:1])  # decoded here
    n = sum(batch.num_rows for batch in batches(first))
    return _arrays(paths[0], schema, n, batches)


def saved_dataset(path: Path) -> StoredArrays:
    """Open a folder that Hugging Face's `Dataset.save_to_disk` wrote."""
    with reading(path / "state.json"):
        files = json.loads((path / "state.json").read_text())["_data_files"]
        paths = [path / str(file["filename"]) for file in files]
    outside = [p for p in paths if p.resolve().parent != path.resolve()]
    if outside or not paths:
        raise DatasetError(
            f"it names the file {outside[0].name!r} outside its folder"
            if outside
            else "it names no data files",
            where=str(path / "state.json"),
            remedy="Save the data set again with save_to_disk.",
        )
    return arrow(paths)


class _Table:
    """Rows of record batches that come in order: forwards at once, backwards from the beginning.

    Args:
        batches: Begins to read some columns.
        lists: The columns of lists.
    """

    def __init__(self, batches: Batches, lists: Sequence[str]) -> None:
        self._batches, self._names, self._lists = batches, dict[str, None](), lists
        self._sizes: dict[str, Sizes | DatasetError] = {}
        self._scans = 0
        self._iterator: Iterator[Any] | None = None
        self._batch: Any = None
        self._start = 0  # of the batch at hand
        self._last: tuple[int, int, list[Any]] = (0, 0, [])

    def add(self, name: str) -> None:
        """Read this column, too, from now on."""
        if name not in self._names:
            self._names[name] = None
            self._iterator, self._last = None, (0, 0, [])

    def read(self, name: str, start: int, stop: int) -> list[Any]:
        """Return rows of one column as Arrow arrays; the columns share what is read."""
        if self._last[:2] != (start, stop):
            self._last = (start, stop, self._rows(start, stop))
        return [batch.column(name) for batch in self._last[2]]

    def sizes(self, name: str) -> Sizes:
        """Go through a column of lists; each time through twice as many as the time before.

        To begin reading takes the longer the more columns there are, and who has asked for many is
        going to ask for more.

        Raises:
            DatasetError: Some row has no list.
        """
        if name not in self._sizes:
            others = (n for n in self._lists if n not in self._sizes and n != name)
            chosen = [name, *islice(others, 2**self._scans - 1)]
            self._scans += 1
            self._sizes |= sizes_of(self._batches(chosen), chosen)
        found = self._sizes[name]
        if isinstance(found, DatasetError):
            raise found
        return found

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


def _arrow_batches(pa: Any, file: Any) -> Iterator[Any]:
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_file:
        yield from pa.ipc.open_stream(file)
        return
    reader = pa.ipc.open_file(file)
    for k in range(reader.num_record_batches):
        yield reader.get_batch(k)


def _arrays(path: Path, schema: Any, n: int, batches: Batches) -> StoredArrays:
    with reading(path):
        names = tuple(schema.names)
        table = _Table(batches, [field.name for field in schema if is_list(field.type)])
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DatasetError(
            f"several columns are called {listed(map(repr, twice), 3)}",
            where=str(path),
            remedy="Give every column a name of its own.",
        )

    def load(name: str) -> Stored:
        def read(start: int, stop: int) -> list[Any]:
            with reading(path, name):
                return table.read(name, start, stop)

        table.add(name)
        with reading(path, name):
            return stored_column(schema.field(name).type, n, read, lambda: table.sizes(name))

    return StoredArrays(names, load)
