"""The structure of a result file: laid out by the first batch, and the results at the end."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from math import prod

import h5py
import torch
from torch import Tensor

from gradscope.storage.columns import create_column, describe
from gradscope.storage.formats import name_of
from gradscope.storage.layout import Array, create, split
from gradscope.storage.names import escape
from gradscope.storage.plan import FilePlan, Rows, States, to_json
from gradscope.storage.stream import Stream

FORMAT, FORMAT_VERSION = "gradscope", 2
KEYS = "keys"  # the attribute of an owner's states: [[key, format, shape], ...], in their order

Filling = tuple[Stream, Sequence[Tensor]]  # tensors that go into a data set, one after the other
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def build(file: h5py.File, plan: FilePlan, rows: Rows) -> None:
    """Create all groups and data sets with a sample axis."""
    describe_run(file, plan)
    for name, column in rows.samples.items():
        _create_table(file["samples"], name, plan.n, column)
    for name, column in rows.norms.items():
        describe(_create_table(file["norms"], escape(name), plan.n, column), name, "dense")
    for k in range(len(plan.chains)):
        for name, block in (rows.chains[k] or {}).items():
            create_column(file[f"chains/{k}"], name, block, plan)


def describe_run(file: h5py.File, plan: FilePlan) -> None:
    """Record what the run is, and create the groups of an unfinished file."""
    file.attrs["format"] = FORMAT
    file.attrs["format_version"] = FORMAT_VERSION
    file.attrs["status"] = "incomplete"
    file.attrs["gradscope_version"] = version("gradscope")
    for key, text in plan.attributes.items():
        file.attrs[key] = text
    file.attrs["run"] = to_json(plan.run)
    file.attrs["identity"] = to_json(plan.identity)
    file.attrs["parameters"] = to_json(plan.parameters)
    for name in ("samples", "norms", "chains"):
        file.create_group(name)
    for k, chain in enumerate(plan.chains):
        group = file.create_group(f"chains/{k}")
        group.attrs["chain"] = chain.text
        group.attrs["reduced"] = chain.reduced


def add_results(chain: h5py.Group, results: Mapping[str, Tensor]) -> list[Filling]:
    """Create data sets for the aggregates {name: (*shape)} of a reduced chain.

    Returns:
        Where each value goes.
    """
    return [(Stream(_create_result(chain, *result)), [result[1]]) for result in results.items()]


def add_states(file: h5py.File, states: States) -> list[Filling]:
    """Create data sets for the reducers' states {owner: {key: tensor}}, in /states.

    Those of a number format lie one behind the other: of thousands of small tensors, each would
    take more for its data set than for its numbers.

    Returns:
        Where each owner's tensors go.
    """
    made: list[Filling] = []
    for owner, state in states.items():
        group = file.require_group(f"states/{owner}")
        group.attrs[KEYS] = to_json(
            [[key, name_of(tensor.dtype), list(tensor.shape)] for key, tensor in state.items()]
        )
        shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}
        for name, array in state_arrays(shapes).items():
            stream = Stream(create(group, name, array))
            made.append((stream, [t for t in state.values() if name_of(t.dtype) == name]))
    return made


def state_arrays(shapes: Shapes) -> dict[str, Array]:
    """Return how a state {key: (shape, dtype)} is stored, by the names of its number formats."""
    found = {}
    for dtype in dict.fromkeys(dtype for _, dtype in shapes.values()):
        size = sum(prod(shape) for shape, other in shapes.values() if other == dtype)
        found[name_of(dtype)] = result_array((size,), dtype)
    return found


def _create_table(group: h5py.Group, name: str, n: int, column: Tensor) -> h5py.Dataset:
    return create(group, name, table_array(n, column))


def table_array(n: int, column: Tensor) -> Array:
    """Return how a column (N,) of the light table will be stored, by its first rows.

    Rows (n, w) of bytes are texts.
    """
    if column.dim() == 2:
        return Array((n,), column.dtype, None, text=int(column.shape[1]))
    wide = torch.float32 if column.dtype == torch.bfloat16 else column.dtype
    return Array((n,), wide, None)


def result_array(shape: tuple[int, ...], dtype: torch.dtype) -> Array:
    """Return how an aggregate of that shape will be stored."""
    chunks = split(shape, dtype.itemsize) if shape and prod(shape) > 0 else None
    return Array(shape, dtype, chunks)


def _create_result(chain: h5py.Group, name: str, value: Tensor) -> h5py.Dataset:
    dataset = create(chain, escape(name), result_array(tuple(value.shape), value.dtype))
    describe(dataset, name, "dense")
    return dataset
