"""safetensors as data: named tensors, read in slices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gradscope.sources.data.columns import Sliced, Stored, StoredArrays, reading
from gradscope.sources.data.readers import dataset_readers, is_safetensors, matching


@dataset_readers.register("safetensors")
@matching(is_safetensors)
def open_safetensors(path: Path) -> StoredArrays:
    """Named tensors, as safetensors writes them."""
    with reading(path):
        file: Any = safe_open(path, framework="pt")  # it stays open: its header takes long
        names = tuple(file.keys())

    def load(name: str) -> Stored:
        with reading(path, name):
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            whole: Tensor = file.get_tensor(name) if not shape else part[:0]
            return whole if not shape else Sliced(shape, whole.dtype, read(name))

    def read(name: str) -> Callable[[int, int], Tensor]:
        def rows(start: int, stop: int) -> Tensor:
            with reading(path, name):
                found: Tensor = file.get_slice(name)[start:stop]
                return found.clone(memory_format=torch.contiguous_format)

        return rows

    return StoredArrays(names, load)
