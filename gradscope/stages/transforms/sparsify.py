"""Transforms that keep some entries of a sample's whole gradient."""

from collections.abc import Iterator
from dataclasses import dataclass
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
    of the entries in each. Where there are at most k entries, all stay.

    Args:
        k: How many entries, ≥ 1.
        fraction: Instead of k, which share of the entries, 0 to 1 and not 0: the nearest whole
            number of them (half to even), at least one.

    Raises:
        ValueError: Neither or both are given, or one is out of range.
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
        whole = _Entries(*(torch.cat(column) for column in zip(*parts, strict=True)))
        return gradients.of(_by_parameter(gradients, whole))

    return apply


@dataclass(frozen=True)
class _Entries:
    """What is kept of each sample.

    Attributes:
        places: (n, k) into all parameters laid end to end, ascending.
        values: (n, k).
    """

    places: Tensor
    values: Tensor


def _tiles(gradients: Gradients, entries: int) -> Iterator[Tensor]:
    """Yield whole gradients (m, entries), a bounded number of bytes at a time."""
    itemsize = max(block.dtype.itemsize for block in gradients.values())
    step = max(1, TILE_BYTES // max(1, entries * itemsize))
    for start in range(0, gradients.n, step):
        part = gradients.select(slice(start, start + step))
        yield torch.cat([as_rows(block.dense()) for block in part.values()], 1)


def _kept(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the places and the values (m, k) of the k largest entries of each row."""
    sizes = rows.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)  # a NaN is never dropped
    least = sizes.topk(k, dim=1).values[:, -1:]
    above, equal = sizes > least, sizes == least
    room = k - above.sum(1, keepdim=True)
    kept = above | (equal & (equal.cumsum(1) <= room))
    places = kept.nonzero()[:, 1].view(len(rows), k)
    return places, rows.gather(1, places)


def _by_parameter(gradients: Gradients, whole: _Entries) -> dict[str, SparseBlock]:
    """Cut what is kept into one block a parameter, padded to its fullest sample."""
    blocks, start = {}, 0
    for name, block in gradients.items():
        end = start + prod(block.shape)
        edges = torch.tensor([start, end], device=whole.places.device).expand(len(whole.places), 2)
        first, last = torch.searchsorted(whole.places, edges.contiguous()).T
        width = int((last - first).max())
        columns = first.unsqueeze(1) + torch.arange(width, device=first.device)
        inside = columns < last.unsqueeze(1)
        columns = columns.clamp(max=max(0, whole.places.shape[1] - 1))
        index = torch.where(inside, whole.places.gather(1, columns) - start, 0)
        values = torch.where(inside, whole.values.gather(1, columns), 0)
        if not block.dtype.is_complex and values.is_complex():
            values = values.real  # widened only because another parameter is complex
        blocks[name] = SparseBlock(index, values.to(block.dtype), block.shape)
        start = end
    return blocks
