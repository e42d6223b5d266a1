"""Text formats: .csv and .jsonl, one record a sample, read in slices.

The standard library's csv and json modules parse the records, even if pyarrow or pandas is
installed, so a file has the same values on every machine. A first pass counts the records, stores
the byte offsets of some records, and finds the type of each column: numbers or text.
"""

import csv
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
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
    too_large,
    torch_dtype,
)
from gradscope.sources.formats import DuplicateKeyError, dataset_readers, distinct, matching

_EVERY = 256  # records between two stored offsets
_LONGEST = 2**28  # the most bytes of a line
_FIELD = 2**27  # the most characters of a field
_HEAD = 2**20  # number of first bytes to search for a separator
_LOOK = 20  # number of first records that must have the same number of fields
_SEPARATORS = (",", "\t", ";", "|")
_LEAST, _MOST = -(2**63), 2**63 - 1  # the range of int64
_TYPES = (np.dtype(np.bool_), np.dtype(np.int64), np.dtype(np.float64))  # in order of range

TextRecord = Mapping[str, Any]  # {column: value}
Values = Callable[[int, int], list[Any]]  # (start, stop) -> the values of a column


class _Lines:
    """The decoded lines of a file from its position on; `position` is the start of the next."""

    def __init__(self, file: Any) -> None:
        self._file, self.position, self.number = file, file.tell(), 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        raw = self._file.readline(_LONGEST)
        if not raw:
            raise StopIteration
        if len(raw) == _LONGEST:
            what = f"a line is longer than {_LONGEST:,} bytes"
            raise DatasetError(what, remedy="Write one sample a line.")
        try:
            text = str(raw.decode("utf-8-sig" if self.position == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            what = f"not UTF-8 text at byte {self.position + error.start}"
            raise DatasetError(what, remedy="Save the file as UTF-8.") from error
        self.position += len(raw)
        self.number += 1
        return text

    def __str__(self) -> str:
        return f"line {self.number}"


Parse = Callable[[_Lines], Iterator[TextRecord]]


@dataset_readers.register("jsonl")
@matching(lambda head: head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{" and 0 not in head)
def open_jsonl(path: Path) -> StoredArrays:
    """JSON objects, one a line: numbers, texts, lists of numbers."""
    with path.open("rb") as file:
        lines = _Lines(file)
        names = next((_object(line, lines) for line in lines if line.strip()), {}).keys()

    def parse(lines: _Lines) -> Iterator[TextRecord]:
        for record in (_object(line, lines) for line in lines if line.strip()):
            if not record.keys() <= names:
                new = next(key for key in record if key not in names)
                raise DatasetError(
                    f"{lines} has the key {new!r}, which the first line does not have",
                    remedy="Write all keys in the first line, and null for a missing number.",
                )
            yield record

    return _arrays(path, parse, tuple(names), _JsonColumn)


@dataset_readers.register("csv")
@matching(lambda head: _separator(head) is not None)
def open_csv(path: Path) -> StoredArrays:
    """Comma-separated values (or tabs, semicolons), with or without names in the first line."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
        while head.count(b"\n") < 2 and len(head) < _LONGEST and (more := file.read(len(head))):
            head += more  # there may be tens of thousands of columns
        mark = _separator(head) or ","
        csv.field_size_limit(_FIELD)
        file.seek(0)
        first = next((r for r in csv.reader(_Lines(file), delimiter=mark) if r), [])
    try:
        headless = bool([*map(float, first)]) and "_" not in "".join(first)
    except ValueError:
        headless = False
    unnamed = [headless or not name.strip() for name in first]
    names = [str(k) if unnamed[k] else name.strip() for k, name in enumerate(first)]
    require_distinct(names, "columns")

    def parse(lines: _Lines) -> Iterator[TextRecord]:
        skip = not headless and lines.position == 0
        for record in csv.reader(lines, delimiter=mark, strict=True):
            if record and len(record) != len(names):
                raise DatasetError(
                    f"{lines} has {len(record)} fields, but the first line has {len(names)}",
                    remedy="Write a field for each column in every line, and quote fields that "
                    "contain commas.",
                )
            if record and not skip:
                yield dict(zip(names, record, strict=True))
            skip = skip and not record

    note = f"the first line of {path.name} has numbers, so the columns are called 0, 1, ..."
    arrays = _arrays(path, parse, names, _CsvColumn)
    return StoredArrays(arrays.names, arrays.load, (note,) if headless else ())


def _separator(head: bytes) -> str | None:
    """Return the separator of a table with these first bytes, or None if it is not a table."""
    whole = head[: head.rfind(b"\n") + 1] or head
    try:
        text = whole.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    if "\0" in text or text.lstrip()[:1] in ("<", "{"):
        return None
    for mark in _SEPARATORS:
        try:
            lines = [r for r in csv.reader(text.splitlines(keepends=True), delimiter=mark) if r]
        except csv.Error:
            continue
        widths = {len(r) for r in lines[:_LOOK]}
        if len(lines) > 1 and len(widths) == 1 and widths != {1}:
            return mark
    return None


def _object(line: str, lines: _Lines) -> dict[str, Any]:
    try:
        found = json.loads(line, object_pairs_hook=distinct)
    except DuplicateKeyError as error:
        what = f"{lines} has {error.key!r} twice"
        raise DatasetError(what, remedy="Use a different key for each value.") from error
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        remedy = 'Write one object a line, such as {"inputs": [1.5, 2], "targets": 0}.'
        raise DatasetError(f"{lines} is not a JSON object", remedy=remedy)
    return found


def _arrays(
    path: Path,
    parse: Parse,
    names: Sequence[str],
    kind: "type[_CsvColumn | _JsonColumn]",
) -> StoredArrays:
    """Read the file once, and return its columns."""
    columns = {name: kind() for name in names}
    offsets, n = [0], 0  # byte offsets of every 256th record
    with path.open("rb") as file:
        lines = _Lines(file)
        records = parse(lines)
        while block := list(islice(records, _EVERY)):
            for name, column in columns.items():
                column.scan([record.get(name) for record in block], n)
            n += len(block)
            offsets.append(lines.position)

    @lru_cache(maxsize=1)  # the columns share the records of a batch
    def read(start: int, stop: int) -> list[TextRecord]:
        block, skipped = divmod(start, _EVERY)
        with path.open("rb") as file:
            file.seek(offsets[block])
            found = list(islice(parse(_Lines(file)), skipped, skipped + stop - start))
        if len(found) != stop - start:
            remedy = "Do not change the file while a run reads it."
            raise DatasetError("the file has become shorter since it was opened", remedy=remedy)
        return found

    def load(name: str) -> StoredColumn:
        return columns[name].stored(n, lambda a, b: [record.get(name) for record in read(a, b)])

    return StoredArrays(tuple(names), load)


def _integers(fields: Sequence[str]) -> list[int]:
    """Return fields as integers, or raise ValueError for a different text."""
    return [int(field) for field in fields]


def _numbers(fields: Sequence[str]) -> list[float]:
    """Return fields as numbers (an empty field is NaN), or raise ValueError for other texts."""
    return [float(field) if field.strip() else np.nan for field in fields]


class _CsvColumn:
    """A column of fields: integers, or numbers with empty fields as NaN, or texts."""

    def __init__(self) -> None:
        self._parsers: list[Callable[[Sequence[str]], Sequence[float]]] = [_integers, _numbers]
        self._large: float | None = None  # the first integer that int64 cannot hold

    def scan(self, fields: Sequence[Any], start: int) -> None:
        """Drop the parsers that cannot parse some field."""
        if self._parsers and "_" in "".join(fields):  # Python reads 2020_01 as 202001
            self._parsers.clear()
        while self._parsers:
            try:
                numbers = self._parsers[0](fields)
            except ValueError:
                self._parsers.pop(0)
                continue
            if self._parsers[0] is _integers and self._large is None:
                self._large = next((n for n in numbers if not _LEAST <= n <= _MOST), None)
            return

    def stored(self, n: int, read: Values) -> StoredColumn:
        """Return numbers (N,) or texts."""
        if not self._parsers:
            return TextColumn(n, read)
        parser = self._parsers[0]
        dtype = np.dtype(np.int64 if parser is _integers else np.float64)
        if parser is _integers and self._large is not None:
            raise too_large(int(self._large))
        return NumberColumn(
            (n,),
            torch_dtype(dtype),
            lambda a, b: from_numpy(np.array(parser(read(a, b)), dtype)),
        )


class _JsonColumn:
    """A column of JSON values: numbers (null is NaN), texts, or lists of numbers."""

    def __init__(self) -> None:
        self._kind = ""  # "number", "text" or "list"
        self._type = 0  # an index into _TYPES
        self._row: tuple[int, ...] | None = None
        self._lengths = array("q")
        self._misfit: str | None = None

    def scan(self, values: Sequence[Any], start: int) -> None:
        """Find kind, dtype and lengths, and the first value of a different kind."""
        for k, value in enumerate(values, start):
            kind = "number"
            if isinstance(value, list):
                kind = "list"
            elif isinstance(value, str):
                kind = "text"
            fits = self._kind in ("", kind) and not isinstance(value, dict)
            if fits and kind == "list":
                self._lengths.append(len(value))
                fits = not value or self._add(value)
            elif fits and kind == "number" and not isinstance(value, bool):
                fits = not isinstance(value, int) or _LEAST <= value <= _MOST
                self._type = max(self._type, 1 if isinstance(value, int) else 2)
            if not fits and self._misfit is None:
                shown = repr(value)
                shown = shown if len(shown) < 60 else f"{shown[:57]}..."
                self._misfit = f"sample {k} is {shown}"
            self._kind = self._kind or kind

    def _add(self, value: list[Any]) -> bool:
        """Whether a list has numbers, with entries of the same shape as in earlier lists."""
        try:
            found = np.asarray(value)
        except ValueError:  # lists of several lengths inside
            return False
        if found.dtype.kind not in "bif" or self._row not in (None, found.shape[1:]):
            return False  # numpy converts integers beyond int64 to uint64 ("u")
        large = found.dtype.kind == "f" and bool((np.abs(found) >= float(_MOST)).any())
        if large and not any(isinstance(v, float) for v in np.asarray(value, object).flat):
            return False  # numpy converts a mix of small and large integers to float64
        self._row = found.shape[1:]
        self._type = max(self._type, "bif".index(found.dtype.kind))
        return True

    def stored(self, n: int, read: Values) -> StoredColumn:
        """Return numbers (N,), texts or sequences."""
        if self._misfit is not None:
            raise DatasetError(
                f"its values have different types: {self._misfit}",
                remedy="Write only numbers, only texts, or only lists of numbers of the same "
                "shape, and no integers beyond 64 bits.",
            )
        dtype, row = _TYPES[self._type], self._row or ()

        def numbers(start: int, stop: int) -> Tensor:
            found = read(start, stop)
            return from_numpy(np.array([np.nan if v is None else v for v in found], dtype))

        def sequences(start: int, stop: int) -> list[Tensor]:
            found = read(start, stop)
            return [from_numpy(np.array(v, dtype).reshape(len(v), *row)) for v in found]

        def sizes() -> SequenceSizes:
            return torch.tensor(self._lengths, dtype=torch.int64), row

        if self._kind == "text":
            return TextColumn(n, read)
        if self._kind == "number":
            return NumberColumn((n,), torch_dtype(dtype), numbers)
        return SequenceColumn(torch_dtype(dtype), sequences, sizes)
