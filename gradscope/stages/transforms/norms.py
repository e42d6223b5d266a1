"""The norm of a sample's gradient, transforms that scale by it, and the largest entries.

`p` is > 0 or `inf` (the largest magnitude). For p < 1 the same formula (Σ|g|ᵖ)^(1/p) is used,
although it is not a norm. With p = 2 the dense gradients are not needed. With `per="sample"` a
sample has one norm over all parameters, with `per="parameter"` one norm for each parameter.
"""

from collections.abc import Callable
from math import isnan, prod
from typing import Literal

import torch
from torch import Tensor

from gradscope.blocks import DenseBlock, Gradients, SparseBlock
from gradscope.blocks.base import TILE_BYTES, as_rows, p_norms
from gradscope.process.memory import slices
from gradscope.stages.transforms.base import (
    ReadsNorms,
    Transform,
    TransformScope,
    transform,
    widened,
)

Per = Literal["sample", "parameter"]


@transform("norm", TransformScope.VECTOR)
def norm(p: float = 2.0, per: Per = "sample") -> Transform:
    """T(g) = ‖g‖ₚ: one number for each sample, or for each sample and parameter.

    With `per=sample` the result is the single entry `norm` (n,), with `per=parameter` it is (n,)
    for each parameter name.
    """
    _require_order(p)

    def apply(gradients: Gradients) -> Gradients:
        found = by_parameter(gradients, p) if per == "parameter" else {"norm": whole(gradients, p)}
        return gradients.of({name: DenseBlock(value) for name, value in found.items()})

    return apply


@transform("clip", TransformScope.FACTOR)
def clip(max_norm: float, p: float = 2.0, per: Per = "sample") -> Transform:
    """T(g) = g · min(1, max_norm / ‖g‖ₚ), over all parameters together or for each separately.

    This is the per-sample clipping of DP-SGD (Abadi et al. 2016, arXiv:1607.00133, algorithm 1).
    With `per=parameter` it is per-layer clipping (McMahan et al. 2018, arXiv:1710.06963).
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
    # a norm of 0 gives inf, clamped to the factor 1
    return _by_norm(lambda sizes: (max_norm / sizes).clamp(max=1.0), p, per)


@transform("normalize", TransformScope.FACTOR)
def normalize(p: float = 2.0, per: Per = "sample") -> Transform:
    """T(g) = g / ‖g‖ₚ, over all parameters together or for each separately; a zero stays zero.

    These are normalised gradients (Cutkosky & Mehta 2020, arXiv:2002.03305).
    """
    # a NaN norm is not replaced by 0: the sample stays visibly not finite
    return _by_norm(lambda sizes: torch.where(sizes == 0, 0.0, 1.0 / sizes), p, per)


@transform("topk", TransformScope.VECTOR)
def topk(k: int | None = None, fraction: float | None = None) -> Transform:
    """Keep the k entries of largest magnitude of a sample's whole gradient, zero the rest.

    This is top-k sparsification (Aji & Heafield 2017, arXiv:1704.05021; Stich et al. 2018,
    arXiv:1809.07599). Between equal magnitudes the earlier entry is kept, in the order of the
    parameters and their entries. A gradient of at most k entries is unchanged. `fraction` sets k
    as a share of the entries, rounded to the nearest integer (half to even), at least 1.
    """
    if (k is None) == (fraction is None):
        raise ValueError("give either k or fraction")
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, not {fraction}")

    def apply(gradients: Gradients) -> Gradients:
        gradients = widened(gradients)
        entries = sum(prod(block.shape) for block in gradients.values())
        count = min(entries, k if k is not None else max(1, round((fraction or 0.0) * entries)))
        itemsize = max(block.dtype.itemsize for block in gradients.values())
        kept = []
        for rows in slices(gradients.n, entries * itemsize, TILE_BYTES):
            some = gradients.select(rows).values()
            kept.append(_kept(torch.cat([as_rows(block.dense()) for block in some], 1), count))
        places, values = (torch.cat(column) for column in zip(*kept, strict=True))
        return gradients.of(_by_parameter(gradients, places, values))

    return apply


def whole(gradients: Gradients, p: float) -> Tensor:
    """Return ‖gᵢ‖ₚ (n,) over all parameters together."""
    if p == 2:
        return gradients.norms
    return p_norms(torch.stack(list(by_parameter(gradients, p).values()), 1), p)


def by_parameter(gradients: Gradients, p: float) -> dict[str, Tensor]:
    """Return {name: ‖gᵢ‖ₚ (n,)}."""
    if p == 2:
        return {name: squared.sqrt() for name, squared in gradients.squared_norms.items()}
    return {name: block.norms(p) for name, block in widened(gradients).items()}


def _require_order(p: float) -> None:
    if isnan(p) or p <= 0:
        raise ValueError(f"p must be positive or inf, not {p}")


def _by_norm(factor: Callable[[Tensor], Tensor], p: float, per: Per) -> Transform:
    """Return the transform that multiplies by `factor` (n,) of the norms (n,)."""
    _require_order(p)

    def apply(gradients: Gradients) -> Gradients:
        given = gradients.densify() if p == 2 else gradients
        if per == "sample":
            return widened(given).scale(factor(whole(given, p)))
        sizes = by_parameter(given, p)
        blocks = {k: block.scale(factor(sizes[k])) for k, block in widened(given).items()}
        return given.of(blocks)

    return ReadsNorms(apply) if p == 2 else apply


def _kept(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the columns (ascending) and values (m, k) of the k largest entries in each row."""
    sizes = rows.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)  # a NaN is never dropped
    least = sizes.topk(k, dim=1).values[:, -1:]
    above, equal = sizes > least, sizes == least
    room = k - above.sum(1, keepdim=True)
    kept = above | (equal & (equal.cumsum(1) <= room))
    places = kept.nonzero()[:, 1].view(len(rows), k)
    return places, rows.gather(1, places)


def _by_parameter(gradients: Gradients, places: Tensor, values: Tensor) -> dict[str, SparseBlock]:
    """Split the kept entries into a block for each parameter, padded to the longest sample.

    `places` (n, k) are ascending indices into the concatenated entries of all parameters.
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
