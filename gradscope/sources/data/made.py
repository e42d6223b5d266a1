"""Columns as the spec makes them: texts tokenized or numbered, sequences padded, with a mask.

Padding goes to the longest sequence of the whole data set, not of a batch: a sample's gradient
must not depend on which others share its batch.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from gradscope.config import DatasetSpec
from gradscope.core.registry import suggestion
from gradscope.errors import DatasetError
from gradscope.sources.conversion import dtype_name
from gradscope.sources.data.columns import Arrays, Column, Ragged, Sliced, Stored, Texts, even
from gradscope.sources.data.tokens import tokenized

MASK = "_mask"


def made(spec: DatasetSpec, arrays: Arrays) -> tuple[tuple[str, ...], Callable[[str], Column]]:
    """Return the names of all arrays, and a function from a name to its numbers (N, ...).

    It raises a `DatasetError` where they are not numbers of one shape.
    """
    padded = dict.fromkeys((*spec.pad, *spec.length, *spec.tokenizer))
    stored_names = frozenset(arrays.names)
    names = tuple(dict.fromkeys((*arrays.names, *(f"{name}{MASK}" for name in padded))))

    @cache
    def encoded(name: str) -> tuple[Stored, float | None]:
        """Return a column, texts as numbers, and what it is padded with."""
        stored, value = arrays.load(name), spec.pad.get(name)
        if name in spec.tokenizer:
            ids, own = tokenized(_texts(stored, name), spec.tokenizer[name])
            return ids, own if value is None else value
        if name in spec.classes:
            return _numbered(_texts(stored, name), spec.classes[name]), value
        return stored, value

    def column(name: str) -> Column:
        source = name.removesuffix(MASK)
        if name not in stored_names and source in padded:
            stored, value = encoded(source)
            return _mask(_sequences(stored, source), spec.length.get(source))
        stored, value = encoded(name)
        if isinstance(stored, Texts):
            raise _text(stored)
        if name in padded:
            return _padded(_sequences(stored, name), value, spec.length.get(name), name)
        return even(stored) if isinstance(stored, Ragged) else stored

    return names, column


def _texts(stored: Stored, name: str) -> Texts:
    if not isinstance(stored, Texts):
        raise DatasetError(
            "it holds numbers, not texts",
            remedy=f"Take {name} out of [dataset] tokenizer and classes.",
        )
    return stored


def _text(stored: Texts) -> DatasetError:
    some = ", ".join(map(repr, stored.read(0, min(3, stored.n))))
    return DatasetError(
        f"it holds text, such as {some}",
        remedy="[dataset] classes lists the texts that stand for 0, 1, ...; [dataset] tokenizer "
        "makes token ids of them.",
    )


def _numbered(stored: Texts, classes: Sequence[str]) -> Column:
    numbers = {text: k for k, text in enumerate(classes)}

    def read(start: int, stop: int) -> Tensor:
        texts = stored.read(start, stop)
        unknown = next((t for t in texts if t not in numbers), None)
        if unknown is not None:
            raise DatasetError(
                f"it holds {unknown!r}, which is none of the classes",
                remedy=suggestion(unknown, list(classes)),
            )
        return torch.tensor([numbers[text] for text in texts])

    return Sliced((stored.n,), torch.int64, read)


def _sequences(stored: Stored, name: str) -> Ragged:
    if isinstance(stored, Ragged):
        return stored
    if isinstance(stored, Texts):
        raise _text(stored)
    if len(stored.shape) < 2:
        raise DatasetError(
            "its samples are no sequences, so there is nothing to pad",
            remedy=f"Take {name} out of [dataset] pad and length.",
        )
    n, length, *row = stored.shape
    return Ragged(
        torch.full((n,), length),
        tuple(row),
        stored.dtype,
        lambda a, b: list(stored[a:b]),
    )


def _padded(found: Ragged, value: float | None, length: int | None, name: str) -> Column:
    """Return sequences (N, t, ...), filled up to the longest of all, or to `length`."""
    width = _width(found, length)
    if value is None and bool((found.lengths < width).any()):
        raise DatasetError(
            f"some of its samples have fewer than {width:,} entries",
            remedy=f"[dataset] pad = {{ {name} = 0 }} says what they are filled up with.",
        )
    filler = _filler(0 if value is None else value, found.dtype)
    shape = (len(found.lengths), width, *found.row)

    def read(start: int, stop: int) -> Tensor:
        rows = filler.expand(stop - start, *shape[1:]).clone()
        for row, sequence in zip(rows, found.read(start, stop), strict=True):
            row[: len(sequence)] = sequence[:width]
        return rows

    return Sliced(shape, found.dtype, read)


def _filler(value: float, dtype: torch.dtype) -> Tensor:
    """Return what sequences are filled up with, in their own dtype; it is never cut or wrapped."""
    wanted = torch.tensor(value, dtype=torch.float64)
    filler = wanted.to(dtype)
    rounded = dtype.is_floating_point or dtype.is_complex
    if not (filler.isfinite() if rounded else filler.to(torch.float64) == wanted):
        raise DatasetError(
            f"it holds {dtype_name(dtype)}, which cannot be filled up with {value}",
            remedy="Give [dataset] pad a number that they can be.",
        )
    return filler


def _mask(found: Ragged, length: int | None) -> Column:
    """Return which entries are a sample's own, (N, t) bool."""
    width = _width(found, length)
    return Sliced(
        (len(found.lengths), width),
        torch.bool,
        lambda a, b: torch.arange(width) < found.lengths[a:b, None],
    )


def _width(found: Ragged, length: int | None) -> int:
    return int(found.lengths.max()) if length is None else length
