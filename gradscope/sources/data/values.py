"""What a column of a text file holds, found value by value: numbers, sequences of them, or text."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gradscope.errors import DatasetError
from gradscope.sources.data.columns import Ragged, Sliced, Stored, Texts, from_numpy

Read = Callable[[int, int], list[Any]]
_NUMBERS = (np.dtype(np.bool_), np.dtype(np.int64), np.dtype(np.float64))  # each holds those before


class Kind(Protocol):
    """What is known of a column so far."""

    def look(self, values: Sequence[Any], start: int) -> None:
        """Look at the values of the samples from `start` on."""

    def stored(self, n: int, read: Read) -> Stored:
        """Return the column, n samples whose values `read` returns."""


class Cells:
    """A column of fields: integers, else numbers with empty fields as NaN, else text."""

    def __init__(self) -> None:
        self._types: list[type] = [np.int64, np.float64]

    def look(self, values: Sequence[str], start: int) -> None:
        """Drop the types that some value is not of."""
        while self._types and _cells(values, self._types[0]) is None:
            self._types.pop(0)

    def stored(self, n: int, read: Read) -> Stored:
        """Return numbers (N,) or texts."""
        if not self._types:
            return Texts(n, read)
        dtype = self._types[0]

        def numbers(start: int, stop: int) -> Tensor:
            found = _cells(read(start, stop), dtype)
            if found is None:
                raise DatasetError(
                    "it no longer holds the numbers that it held when it was opened",
                    remedy="Leave the file as it is while a run reads it.",
                )
            return from_numpy(found)

        return Sliced((n,), torch.int64 if dtype is np.int64 else torch.float64, numbers)


class Values:
    """A column of JSON values: numbers (null is NaN), texts, or lists of numbers."""

    def __init__(self) -> None:
        self._first = ""  # "number", "text" or "list"
        self._dtype = 0
        self._row: tuple[int, ...] | None = None
        self._lengths = array("q")
        self._mixed: str | None = None

    def look(self, values: Sequence[Any], start: int) -> None:
        """Find kind, dtype and lengths, and the first value that does not fit in."""
        for k, value in enumerate(values, start):
            kind = _kind(value)
            self._first = self._first or kind
            if kind != self._first or kind == "other":
                self._mixed = self._mixed or f"sample {k} is {_shown(value)}"
            elif kind == "number":
                self._dtype = max(self._dtype, _rank(value))
            elif kind == "list":
                self._add(value, k)

    def stored(self, n: int, read: Read) -> Stored:
        """Return numbers (N,), texts or sequences.

        Raises:
            DatasetError: The values are of several kinds.
        """
        if self._mixed is not None:
            raise DatasetError(
                f"its values are not all of one kind: {self._mixed}",
                remedy="Write numbers, texts, or lists of numbers of one shape.",
            )
        dtype = _NUMBERS[self._dtype]
        made = from_numpy(np.empty(0, dtype)).dtype
        if self._first == "text":
            return Texts(n, read)
        if self._first == "number":

            def numbers(start: int, stop: int) -> Tensor:
                return from_numpy(np.array(_filled(read(start, stop)), dtype))

            return Sliced((n,), made, numbers)
        row = self._row or ()

        def sequences(start: int, stop: int) -> list[Tensor]:
            found = read(start, stop)
            return [from_numpy(np.array(v, dtype).reshape(len(v), *row)) for v in found]

        return Ragged(torch.tensor(self._lengths, dtype=torch.int64), row, made, sequences)

    def _add(self, value: list[Any], k: int) -> None:
        self._lengths.append(len(value))
        if not value:
            return
        try:
            found = np.asarray(value)
        except ValueError:  # lists of several lengths inside
            found = np.empty(0, object)
        if found.dtype.kind not in "biuf" or (self._row or found.shape[1:]) != found.shape[1:]:
            self._mixed = self._mixed or f"sample {k} is {_shown(value)}"
            return
        self._row = found.shape[1:]
        self._dtype = max(self._dtype, {"b": 0, "i": 1, "u": 1}.get(found.dtype.kind, 2))


def _cells(values: Sequence[str], dtype: type) -> np.ndarray | None:
    try:
        if dtype is np.float64:
            return np.array([float(v) if v.strip() else np.nan for v in values], np.float64)
        return np.array([int(v) for v in values], np.int64)
    except (ValueError, OverflowError):
        return None


def _filled(values: list[Any]) -> list[Any]:
    return [np.nan if v is None else v for v in values]


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list) else "other"


def _rank(value: Any) -> int:
    if isinstance(value, bool):
        return 0
    return 1 if isinstance(value, int) and -(2**63) <= value < 2**63 else 2


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
