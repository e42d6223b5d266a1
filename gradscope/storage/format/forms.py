"""The form in which a parameter's rows are stored: dense, or as the factors of their blocks.

kind "outer": left (N, k, t, r) and right (N, k, t, c); kind "scatter": index (N, t) and
rows (N, t, d). Half precision would round twice, so such factors are kept in float32, except those
that are bfloat16 themselves: they lose nothing, and everyone reads them as float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

import h5py
import numpy as np
import torch

from gradscope.blocks import Block
from gradscope.config import Compression
from gradscope.storage.format.layout import (
    KINDS,
    TABLES,
    Array,
    Shape,
    compression_of,
    rows_array,
    set_compression,
)
from gradscope.storage.format.numbers import (
    format_of,
    h5_type,
    name_of,
    named,
    stored_dtype,
    unescape,
)
from gradscope.storage.plan import FilePlan

DENSE = ""  # the name of the only data set of a dense column

_TEXT = h5py.string_dtype()


@dataclass(frozen=True)
class Form:
    """How a column's rows are stored, apart from how many they are."""

    shape: Shape  # of one row
    dtype: torch.dtype  # of dense rows
    kind: str | None = None  # of its factors; None for dense rows
    # the row shape and the format of each factor, by its name in the group
    factors: Mapping[str, tuple[Shape, torch.dtype]] = field(default_factory=dict)
    text: int | None = None  # the bytes of each entry where they are texts
    compression: Compression | None = None  # of all its data sets

    @property
    def dense(self) -> "Form":
        """The form of the same rows without factors."""
        return replace(self, kind=None, factors={})

    @property
    def parts(self) -> Mapping[str, tuple[Shape, torch.dtype]]:
        """The row shape and the format of each data set."""
        return self.factors if self.kind else {DENSE: (self.shape, self.dtype)}


def form_of(block: Block, plan: FilePlan) -> Form:
    """Return in what form a parameter's rows will be stored, by the first batch's block."""
    dtype = stored_dtype(block.dtype, plan.dtype)
    dense = Form(block.shape, dtype, compression=plan.compression)
    found = None if plan.layout == "dense" else block.factors()  # patches need not be made
    if found is None:
        return dense
    stored = {}
    for name, factor in found.tensors.items():
        kept = torch.int64
        if factor.is_floating_point() or factor.is_complex():
            kept = stored_dtype(factor.dtype, plan.dtype)
            if kept.itemsize <= 2 and not kept == factor.dtype == torch.bfloat16:
                kept = torch.float32
        stored[name] = tuple(factor.shape[1:]), kept
    size = sum(prod(shape) * kept.itemsize for shape, kept in stored.values())
    if plan.layout == "auto" and size >= prod(block.shape) * dtype.itemsize:
        return dense
    return replace(dense, kind=found.kind, factors=stored)


def stored_form(item: h5py.HLObject) -> Form:
    """Return in what form a column of a file is."""
    if isinstance(item, h5py.Dataset):
        text = item.dtype.itemsize if item.dtype.kind == "S" else None
        shape = tuple(item.shape[1:])
        return Form(shape, format_of(item), text=text, compression=compression_of(item))
    kind = str(item.attrs["kind"])
    return Form(
        shape=tuple(int(s) for s in item.attrs["shape"]),
        dtype=named(str(item.attrs["dtype"])),
        kind=kind,
        factors={k: (tuple(item[k].shape[1:]), format_of(item[k])) for k in KINDS[kind]},
        compression=compression_of(item[KINDS[kind][0]]),
    )


def create(group: h5py.Group, name: str, array: Array) -> h5py.Dataset:
    """Create a data set whose chunks have checksums; allocated at once unless it is compressed."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_obj_track_times(False)  # the same run gives the same bytes
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    if array.chunks is not None:
        plist.set_chunk(array.chunks)
        if array.compression is not None:
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)  # chunk sizes are not known yet
            set_compression(plist, array.compression)
        plist.set_fletcher32()
    shape = array.shape
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    kind = h5_type(array.dtype)
    if array.text is not None:  # UTF-8, with zeros behind a text
        kind = h5py.h5t.C_S1.copy()
        kind.set_size(array.text)
        kind.set_cset(h5py.h5t.CSET_UTF8)
        kind.set_strpad(h5py.h5t.STR_NULLPAD)
    made = h5py.h5d.create(group.id, name.encode(), kind, space, plist, utf8_links())
    return h5py.Dataset(made)


@cache
def utf8_links() -> h5py.h5p.PropLCID:
    """Return how names are stored."""
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    return links


def put_attribute(item: h5py.HLObject, name: str, values: np.ndarray, kind: np.dtype) -> None:
    """Write a new attribute: as `item.attrs` does, in a third of its time."""
    scalar = h5py.h5s.create(h5py.h5s.SCALAR)
    space = h5py.h5s.create_simple(values.shape) if values.shape else scalar
    made = h5py.h5a.create(item.id, name.encode(), h5py.h5t.py_create(kind, logical=True), space)
    made.write(values, h5py.h5t.py_create(kind))


def columns_of(path: str, form: Form, n: int, batch: int) -> dict[str, Array]:
    """Return the data sets of a column of n rows that come `batch` at a time."""
    if in_table(path):
        return {DENSE: Array((n,), form.dtype, None, form.text)}
    return {
        part: rows_array((n, *shape), dtype, batch, form.compression)
        for part, (shape, dtype) in form.parts.items()
    }


def create_columns(file: h5py.File, forms: Mapping[str, Form], n: int, batch: int) -> None:
    """Create the places of n rows that come `batch` at a time."""
    for path, form in forms.items():
        place, _, escaped = path.rpartition("/")
        group = file[place] if form.kind is None else factors_group(file[place], escaped, form)
        for part, array in columns_of(path, form, n, batch).items():
            made = create(group, part or escaped, array)
            if part == DENSE and place != "/samples":
                describe(made, unescape(escaped), "dense")


def factors_group(chain: h5py.Group, escaped: str, form: Form) -> h5py.Group:
    """Create the group for a parameter's factors."""
    group = chain.create_group(escaped)
    describe(group, unescape(escaped), "factored")
    group.attrs["kind"] = form.kind
    group.attrs["shape"] = np.array(form.shape, np.int64)
    group.attrs["dtype"] = name_of(form.dtype)
    return group


def describe(item: h5py.HLObject, name: str, representation: str) -> None:
    """Record the parameter's own name, unless HDF5 text cannot hold it, and the structure."""
    if "\0" not in name and not any("\ud800" <= c <= "\udfff" for c in name):
        put_attribute(item, "name", np.array(name, object), _TEXT)
    put_attribute(item, "representation", np.array(representation, object), _TEXT)


def in_table(path: str) -> bool:
    """Whether a column is one of the light tables, not of a chain."""
    return path.split("/")[1] in TABLES
