"""The norm of a sample's gradient, and the transforms that multiply a gradient by a factor of it.

`p` is > 0 or `inf` (the largest magnitude); below 1, ‖g‖ₚ is (Σ|g|ᵖ)^(1/p) all the same, which is
no norm. With p = 2 no gradient need be formed. `per` is "sample" for one norm over all parameters
together, "parameter" for one of each.
"""

from collections.abc import Callable
from math import isnan
from typing import Literal

import torch
from torch import Tensor

from gradscope.blocks import DenseBlock, Gradients
from gradscope.blocks.base import p_norms
from gradscope.stages.transforms.base import ReadsNorms, Scope, Transform, transform, widened

Per = Literal["sample", "parameter"]


@transform("norm", Scope.VECTOR)
def norm(p: float = 2.0, per: Per = "sample") -> Transform:
    """T(g) = ‖g‖ₚ: one number a sample, or one a sample and parameter.

    Per sample it is the single entry `norm` (n,), per parameter (n,) for each name.
    """
    _require_order(p)

    def apply(gradients: Gradients) -> Gradients:
        found = by_parameter(gradients, p) if per == "parameter" else {"norm": whole(gradients, p)}
        return gradients.of({name: DenseBlock(value) for name, value in found.items()})

    return apply


@transform("clip", Scope.FACTOR)
def clip(max_norm: float, p: float = 2.0, per: Per = "sample") -> Transform:
    """T(g) = g · min(1, max_norm / ‖g‖ₚ), over all parameters together or each by itself.

    The per-sample clipping of DP-SGD (Abadi et al. 2016, arXiv:1607.00133, algorithm 1); per
    parameter it is the per-layer clipping of McMahan et al. 2018 (arXiv:1710.06963).
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
    # the norm 0 gives the factor inf, so 1
    return _by_norm(lambda sizes: (max_norm / sizes).clamp(max=1.0), p, per)


@transform("normalize", Scope.FACTOR)
def normalize(p: float = 2.0, per: Per = "sample") -> Transform:
    """T(g) = g / ‖g‖ₚ, over all parameters together or each by itself; a zero stays zero.

    Normalised gradients (Cutkosky & Mehta 2020, arXiv:2002.03305).
    """
    # a NaN norm is not 0, so it is divided by: the sample stays visibly not finite
    return _by_norm(lambda sizes: torch.where(sizes == 0, 0.0, 1.0 / sizes), p, per)


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
        given = gradients.formed() if p == 2 else gradients
        if per == "sample":
            return widened(given).scale(factor(whole(given, p)))
        sizes = by_parameter(given, p)
        blocks = {k: block.scale(factor(sizes[k])) for k, block in widened(given).items()}
        return given.of(blocks)

    return ReadsNorms(apply) if p == 2 else apply
