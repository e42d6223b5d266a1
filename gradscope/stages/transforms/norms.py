"""The norm of a sample's gradient, factors of it, and the largest entries.

`p` is > 0 or `inf` (the largest magnitude); below 1, ‖g‖ₚ is (Σ|g|ᵖ)^(1/p) all the same, which is
no norm. With p = 2 no gradient need be formed. `per` is "sample" for one norm over all parameters
together, "parameter" for one of each.
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
    """T(g) = ‖g‖ₚ: one number a sample, or one a sample and parameter.

    Per sample it is the single entry `norm` (n,), per parameter (n,) for each name.
    """
    _require_order(p)

    def apply(gradients: Gradients) -> Gradients:
        found = by_parameter(gradients, p) if per == "parameter" else {"norm": whole(gradients, p)}
        return gradients.of({name: DenseBlock(value) for name, value in found.items()})

    return apply


@transform("clip", TransformScope.FACTOR)
def clip(max_norm: float, p: float = 2.0, per: Per = "sample") -> Transform:
    """T(g) = g · min(1, max_norm / ‖g‖ₚ), over all parameters together or each by itself.

    The per-sample clipping of DP-SGD (Abadi et al. 2016, arXiv:1607.00133, algorithm 1); per
    parameter it is the per-layer clipping of McMahan et al. 2018 (arXiv:1710.06963).
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
    # the norm 0 gives the factor inf, so 1
    return _by_norm(lambda sizes: (max_norm / sizes).clamp(max=1.0), p, per)


@transform("normalize", TransformScope.FACTOR)
def normalize(p: float = 2.0, per: Per = "sample") -> Transform:
    """T(g) = g / ‖g‖ₚ, over all parameters together or each by itself; a zero stays zero.

    Normalised gradients (Cutkosky & Mehta 2020, arXiv:2002.03305).
    """
    # a NaN norm is not 0, so it is divided by: the sample stays visibly not finite
    return _by_norm(lambda sizes: torch.where(sizes == 0, 0.0, 1.0 / sizes), p, per)


@transform("topk", TransformScope.VECTOR)
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
