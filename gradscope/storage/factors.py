"""Blocks that are stored as their factors, and back.

kind "outer": left (N, k, t, r) and right (N, k, t, c); kind "scatter": index (N, t) and
rows (N, t, d). Half precision would round twice, so such factors are kept in float32, except those
that are bfloat16 themselves: they lose nothing, and everyone reads them as float32.
"""

from math import prod

import h5py
import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Block, ConvolutionBlock, OuterBlock, ScatterBlock
from gradscope.errors import ResultFileError
from gradscope.storage.checks import Checks
from gradscope.storage.formats import as_numpy, named, stored_dtype

AXES = {  # the axes' names after the sample axis
    "left": ("k", "t", "r"),
    "right": ("k", "t", "c"),
    "index": ("t",),
    "rows": ("t", "d"),
}
KINDS = {"outer": ("left", "right"), "scatter": ("index", "rows")}


def factors_of(block: Block) -> tuple[str, dict[str, Tensor]] | None:
    """Return the kind and the factors (n, ...) of a block that has some, else None."""
    if isinstance(block, ConvolutionBlock):
        block = block.outer
    if isinstance(block, OuterBlock):
        return "outer", {"left": block.left, "right": block.right}
    if isinstance(block, ScatterBlock):
        return "scatter", {"index": block.index, "rows": block.rows}
    return None


def factor_dtype(factor: Tensor, wanted: torch.dtype) -> torch.dtype:
    """Return the number format a factor is stored in."""
    if not factor.is_floating_point() and not factor.is_complex():
        return torch.int64
    dtype = stored_dtype(factor.dtype, wanted)
    kept = dtype.itemsize > 2 or dtype == factor.dtype == torch.bfloat16
    return dtype if kept else torch.float32


def is_smaller(block: Block, factors: dict[str, Tensor], wanted: torch.dtype) -> bool:
    """Whether the factors take fewer bytes a sample than the dense rows."""
    sizes = [prod(f.shape[1:]) * factor_dtype(f, wanted).itemsize for f in factors.values()]
    return sum(sizes) < prod(block.shape) * stored_dtype(block.dtype, wanted).itemsize


def stored_rows(group: h5py.Group, rows: slice, checks: Checks) -> np.ndarray:
    """Return the dense rows (n, *shape) of a factored group, computed in their factors' dtype.

    Raises:
        ResultFileError: The factors are damaged, or a scatter's index points outside its table.
    """
    kind, shape = str(group.attrs["kind"]), tuple(int(s) for s in group.attrs["shape"])
    read = (checks.rows(group[name], rows.start, rows.stop) for name in KINDS[kind])
    first, second = (torch.from_numpy(factor) for factor in read)
    block: Block
    if kind == "outer":
        block = OuterBlock(first, second, shape)
    else:
        if first.numel() and not 0 <= int(first.min()) <= int(first.max()) < shape[0]:
            raise ResultFileError(
                f"an index points outside the table of {shape[0]} rows",
                where=f"{group.file.filename}: {group.name}",
                remedy="The file is damaged; compute it again.",
            )
        block = ScatterBlock(first, second, shape[0])
    return as_numpy(block.dense().to(named(str(group.attrs["dtype"]))))
