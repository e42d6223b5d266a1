"""Data of torch.save: tensors, tuples and dicts of tensors, or lists of samples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from gradscope.core.texts import article, listed
from gradscope.errors import CheckpointError, DatasetError
from gradscope.sources.data.columns import NumberColumn, StoredArrays, StoredColumn
from gradscope.sources.formats import CONVERT, dataset_readers, is_saved_by_torch, matching
from gradscope.sources.weights import read


@dataset_readers.register("torch")
@matching(is_saved_by_torch)
def open_saved(path: Path) -> StoredArrays:
    """A tensor, a tuple, dict or list of tensors or samples, or a TensorDataset of torch.save."""
    try:
        content, _ = read(path)
    except CheckpointError as error:
        raise DatasetError(error.what, remedy=CONVERT) from error
    arrays = _arrays(content)

    def load(name: str) -> StoredColumn:
        values = arrays[name]
        if values.layout != torch.strided:  # a sparse adjacency matrix
            values = values.to_dense()
        return NumberColumn(
            tuple(values.shape), values.dtype, lambda start, stop: values[start:stop].clone()
        )

    return StoredArrays(tuple(arrays), load)


def _arrays(content: Any) -> dict[str, Tensor]:
    """Return the arrays {name: (N, ...)} in the content of a torch.save file.

    Raises:
        DatasetError: The content is a checkpoint, or not data.
    """
    if isinstance(content, TensorDataset):
        content = content.tensors
    if isinstance(content, Tensor):
        found = {"inputs": content}
    elif isinstance(content, Mapping):
        found = {str(k): v for k, v in content.items() if isinstance(v, Tensor) and v.dim()}
        nested = any(isinstance(value, Mapping) for value in content.values())
        weights = {"weight", "bias"} <= found.keys()
        weights |= any(name.endswith((".weight", ".bias")) for name in found)
        if weights or (nested and not found):
            raise DatasetError(
                f"this is a checkpoint of torch.save, not data: it has "
                f"{listed(map(str, content), 4)}",
                remedy=f"Give the data as DATASET, and this file as CHECKPOINT.\n{CONVERT}",
            )
    elif isinstance(content, list | tuple) and content:
        whole = all(isinstance(value, Tensor) and value.dim() for value in content)
        alike = whole and len({len(value) for value in content}) == 1
        columns = content if alike and isinstance(content, tuple) else _columns(content)
        found = dict(zip(_names(len(columns)), columns, strict=True))
    else:
        found = {}
    if not found:
        kind = article(type(content).__name__)
        raise DatasetError(f"it has {kind}, which is not supported as data", remedy=CONVERT)
    return found


def _columns(samples: Sequence[Any]) -> list[Tensor]:
    """Return the columns (N, ...) of a list of samples: tensors, or tuples such as (x, y).

    Raises:
        DatasetError: The samples have different shapes or types.
    """
    rows = [value if isinstance(value, list | tuple) else (value,) for value in samples]
    try:
        return [
            torch.stack([torch.as_tensor(value) for value in column])
            for column in zip(*rows, strict=True)
        ]
    except (TypeError, ValueError, RuntimeError) as error:
        raise DatasetError(
            f"its {len(rows):,} samples have different shapes: {error}", remedy=CONVERT
        ) from error


def _names(count: int) -> list[str]:
    """Return names for `count` arrays; the last array has the targets."""
    if count == 1:
        return ["inputs"]
    inputs = ["inputs"] if count == 2 else [f"inputs_{k}" for k in range(1, count)]
    return [*inputs, "targets"]
