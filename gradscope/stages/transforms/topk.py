"""The transform that keeps the largest entries of a sample's whole gradient."""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from gradscope.blocks import Gradients, SparseBlock
from gradscope.blocks.base import TILE_BYTES, as_rows
from gradscope.stages.transforms.base import Scope, Transform, transform, widened


@transform("topk", Scope.VECTOR)
def topk(k: int | None = None, fraction: float | None = None) -> Transform:
    """Keep the k entries of largest magnitude of a sample's whole gradient, zero the rest.

    Top-k sparsification (Aji & Heafield 2017, arXiv:1704.05021; Stich et al. 2018,
    arXiv:1809.07599). Of equal magnitudes the first are kept, in the order of the parameters and
    of the entries in each. Where there are at most k entries, all stay. Instead of k, `fraction`
    is a share of the entries: the nearest whole number of them (half to even), at least one.
    """
    if (k is None) == (fraction is None):
        raise ValueError("give k or fraction, one of them")
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, not {fraction}")

    def apply(gradients: Gradients) -> Gradients:
        gradients = widened(gradients)
        entries = sum(prod(block.shape) for block in gradients.values())
        count = k if k is not None else max(1, round((fraction or 0.0) * entries))
        parts = [_kept(tile, min(count, entries)) for tile in _tiles(gradients, entries)]
        places, values = (torch.cat(column) for column in zip(*parts, strict=True))
        return gradients.of(_by_parameter(gradients, places, values))

    return apply


def _tiles(gradients: Gradients, entries: int) -> Iterator[Tensor]:
    """Yield whole gradients (m, entries), a bounded number of bytes at a time."""
    itemsize = max(block.dtype.itemsize for block in gradients.values())
    step = max(1, TILE_BYTES // max(1, entries * itemsize))
    for start in range(0, gradients.n, step):
        part = gradients.select(slice(start, start + step))
        yield torch.cat([as_rows(block.dense()) for block in part.values()], 1)


def _kept(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the columns, ascending, and the values (m, k) of each row's k largest entries."""
    sizes = rows.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)  # a NaN is never dropped
    least = sizes.topk(k, dim=1).values[:, -1:]
    above, equal = sizes > least, sizes == least
    room = k - above.sum(1, keepdim=True)
    kept = above | (equal & (equal.cumsum(1) <= room))
    places = kept.nonzero()[:, 1].view(len(rows), k)
    return places, rows.gather(1, places)


def _by_parameter(gradients: Gradients, places: Tensor, values: Tensor) -> dict[str, SparseBlock]:
    """Cut what is kept into one block a parameter, padded to its fullest sample.

    `places` (n, k) count the entries of all parameters one after the other, ascending.
    """
    blocks, start = {}, 0
    for name, block in gradients.items():
        end = start + prod(block.shape)
        edges = torch.tensor([start, end], device=places.device).expand(len(places), 2)
        first, last = torch.searchsorted(places, edges.contiguous()).T
        width = int((last - first).max())
        columns = first.unsqueeze(1) + torch.arange(width, device=first.device)
        inside = columns < last.unsqueeze(1)
        columns = columns.clamp(max=max(0, places.shape[1] - 1))
        index = torch.where(inside, places.gather(1, columns) - start, 0)
        kept = torch.where(inside, values.gather(1, columns), 0)
        if not block.dtype.is_complex and kept.is_complex():
            kept = kept.real  # widened only because another parameter is complex
        blocks[name] = SparseBlock(index, kept.to(block.dtype), block.shape)
        start = end
    return blocks
