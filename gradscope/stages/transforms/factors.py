"""Transforms that multiply a sample's gradient by one number: they need only its norm."""

from collections.abc import Callable

import torch
from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.stages.transforms import norms
from gradscope.stages.transforms.base import Scope, Transform, reading_norms, transform, widened


@transform("clip", Scope.FACTOR)
def clip(max_norm: float, p: float = 2.0, per: str = "sample") -> Transform:
    """T(g) = g · min(1, max_norm / ‖g‖ₚ), over all parameters together or each by itself.

    The per-sample clipping of DP-SGD (Abadi et al. 2016, arXiv:1607.00133, algorithm 1); per
    parameter it is the per-layer clipping of McMahan et al. 2018 (arXiv:1710.06963).

    Args:
        max_norm: The largest norm that is left alone, > 0.
        p: Which norm, > 0 or inf. With p = 2 no gradient need be formed.
        per: "sample" for one factor a sample, "parameter" for one a sample and parameter.

    Raises:
        ValueError: max_norm or p is not positive, or `per` is neither word.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")

    def factor(sizes: Tensor) -> Tensor:
        return (max_norm / sizes).clamp(max=1.0)  # a zero gradient gives inf, so 1

    return _by_norm(factor, p, per)


@transform("normalize", Scope.FACTOR)
def normalize(p: float = 2.0, per: str = "sample") -> Transform:
    """T(g) = g / ‖g‖ₚ, over all parameters together or each by itself; a zero stays zero.

    Normalised gradients (Cutkosky & Mehta 2020, arXiv:2002.03305).

    Args:
        p: Which norm, > 0 or inf. With p = 2 no gradient need be formed.
        per: "sample" for one factor a sample, "parameter" for one a sample and parameter.

    Raises:
        ValueError: p is not positive, or `per` is neither word.
    """
    # a NaN norm is not 0, so it is divided by: the sample stays visibly not finite
    return _by_norm(lambda sizes: torch.where(sizes == 0, 0.0, 1.0 / sizes), p, per)


def _by_norm(factor: Callable[[Tensor], Tensor], p: float, per: str) -> Transform:
    norms.check(p, per)

    def apply(gradients: Gradients) -> Gradients:
        given = gradients.formed() if p == 2 else gradients
        if per == "sample":
            return widened(given).scale(factor(norms.whole(given, p)))
        sizes = norms.by_parameter(given, p)
        blocks = {k: block.scale(factor(sizes[k])) for k, block in widened(given).items()}
        return given.of(blocks)

    return reading_norms(apply) if p == 2 else apply
