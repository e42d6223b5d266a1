"""Text formats: .csv and .jsonl, one record a sample, read in slices.

A first pass counts the records, remembers where some of them begin, and finds what each column
holds: all of a column is numbers, or it is text.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from gradscope.errors import DatasetError
from gradscope.sources.data.columns import Stored, StoredArrays, reading
from gradscope.sources.data.readers import dataset_readers, matching
from gradscope.sources.data.values import Cells, Kind, Values
from gradscope.sources.listing import listed

_EVERY = 256  # records between two places that are remembered
_LONGEST = 2**28  # bytes of a line
_FIELD = 2**27  # characters of a field
_HEAD = 2**20  # bytes by which a separator is found
_LOOK = 20  # records of which a separator must make the same number of fields
_SEPARATORS = (",", "\t", ";", "|")

Record = Sequence[Any]


@dataclass(frozen=True)
class Records:
    """The records of a text file.

    Attributes:
        path: The file.
        parse: Makes records of the lines from some place on.
        marks: Where every 256th record begins, in bytes.
        n: How many there are.
    """

    path: Path
    parse: Callable[[Iterator[str]], Iterator[Record]]
    marks: tuple[int, ...]
    n: int

    def read(self, start: int, stop: int) -> list[Record]:
        """Return the records from `start` up to `stop`."""
        block, skipped = divmod(start, _EVERY)
        with reading(self.path), self.path.open("rb") as file:
            file.seek(self.marks[block])
            found = list(islice(self.parse(_Lines(file)), skipped, skipped + stop - start))
        if len(found) != stop - start:
            raise DatasetError(
                "the file has become shorter since it was opened",
                where=str(self.path),
                remedy="Leave it as it is while a run reads it.",
            )
        return found


class _Lines:
    """The lines of a file from where it stands, decoded; `position` is where the next begins."""

    def __init__(self, file: Any) -> None:
        self._file, self.position, self.number = file, file.tell(), 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        raw = self._file.readline(_LONGEST)
        if not raw:
            raise StopIteration
        if len(raw) == _LONGEST:
            raise DatasetError(
                f"a line is longer than {_LONGEST:,} bytes", remedy="Write one sample a line."
            )
        try:
            text = str(raw.decode("utf-8-sig" if self.position == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            raise DatasetError(
                f"not UTF-8 text at byte {self.position + error.start}", remedy="Save it as UTF-8."
            ) from error
        self.position += len(raw)
        self.number += 1
        return text


def is_jsonl(head: bytes) -> bool:
    """Whether a file that begins like this has JSON objects as lines."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{" and b"\0" not in head


def is_csv(head: bytes) -> bool:
    """Whether a file that begins like this has lines of equally many fields."""
    return separator(head) is not None


def separator(head: bytes) -> str | None:
    """Return what separates the fields of a table that begins like this, None for no table."""
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


@dataset_readers.register("jsonl")
@matching(is_jsonl)
def open_jsonl(path: Path) -> StoredArrays:
    """JSON objects, one a line: numbers, texts, lists of numbers."""

    def parse(lines: Iterator[str]) -> Iterator[Record]:
        for line in lines:
            if line.strip():
                yield (_object(line, lines),)

    names: list[str] = []
    with reading(path), path.open("rb") as file:
        for (first,) in parse(_Lines(file)):
            names = list(first)
            break

    def pick(record: Record, name: str) -> Any:
        return record[0].get(name)

    return _arrays(path, parse, names, pick, Values)


@dataset_readers.register("csv")
@matching(is_csv)
def open_csv(path: Path) -> StoredArrays:
    """Comma-separated values (or tabs, semicolons), with or without names in the first line."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
        while head.count(b"\n") < 2 and len(head) < _LONGEST and (more := file.read(len(head))):
            head += more  # there may be tens of thousands of columns
    mark = separator(head) or ","
    csv.field_size_limit(_FIELD)
    with reading(path), path.open("rb") as file:
        first = next((r for r in csv.reader(_Lines(file), delimiter=mark) if r), [])
    headless = bool(first) and all(_is_number(cell) for cell in first)
    names = [
        str(k) if headless or not name.strip() else name.strip() for k, name in enumerate(first)
    ]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DatasetError(
            f"several columns are called {listed(map(repr, twice), 3)}",
            where=str(path),
            remedy="Give every column a name of its own in the first line.",
        )
    places = {name: k for k, name in enumerate(names)}

    def parse(lines: Iterator[str]) -> Iterator[Record]:
        skip = not headless and getattr(lines, "position", 1) == 0
        for record in csv.reader(lines, delimiter=mark, strict=True):
            if not record:
                continue
            if len(record) != len(names):
                raise DatasetError(
                    f"{_place(lines)} has {len(record)} fields, the first line {len(names)}",
                    remedy="Give every line a field for each column; quote fields with commas.",
                )
            if not skip:
                yield record
            skip = False

    note = f"the first line of {path.name} holds numbers, so the columns are called 0, 1, ..."
    arrays = _arrays(path, parse, names, lambda record, name: record[places[name]], Cells)
    return StoredArrays(arrays.names, arrays.load, (note,) if headless else ())


def _arrays(
    path: Path,
    parse: Callable[[Iterator[str]], Iterator[Record]],
    names: Sequence[str],
    pick: Callable[[Record, str], Any],
    kind: Callable[[], Kind],
) -> StoredArrays:
    """Go through the file once, and return its columns."""
    kinds = {name: kind() for name in names}
    marks, n = [0], 0
    with reading(path), path.open("rb") as file:
        lines = _Lines(file)
        records = parse(lines)
        while block := list(islice(records, _EVERY)):
            for name, found in kinds.items():
                found.look([pick(record, name) for record in block], n)
            n += len(block)
            marks.append(lines.position)
    whole = Records(path, parse, tuple(marks), n)
    read = lru_cache(maxsize=1)(whole.read)  # the columns share the records of a batch

    def load(name: str) -> Stored:
        def cells(start: int, stop: int) -> list[Any]:
            return [pick(record, name) for record in read(start, stop)]

        with reading(path, name):
            return kinds[name].stored(n, cells)

    return StoredArrays(tuple(names), load)


class _TwiceError(Exception):
    """A key of an object is there twice."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        count = Counter(name for name, _ in pairs)
        raise _TwiceError(repr(count.most_common(1)[0][0]))
    return found


def _object(line: str, lines: Any) -> dict[str, Any]:
    try:
        found = json.loads(line, object_pairs_hook=_distinct)
    except _TwiceError as error:
        raise DatasetError(
            f"{_place(lines)} has {error} twice", remedy="Give every value a key of its own."
        ) from error
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DatasetError(
            f"{_place(lines)} is no JSON object",
            remedy='Write one object a line, such as {"inputs": [1.5, 2], "targets": 0}.',
        )
    return found


def _place(lines: Any) -> str:
    return f"line {lines.number}" if lines.number else "a line"


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
