"""The structure of a result file: laid out by the first batch, and the results at the end."""

from collections.abc import Mapping
from importlib.metadata import version

import h5py
import torch
from torch import Tensor

from gradscope.storage.columns import create_column, describe
from gradscope.storage.layout import create, split
from gradscope.storage.names import escape
from gradscope.storage.plan import FilePlan, Rows, to_json
from gradscope.storage.stream import Stream

FORMAT, FORMAT_VERSION = "gradscope", 1


def build(file: h5py.File, plan: FilePlan, rows: Rows) -> None:
    """Create all groups and data sets with a sample axis."""
    file.attrs["format"] = FORMAT
    file.attrs["format_version"] = FORMAT_VERSION
    file.attrs["status"] = "incomplete"
    file.attrs["gradscope_version"] = version("gradscope")
    for key, text in plan.attributes.items():
        file.attrs[key] = text
    file.attrs["run"] = to_json(plan.run)
    file.attrs["identity"] = to_json(plan.identity)
    file.attrs["parameters"] = to_json(plan.parameters)
    samples, norms = file.create_group("samples"), file.create_group("norms")
    for name, column in rows.samples.items():
        _create_table(samples, name, plan.n, column)
    for name, column in rows.norms.items():
        describe(_create_table(norms, escape(name), plan.n, column), name, "dense")
    chains = file.create_group("chains")
    for k, chain in enumerate(plan.chains):
        group = chains.create_group(str(k))
        group.attrs["chain"] = chain.text
        group.attrs["reduced"] = chain.reduced
        for name, block in (rows.chains[k] or {}).items():
            create_column(group, name, block, plan.n, plan.dtype, plan.layout)


def add_results(chain: h5py.Group, results: Mapping[str, Tensor]) -> list[tuple[Stream, Tensor]]:
    """Create data sets for the aggregates {name: (*shape)} of a reduced chain.

    Returns:
        Each value and where it goes.
    """
    return [(Stream(_create_result(chain, *result)), result[1]) for result in results.items()]


def _create_table(group: h5py.Group, name: str, n: int, column: Tensor) -> h5py.Dataset:
    wide = torch.float32 if column.dtype == torch.bfloat16 else column.dtype
    return create(group, name, (n,), wide, None)


def _create_result(chain: h5py.Group, name: str, value: Tensor) -> h5py.Dataset:
    shape = tuple(value.shape)
    chunks = split(shape, value.itemsize) if value.dim() and value.numel() else None
    dataset = create(chain, escape(name), shape, value.dtype, chunks)
    describe(dataset, name, "dense")
    return dataset
