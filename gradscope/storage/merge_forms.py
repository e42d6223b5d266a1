"""The forms in which rows are stored, and the one that holds those of several files."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import h5py
import torch

from gradscope.config import Compression
from gradscope.storage.columns import create_dense, create_factors, describe, rows_array
from gradscope.storage.compression import compression_of
from gradscope.storage.factors import KINDS
from gradscope.storage.formats import format_of, named
from gradscope.storage.integrity import TABLES
from gradscope.storage.layout import Array, Shape, create
from gradscope.storage.names import unescape

DENSE = ""  # the name of the only data set of a dense column


@dataclass(frozen=True)
class Form:
    """How a column's rows are stored, apart from how many they are.

    Attributes:
        shape: Of one row.
        dtype: Of dense rows.
        kind: Of its factors; None for dense rows.
        parts: The row shape and the format of each data set, by its name in the group.
        text: The bytes of each entry where they are texts.
        compression: Of all its data sets.
    """

    shape: Shape
    dtype: torch.dtype
    kind: str | None
    parts: Mapping[str, tuple[Shape, torch.dtype]]
    text: int | None = None
    compression: Compression | None = None

    @property
    def dense(self) -> "Form":
        """The form of the same rows without factors."""
        return replace(self, kind=None, parts={DENSE: (self.shape, self.dtype)})


def in_table(path: str) -> bool:
    """Whether a column is one of the light tables, not of a chain."""
    return path.split("/")[1] in TABLES


def forms_of(file: h5py.File) -> dict[str, Form]:
    """Return the form of each column of tables and chains, by its path."""
    found = {
        f"/{table}/{name}": _form(item) for table in TABLES for name, item in file[table].items()
    }
    for k, chain in file["chains"].items():
        if not chain.attrs["reduced"]:
            found |= {f"/chains/{k}/{name}": _form(item) for name, item in chain.items()}
    return found


def common(a: Form, b: Form) -> Form | None:
    """Return the form that holds the rows of both, None where their rows are of two kinds.

    Factors of different sizes have none in common, so their rows become dense, as they do when
    sizes change within one run.
    """
    if a == b:
        return a
    return a.dense if (a.shape, a.dtype) == (b.shape, b.dtype) else None


def create_columns(file: h5py.File, forms: Mapping[str, Form], n: int, batch: int) -> None:
    """Create the places of n rows that come `batch` at a time, as a run would."""
    for path, form in forms.items():
        place, _, escaped = path.rpartition("/")
        group, name = file[place], unescape(escaped)
        if in_table(path):
            made = create(group, escaped, Array((n,), form.dtype, None, form.text))
            if place == "/norms":
                describe(made, name, "dense")
        elif form.kind is None:
            array = rows_array((n, *form.shape), form.dtype, batch, form.compression)
            create_dense(group, name, array)
        else:
            arrays = {
                part: rows_array((n, *shape), dtype, batch, form.compression)
                for part, (shape, dtype) in form.parts.items()
            }
            create_factors(group, name, form.kind, form.shape, form.dtype, arrays)


def _form(item: h5py.HLObject) -> Form:
    if isinstance(item, h5py.Dataset):
        shape, dtype = tuple(item.shape[1:]), format_of(item)
        text = item.dtype.itemsize if item.dtype.kind == "S" else None
        return Form(shape, dtype, None, {DENSE: (shape, dtype)}, text, compression_of(item))
    kind = str(item.attrs["kind"])
    return Form(
        shape=tuple(int(s) for s in item.attrs["shape"]),
        dtype=named(str(item.attrs["dtype"])),
        kind=kind,
        parts={part: (tuple(item[part].shape[1:]), format_of(item[part])) for part in KINDS[kind]},
        compression=compression_of(item[KINDS[kind][0]]),
    )
