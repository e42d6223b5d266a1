"""Norms of a sample's gradient, and the transform that returns them."""

from math import isnan

import torch
from torch import Tensor

from gradscope.blocks import DenseBlock, Gradients
from gradscope.blocks.base import p_norms
from gradscope.stages.transforms.base import Scope, Transform, one_of, transform, widened

PER = ("sample", "parameter")


@transform("norm", Scope.VECTOR)
def norm(p: float = 2.0, per: str = "sample") -> Transform:
    """T(g) = ‖g‖ₚ: one number a sample, or one a sample and parameter.

    With p = 2 no gradient need be formed.

    Args:
        p: Which norm, > 0; `inf` is the largest magnitude. Below 1 it is (Σ|g|ᵖ)^(1/p) all the
            same, which is no norm.
        per: "sample" gives the single entry `norm` (n,), over all parameters together;
            "parameter" gives (n,) for each name.

    Raises:
        ValueError: p is not positive, or `per` is neither word.
    """
    check(p, per)

    def apply(gradients: Gradients) -> Gradients:
        found = by_parameter(gradients, p) if per == "parameter" else {"norm": whole(gradients, p)}
        return gradients.of({name: DenseBlock(value) for name, value in found.items()})

    return apply


def check(p: float, per: str) -> None:
    """Check the arguments that say which norm is meant.

    Raises:
        ValueError: p is not positive, or `per` is no known word.
    """
    if isnan(p) or p <= 0:
        raise ValueError(f"p must be positive or inf, not {p}")
    one_of("per", per, PER)


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
