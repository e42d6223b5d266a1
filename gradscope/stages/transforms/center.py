"""Transforms by the mean of the gradients."""

from collections.abc import Mapping

from torch import Tensor

from gradscope.blocks import CenteredBlock, Gradients
from gradscope.stages.transforms.base import NeedsMean, Scope, Transform, transform, widened


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
