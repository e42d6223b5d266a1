"""The structure of a result file: laid out by the first batch, and the results at the end."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import h5py
import numpy as np
import torch
from h5py import h5r
from torch import Tensor

import gradscope
from gradscope.storage.format.forms import (
    DENSE,
    Form,
    create,
    describe,
    form_of,
    put_attribute,
)
from gradscope.storage.format.layout import (
    AXES,
    FORMAT,
    FORMAT_VERSION,
    KEYS,
    TABLES,
    Array,
    Shape,
    datasets,
    result_array,
)
from gradscope.storage.format.numbers import escape, name_of
from gradscope.storage.plan import FilePlan, Rows, States, to_json

Shapes = Mapping[str, tuple[Shape, torch.dtype]]

_NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable. "  # netCDF-4's own marker
_LIST = np.dtype(
    {"names": ["dataset", "dimension"], "formats": [h5py.ref_dtype, "<u4"], "itemsize": 16}
)
_VECTOR = h5py.vlen_dtype(h5py.ref_dtype)

# What HDF5 1.10's format takes, measured; a test compares it with files.
_FILE = 8_000  # groups, the chains' texts, the certificate
_DATASET, _AXIS, _NAMED, _NUMBER = 285, 75, 120, 95  # with its link; an axis, two texts, a number
_CHUNKED, _INDEXED, _ENTRY = 25, 100, 16  # an index of several chunks, and each entry
_FACTOR, _SCALE = 350, 600  # half of a group of two factors; the name of an axis
_RECORD = 24  # of the seal


def describe_run(file: h5py.File, plan: FilePlan) -> None:
    """Record what the run is, and create the groups of an unfinished file."""
    file.attrs["format"] = FORMAT
    file.attrs["format_version"] = FORMAT_VERSION
    file.attrs["status"] = "incomplete"
    file.attrs["gradscope_version"] = gradscope.__version__
    for key, text in plan.attributes.items():
        file.attrs[key] = text
    file.attrs["run"] = to_json(plan.run)
    file.attrs["identity"] = to_json(plan.identity)
    file.attrs["parameters"] = to_json(plan.parameters)
    for name in (*TABLES, "chains"):
        file.create_group(name)
    for k, chain in enumerate(plan.chains):
        group = file.create_group(f"chains/{k}")
        group.attrs["chain"] = chain.text
        group.attrs["reduced"] = chain.reduced


def forms_of(plan: FilePlan, rows: Rows) -> dict[str, Form]:
    """Return in what form each column of tables and chains will be stored, by its path."""
    found = {f"/samples/{name}": _table_form(column) for name, column in rows.samples.items()}
    found |= {f"/norms/{escape(name)}": _table_form(c) for name, c in rows.norms.items()}
    for k, gradients in enumerate(rows.chains):
        for name, block in (gradients or {}).items():
            found[f"/chains/{k}/{escape(name)}"] = form_of(block, plan)
    return found


def _table_form(column: Tensor) -> Form:
    """Return the form of a column (N,) of the light table, by its first rows; (n, w) are texts."""
    if column.dim() == 2:
        return Form((), column.dtype, text=int(column.shape[1]))
    return Form((), torch.float32 if column.dtype == torch.bfloat16 else column.dtype)


def create_results(chain: h5py.Group, results: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Create data sets for aggregates {name: (*shape)}; return what goes where."""
    for name, value in results.items():
        array = result_array(tuple(value.shape), value.dtype)
        describe(create(chain, escape(name), array), name, "dense")
    return {f"{chain.name}/{escape(name)}": [value] for name, value in results.items()}


def create_states(file: h5py.File, states: States) -> dict[str, list[Tensor]]:
    """Create data sets for the reducers' states {owner: {key: tensor}}, and tell what goes where.

    Those of a number format lie one behind the other: of thousands of small tensors, each would
    take more for its data set than for its numbers.
    """
    made: dict[str, list[Tensor]] = {}
    for owner, state in states.items():
        group = file.require_group(f"states/{owner}")
        group.attrs[KEYS] = to_json(
            [[key, name_of(tensor.dtype), list(tensor.shape)] for key, tensor in state.items()]
        )
        shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}
        for name, array in state_arrays(shapes).items():
            dataset = create(group, name, array)
            made[str(dataset.name)] = [t for t in state.values() if name_of(t.dtype) == name]
    return made


def state_arrays(shapes: Shapes) -> dict[str, Array]:
    """Return how a state {key: (shape, dtype)} is stored, by the names of its number formats."""
    sizes: dict[torch.dtype, int] = {}
    for shape, dtype in shapes.values():
        sizes[dtype] = sizes.get(dtype, 0) + prod(shape)
    return {name_of(dtype): result_array((size,), dtype) for dtype, size in sizes.items()}


def attach_scales(file: h5py.File) -> None:
    """Name every axis of every data set, for xarray and other netCDF readers.

    `/sample` is the sample axis of everything. `/axisJ_S` is axis J of a parameter where it has
    size S; parameters share them. A factored group has its own scales k, t, r, c or t, d. They hold
    no data.

    The two lists that bind a data set and its scales to each other are written as HDF5 itself
    would, but each once: it writes a scale's whole list anew with every data set, which for
    thousands of them takes gigabytes and minutes.

    Source: HDF5 Dimension Scale Specification.
    """
    reduced = {k for k, chain in file["chains"].items() if chain.attrs["reduced"]}
    lists: dict[str, list[tuple[h5r.Reference, int]]] = {}  # of a scale: the axes it names
    scales: dict[str, tuple[h5py.Dataset, np.ndarray]] = {}
    for path, dataset in datasets(file):
        axes = list(_axes(path, dataset.shape, reduced))
        own = h5r.create(dataset.id, b".", h5r.OBJECT)
        vectors = np.empty(len(axes), object)
        for axis, name in enumerate(axes):
            if name not in scales:
                size = dataset.shape[axis]  # track_order lets its list grow beyond 64 KB
                made = file.create_dataset(name, (size,), ">f4", track_order=True)
                made.make_scale(f"{_NO_VARIABLE}{size:10d}")
                scales[name] = made, np.array([made.ref], object)
            lists.setdefault(name, []).append((own, axis))
            vectors[axis] = scales[name][1]
        if axes:
            put_attribute(dataset, "DIMENSION_LIST", vectors, _VECTOR)
    for name, entries in lists.items():
        put_attribute(scales[name][0], "REFERENCE_LIST", np.array(entries, _LIST), _LIST)


def _axes(path: str, shape: Shape, reduced: set[str]) -> Iterator[str]:
    """Yield the path of each axis's scale."""
    room, *parts = path.strip("/").split("/")
    has_samples = room in TABLES or (room == "chains" and parts[0] not in reduced)
    if has_samples:
        yield "/sample"
    if room == "chains" and len(parts) == 3:  # factors
        yield from (f"{path.removesuffix(parts[2])}{axis}" for axis in AXES[parts[2]])
    else:
        yield from (f"/axis{k}_{size}" for k, size in enumerate(shape[has_samples:]))


@dataclass(frozen=True)
class _Object:
    """A data set as it is to be: its array, the parameter it is of, and what else it has."""

    array: Array
    name: str = ""
    numbers: int = 0  # attributes
    factor: str = ""  # its name in a group of factors

    @property
    def structure(self) -> int:
        """About how many bytes HDF5 and the seal need besides the numbers."""
        array, named = self.array, _NAMED + self.numbers * _NUMBER + 2 * len(self.name)
        size = _DATASET + _AXIS * len(array.shape) + (named if self.name else 0)
        if array.chunks is not None:
            size += _CHUNKED + (_INDEXED + _ENTRY * array.pieces if array.pieces > 1 else 0)
        return size + _RECORD * max(1, array.pieces)


def file_bytes(
    plan: FilePlan, rows: Rows, results: Sequence[Shapes], states: Sequence[Shapes] = ()
) -> tuple[int, int]:
    """Return the bytes of a file: of its numbers, exactly; and of its structure, about.

    Args:
        plan: What will be stored; with its layout and number format.
        rows: Any batch: how blocks are structured decides how they are stored.
        results: {name: (shape, dtype)} of the aggregates of each reduced chain.
        states: {key: (shape, dtype)} of each reducer whose state is kept.
    """
    objects = list(_objects(plan, rows))
    for shapes in results:
        objects += (_Object(result_array(*one), name) for name, one in shapes.items())
    for shapes in states:
        objects += (_Object(array) for array in state_arrays(shapes).values())
    documents: list[Any] = [plan.run, plan.identity, plan.parameters]
    documents += [[[key, "float64", shape] for key, (shape, _) in s.items()] for s in states]
    axes = {pair for o in objects if not o.factor for pair in enumerate(o.array.shape)}
    factored = [o for o in objects if o.factor]
    structure = _FILE + sum(len(to_json(document).encode()) for document in documents)
    structure += sum(o.structure for o in objects) + _SCALE * len(axes)
    structure += sum(_SCALE * len(AXES[o.factor]) + _FACTOR for o in factored)
    return sum(o.array.nbytes for o in objects), structure


def _objects(plan: FilePlan, rows: Rows) -> Iterator[_Object]:
    """Yield the data sets with a sample axis; of an estimate, never compressed."""
    for path, form in forms_of(plan, rows).items():
        if path.startswith("/samples/"):
            yield _Object(Array((plan.n,), form.dtype, text=form.text))
        elif path.startswith("/norms/"):
            yield _Object(Array((plan.n,), form.dtype), path.rpartition("/")[2], numbers=1)
        else:
            for part, array in form.arrays(plan.n, len(rows.index)).items():
                name = path.rpartition("/")[2] if part == DENSE else ""
                yield _Object(array, name, factor=part)
