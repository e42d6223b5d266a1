"""Transforms that multiply a sample's gradient by one number: they need only its norm."""

from collections.abc import Callable

import torch
from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.transforms.base import Scope, Transform, transform


@transform("clip", Scope.FACTOR)
def clip(max_norm: float) -> Transform:
    """T(g) = g · min(1, max_norm / ‖g‖₂), over all parameters together.

    The per-sample clipping of DP-SGD (Abadi et al. 2016, arXiv:1607.00133, algorithm 1).

    Args:
        max_norm: The largest norm that is left alone, > 0.

    Raises:
        ValueError: max_norm is not a positive number.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")

    def factor(norms: Tensor) -> Tensor:
        return (max_norm / norms).clamp(max=1.0)  # a zero gradient gives inf, so 1

    return _by_norm(factor)


@transform("normalize", Scope.FACTOR)
def normalize() -> Transform:
    """T(g) = g / ‖g‖₂, over all parameters together; a zero gradient stays zero."""
    return _by_norm(lambda norms: torch.where(norms > 0, 1.0 / norms, 0.0))


def _by_norm(factor: Callable[[Tensor], Tensor]) -> Transform:
    def apply(gradients: Gradients) -> Gradients:
        return gradients.scale(factor(gradients.norms))

    return apply
