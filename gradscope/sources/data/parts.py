"""Columns put together: `columns = { inputs = ["age", "pixel*", "table[0:3]"], targets = "y" }`."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from gradscope.core.registry import suggestion
from gradscope.errors import DatasetError
from gradscope.sources.data.columns import (
    Arrays,
    Column,
    Ragged,
    Sliced,
    Stored,
    StoredArrays,
    Texts,
    even,
)

_CUT = re.compile(r"(?P<name>.*)\[(?P<start>\d{0,9})(?P<colon>:?)(?P<stop>\d{0,9})\]", re.DOTALL)
_FORMS = "Accepted: NAME, NAME[A:B] along its second axis, [A:B] of all columns, globs."


def composed(arrays: Arrays, columns: Mapping[str, str | Sequence[str]]) -> StoredArrays:
    """Return the arrays of a file with those that `columns` makes of them in front.

    A text names one column; a list puts columns side by side, along axis 1.
    """
    known = frozenset(arrays.names)

    def load(name: str) -> Stored:
        recipe = columns.get(name)
        if recipe is None:
            return arrays.load(name)
        if not isinstance(recipe, str):
            return _beside([part for text in recipe for part in _parts(arrays, known, text)])
        found = _parts(arrays, known, recipe)
        if len(found) > 1:
            raise DatasetError(
                f"{recipe!r} names {len(found)} columns",
                remedy=f"Write [{recipe!r}] to put them side by side.",
            )
        return found[0]

    return StoredArrays(tuple(dict.fromkeys((*columns, *arrays.names))), load)


def _parts(arrays: Arrays, known: frozenset[str], text: str) -> list[Stored]:
    names = arrays.names
    if text in known:
        return [arrays.load(text)]
    cut = _CUT.fullmatch(text)
    if cut and cut["name"] in known:
        return [_cut(arrays.load(cut["name"]), cut, text)]
    if cut and not cut["name"]:
        chosen = names[_span(cut, len(names), text)]
    else:
        match = re.compile(fnmatch.translate(text)).match
        chosen = tuple(filter(match, names))
    if not chosen:
        some = list(names) if len(names) <= 20 else [*names[:20], "..."]
        raise DatasetError(
            f"there is no column {text!r} in the file",
            remedy=f"{suggestion(text, some).replace('Supported', 'It holds')} {_FORMS}",
        )
    return [arrays.load(name) for name in chosen]


def _cut(stored: Stored, cut: re.Match[str], text: str) -> Stored:
    """Return some columns of a table (N, k, ...), one alone without its axis."""
    if isinstance(stored, Ragged):
        stored = even(stored)
    if isinstance(stored, Texts) or len(stored.shape) < 2:
        raise DatasetError(f"{text!r} cuts a column that has no second axis", remedy=_FORMS)
    table, span = stored, _span(cut, stored.shape[1], text)
    kept = (span.stop - span.start,) if cut["colon"] else ()

    def read(start: int, stop: int) -> Tensor:
        rows = table[start:stop][:, span]
        return rows if cut["colon"] else rows[:, 0]

    return Sliced((table.shape[0], *kept, *table.shape[2:]), table.dtype, read)


def _span(cut: re.Match[str], width: int, text: str) -> slice:
    start = int(cut["start"] or 0)
    stop = int(cut["stop"]) if cut["stop"] else width if cut["colon"] else start + 1
    if not 0 <= start < stop <= width:
        raise DatasetError(
            f"{text!r} is out of range: there are {width} columns",
            remedy=f"Columns are counted from 0; give A:B with A < B ≤ {width}.",
        )
    return slice(start, stop)


def _beside(parts: Sequence[Stored]) -> Column:
    """Return columns (N,) and tables (N, k, ...) side by side, along axis 1."""
    tables: list[Column] = []
    for part in parts:
        if isinstance(part, Texts):
            raise DatasetError(
                "a column of text cannot stand beside numbers",
                remedy="Name it alone, as a text and not in a list.",
            )
        tables.append(even(part) if isinstance(part, Ragged) else part)
    shapes = [(*t.shape, 1) if len(t.shape) == 1 else tuple(t.shape) for t in tables]
    if len({(s[0], *s[2:]) for s in shapes}) > 1:
        raise DatasetError(
            f"columns of the shapes {shapes} cannot stand side by side",
            remedy="All axes but the second must agree.",
        )
    dtype = reduce(torch.promote_types, (t.dtype for t in tables))
    shape = (shapes[0][0], sum(s[1] for s in shapes), *shapes[0][2:])

    def read(start: int, stop: int) -> Tensor:
        rows = [table[start:stop].to(dtype) for table in tables]
        return torch.cat([r[:, None] if r.dim() == 1 else r for r in rows], 1)

    return Sliced(shape, dtype, read)
