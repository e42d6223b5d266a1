"""Transforms by a statistic of the gradients: their mean, or a stored second moment."""

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from gradscope.blocks import CenteredBlock, Gradients, PreconditionedBlock
from gradscope.transforms.base import NeedsMean, Scope, Transform, Vector, transform, widened


@transform("center", Scope.LINEAR)
def center() -> NeedsMean:
    """T(g) = g − E[g], the mean over all samples of what reaches this stage.

    It takes an earlier pass over the data for the mean; `clip:max_norm=1 | center` is centred at
    the mean of the clipped gradients. The difference is taken in float64.
    """

    def given(mean: Mapping[str, Tensor]) -> Transform:
        def apply(gradients: Gradients) -> Gradients:
            # a mean of complex gradients is complex128, of real ones float64
            blocks = {
                name: CenteredBlock(block, mean[name].to(block.device))
                for name, block in widened(gradients).items()
            }
            return gradients.of(blocks)

        return apply

    return NeedsMean(given)


@transform("precondition", Scope.ELEMENTWISE)
def precondition(with_: Vector, damping: float = 0.0) -> Transform:
    """T(g) = g / (√v + damping) elementwise, v a stored second moment: Adam's update.

    v is the result of a chain such as `square | mean` or `second_moment`, stored in a file. The
    damping is outside of the root, as ε in Adam (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1),
    without bias correction. Where √v + damping is 0 the result is 0.

    Args:
        with_: The stored v, argument `with=FILE.h5:CHAIN`.
        damping: ≥ 0.

    Raises:
        ValueError: damping is negative or not finite, or v is not real and not negative.
    """
    if not 0 <= damping < inf:
        raise ValueError(f"damping must be finite and not negative, not {damping}")
    for name, value in with_.values.items():
        if value.is_complex() or not bool((value >= 0).all()):
            raise ValueError(
                f"{name!r} in the stored vector is no second moment: it has entries that are "
                "complex, negative or NaN"
            )

    def apply(gradients: Gradients) -> Gradients:
        stored = with_.of(gradients)
        blocks = {
            name: PreconditionedBlock(block, _inverse(stored[name].sqrt() + damping))
            for name, block in widened(gradients).items()
        }
        return gradients.of(blocks)

    return apply


def _inverse(values: Tensor) -> Tensor:
    return torch.where(values == 0, 0.0, 1.0 / values)
