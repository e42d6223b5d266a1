"""How large a result file will be, known before anything is written."""

from collections.abc import Mapping, Sequence

import torch

from gradscope.storage.build import result_array, table_array
from gradscope.storage.columns import arrays_of
from gradscope.storage.layout import Array
from gradscope.storage.plan import FilePlan, Rows, to_json

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

_OBJECT_BYTES = 2_000  # a data set's header, attributes and axes, measured
_NODE_ENTRIES = 55  # of a chunk index, which HDF5 keeps about this full; 64 fit


def file_bytes(plan: FilePlan, rows: Rows, more: Sequence[Shapes]) -> tuple[int, int]:
    """Return the bytes of a file: of its numbers, exactly; and of its structure, about.

    Args:
        plan: What will be stored; with its layout and number format.
        rows: Any batch: how blocks are structured decides how they are stored.
        more: {name: (shape, dtype)} of aggregates and states.
    """
    arrays = [table_array(plan.n, c) for c in (*rows.samples.values(), *rows.norms.values())]
    for gradients in rows.chains:
        for block in (gradients or {}).values():
            arrays += arrays_of(block, plan.n, plan.dtype, plan.layout)[1].values()
    for shapes in more:
        arrays += (result_array(shape, dtype) for shape, dtype in shapes.values())
    documents = sum(map(len, map(to_json, (plan.run, plan.identity, plan.parameters))))
    structure = documents + sum(map(_structure, arrays))
    return sum(array.nbytes for array in arrays), structure


def _structure(array: Array) -> int:
    """Return about how many bytes HDF5 needs besides the numbers."""
    entry = 8 + 8 * (len(array.shape) + 1)  # size, filters and place; then an address of 8 bytes
    node = 24 + 64 * 8 + 65 * entry
    return _OBJECT_BYTES + -(-array.pieces // _NODE_ENTRIES) * node
