"""The structure of a new result file, laid out by the first batch."""

from collections.abc import Mapping
from importlib.metadata import version

import h5py
import numpy as np
from torch import Tensor

from gradscope.storage.columns import create_column, describe
from gradscope.storage.layout import as_numpy, create, numpy_dtype, split
from gradscope.storage.names import escape
from gradscope.storage.plan import FilePlan, Rows, to_json

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
        create(samples, name, (plan.n,), numpy_dtype(column.dtype), None)
    for name, column in rows.norms.items():
        dataset = create(norms, escape(name), (plan.n,), numpy_dtype(column.dtype), None)
        describe(dataset, name, "dense")
    chains = file.create_group("chains")
    for k, chain in enumerate(plan.chains):
        group = chains.create_group(str(k))
        group.attrs["chain"] = chain.text
        group.attrs["reduced"] = chain.reduced
        for name, block in (rows.chains[k] or {}).items():
            create_column(group, name, block, plan.n, np.dtype(plan.dtype), plan.layout)


def add_results(chain: h5py.Group, results: Mapping[str, Tensor]) -> None:
    """Write the aggregates {name: (*shape)} of a reduced chain."""
    for name, value in results.items():
        values = as_numpy(value)
        chunks = split(values.shape, values.itemsize) if values.ndim and values.size else None
        dataset = create(chain, escape(name), values.shape, values.dtype, chunks)
        describe(dataset, name, "dense")
        if values.size:
            dataset[...] = values
