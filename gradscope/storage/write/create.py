"""Creation of a result file: the first batch lays out the structure, the end completes it."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from h5py import h5r
from torch import Tensor

from gradscope.core.precision import dtype_name
from gradscope.errors import OutputError, ResultFileError
from gradscope.storage.format.files import secure_space, sync_folder
from gradscope.storage.format.layout import (
    AXES,
    FORMAT,
    FORMAT_VERSION,
    KEYS,
    TABLES,
    Array,
    Form,
    Shape,
    columns_of,
    create,
    create_columns,
    datasets,
    describe,
    form_of,
    put_attribute,
    result_array,
)
from gradscope.storage.format.numbers import escape
from gradscope.storage.format.seal import write_seal
from gradscope.storage.plan import FilePlan, FinishedBatch, States, to_json
from gradscope.storage.read.file import GradientFile, open_file
from gradscope.storage.write.journal import Paths, require_intact
from gradscope.storage.write.region import ASIDE, Region, Regions
from gradscope.storage.write.target import Target
from gradscope.version import VERSION

Inspect = Callable[[GradientFile], None]
Shapes = Mapping[str, tuple[Shape, torch.dtype]]

_NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable. "  # netCDF-4's own marker
_LIST = np.dtype(
    {"names": ["dataset", "dimension"], "formats": [h5py.ref_dtype, "<u4"], "itemsize": 16}
)
_VECTOR = h5py.vlen_dtype(h5py.ref_dtype)

# Measured sizes in bytes in HDF5 1.10's format; a test compares them with files.
_FILE = 8_000  # groups, the chains' texts, the certificate
# a data set with its link; an axis; two text attributes; a number attribute
_DATASET, _AXIS, _NAMED, _NUMBER = 285, 75, 120, 95
_CHUNKED, _INDEXED, _ENTRY = 25, 100, 16  # a chunked layout; its index; an index entry
_FACTOR, _SCALE = 350, 600  # half of a group of two factors; the name of an axis
_RECORD = 24  # a record of the seal


def lay_out(
    paths: Paths,
    target: Target,
    plan: FilePlan,
    forms: Mapping[str, Form],
    batch_size: int,
    more: Callable[[h5py.File], None] = lambda file: None,
) -> Regions:
    """Create the `.part` with the run's attributes and all columns; `more` may add to it."""
    os.ftruncate(target.descriptor, 0)
    with target.editing() as file:
        file.attrs["format"] = FORMAT
        file.attrs["format_version"] = FORMAT_VERSION
        file.attrs["status"] = "incomplete"
        file.attrs["gradscope_version"] = VERSION
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
        more(file)
        create_columns(file, forms, plan.n, batch_size)
        regions = Regions.of(file)
    secure_space(paths.part, target.descriptor)
    return regions


def forms_of(plan: FilePlan, rows: FinishedBatch) -> dict[str, Form]:
    """Return {path: form} of each column of tables and chains."""
    tables = {f"/samples/{name}": column for name, column in rows.samples.items()}
    tables |= {f"/norms/{escape(name)}": column for name, column in rows.norms.items()}
    found = {}
    for path, column in tables.items():  # a column (n, w) has texts
        dtype = torch.float32 if column.dtype == torch.bfloat16 else column.dtype
        found[path] = Form((), dtype, text=int(column.shape[1]) if column.dim() == 2 else None)
    for k, gradients in enumerate(rows.chains):
        for name, block in (gradients or {}).items():
            found[f"/chains/{k}/{escape(name)}"] = form_of(block, plan)
    return found


def complete(
    paths: Paths,
    target: Target,
    regions: Regions,
    results: Mapping[int, Mapping[str, Tensor]],
    certificate: Mapping[str, Any],
    norm_attributes: Mapping[str, Mapping[str, float]],
    states: States,
    look: Inspect | None,
) -> None:
    """Complete the `.part`, which has all rows, and rename it to the final file.

    Before that, every byte is read back and compared with its checksum. For the remaining
    arguments, see `Writer.finish`.
    """
    with target.editing() as file:
        if ASIDE in file:
            del file[ASIDE]
        regions = regions.without_aside
        filling: dict[str, list[Tensor]] = {}
        for k, values in results.items():
            for name, value in values.items():
                array = result_array(tuple(value.shape), value.dtype)
                made = create(file[f"chains/{k}"], escape(name), array)
                describe(made, name, "dense")
                filling[str(made.name)] = [value]
        filling |= create_states(file, states)
        for path, region in regions.by_path.items():
            if region.mark.overflowed:
                file[path].attrs["overflowed"] = region.mark.overflowed
        for name, attributes in norm_attributes.items():
            for key, number in attributes.items():
                file[f"norms/{escape(name)}"].attrs[key] = float(number)
        attach_scales(file)
        added = {path: Region(file[path]) for path in filling}
        file.attrs["certificate"] = to_json(certificate)
        file.attrs["status"] = "complete"
    for path, tensors in filling.items():
        for tensor in tensors:
            added[path].add(tensor, target)
    target.close()
    records = [regions.records(regions.marks), *(r.records(r.mark) for r in added.values())]
    table = np.concatenate(records)
    table = table[np.argsort(table[:, 0])]
    require_intact(paths.part, target.descriptor, table)
    write_seal(target.descriptor, table)
    _verify(paths.part, look)
    os.fsync(target.descriptor)
    paths.part.replace(paths.final)
    paths.progress.unlink(missing_ok=True)
    sync_folder(paths.final)


def _verify(part: Path, look: Inspect | None) -> None:
    """Open the file with all checks of a reader, and call `look` with it."""
    try:
        with open_file(part) as file:
            if look is not None:
                look(file)
    except ResultFileError as error:
        raise OutputError(
            f"the file was written, but reading it back failed: {error.what}",
            where=str(part),
            remedy="Check the disk, which may be failing. Run the command again: gradscope compute "
            "and attribute continue with --resume.",
        ) from error


def create_states(file: h5py.File, states: States) -> dict[str, list[Tensor]]:
    """Create data sets for the reducers' states; return {path: tensors to write}.

    All tensors of an owner with the same dtype share a data set, one after the other. Otherwise,
    thousands of small tensors would need more space for their data sets than for their numbers.
    """
    made: dict[str, list[Tensor]] = {}
    for owner, state in states.items():
        group = file.require_group(f"states/{owner}")
        group.attrs[KEYS] = to_json(
            [[key, dtype_name(tensor.dtype), list(tensor.shape)] for key, tensor in state.items()]
        )
        shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}
        for name, array in state_arrays(shapes).items():
            dataset = create(group, name, array)
            made[str(dataset.name)] = [t for t in state.values() if dtype_name(t.dtype) == name]
    return made


def state_arrays(shapes: Shapes) -> dict[str, Array]:
    """Return {dtype name: data set} for a state {key: (shape, dtype)}."""
    sizes: dict[torch.dtype, int] = {}
    for shape, dtype in shapes.values():
        sizes[dtype] = sizes.get(dtype, 0) + prod(shape)
    return {dtype_name(dtype): result_array((size,), dtype) for dtype, size in sizes.items()}


def attach_scales(file: h5py.File) -> None:
    """Name every axis of every data set, for xarray and other netCDF readers.

    Every sample axis is `/sample`. Axis J of size S of a parameter is `/axisJ_S`, which parameters
    share. A factored group has its own scales k, t, r, c or t, d. Scales hold no data.

    DIMENSION_LIST and REFERENCE_LIST link data sets and scales in HDF5's own form. Each list is
    written once. HDF5 itself rewrites a scale's list for every data set, which takes gigabytes and
    minutes for thousands of data sets.

    Source: HDF5 Dimension Scale Specification.
    """
    reduced = {k for k, chain in file["chains"].items() if chain.attrs["reduced"]}
    lists: dict[str, list[tuple[h5r.Reference, int]]] = {}  # {scale: axes with this scale}
    scales: dict[str, tuple[h5py.Dataset, np.ndarray]] = {}
    for path, dataset in datasets(file):
        axes = list(_axes(path, dataset.shape, reduced))
        own = h5r.create(dataset.id, b".", h5r.OBJECT)
        vectors = np.empty(len(axes), object)
        for axis, name in enumerate(axes):
            if name not in scales:
                size = dataset.shape[axis]  # track_order allows lists of more than 64 KB
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
    """Yield the path of the scale of each axis."""
    room, *parts = path.strip("/").split("/")
    has_samples = room in TABLES or (room == "chains" and parts[0] not in reduced)
    if has_samples:
        yield "/sample"
    if room == "chains" and len(parts) == 3:  # factors
        yield from (f"{path.removesuffix(parts[2])}{axis}" for axis in AXES[parts[2]])
    else:
        yield from (f"/axis{k}_{size}" for k, size in enumerate(shape[has_samples:]))


def file_bytes(
    plan: FilePlan, rows: FinishedBatch, results: Sequence[Shapes], states: Sequence[Shapes] = ()
) -> tuple[int, int]:
    """Return (the exact bytes of the file's numbers, the approximate bytes of its structure).

    Args:
        plan: The plan of the file.
        rows: Any batch; the structure of its blocks decides the forms of the columns.
        results: {name: (shape, dtype)} of the aggregates of each reduced chain.
        states: {key: (shape, dtype)} of each reducer whose state is stored.
    """
    found: list[tuple[Array, str, str]] = []  # (data set, parameter name, factor name)
    for path, form in forms_of(plan, rows).items():
        name = "" if path.startswith("/samples/") else path.rpartition("/")[2]
        made = columns_of(path, form, plan.n, len(rows))
        found += ((array, "" if factor else name, factor) for factor, array in made.items())
    for shapes in results:
        found += ((result_array(*one), name, "") for name, one in shapes.items())
    for shapes in states:
        found += ((array, "", "") for array in state_arrays(shapes).values())
    documents: list[Any] = [plan.run, plan.identity, plan.parameters]
    documents += [[[key, "float64", shape] for key, (shape, _) in s.items()] for s in states]
    structure = _FILE + sum(len(to_json(document).encode()) for document in documents)
    structure += _NUMBER * len(rows.norms)
    axes = set()
    for array, name, factor in found:
        structure += _DATASET + _AXIS * len(array.shape) + _RECORD * max(1, array.pieces)
        structure += _NAMED + 2 * len(name) if name else 0
        if array.chunks is not None:
            structure += _CHUNKED + (_INDEXED + _ENTRY * array.pieces if array.pieces > 1 else 0)
        if factor:
            structure += _SCALE * len(AXES[factor]) + _FACTOR
        else:
            axes |= set(enumerate(array.shape))
    return sum(array.nbytes for array, _, _ in found), structure + _SCALE * len(axes)
