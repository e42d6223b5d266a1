"""Transforms that treat each entry of a gradient alone: dense, but for what the blocks know."""

import torch

from gradscope.blocks import Gradients, MappedBlock, SquaredBlock
from gradscope.transforms.base import Scope, Transform, transform


@transform("identity", Scope.ELEMENTWISE)
def identity() -> Transform:
    """T(g) = g: the raw per-sample gradient."""
    return lambda gradients: gradients


@transform("square", Scope.ELEMENTWISE)
def square() -> Transform:
    """T(g) = |g|² elementwise; `square | mean` is the diagonal of the empirical Fisher."""

    def apply(gradients: Gradients) -> Gradients:
        return gradients.map(SquaredBlock)

    return apply


@transform("sign", Scope.ELEMENTWISE)
def sign() -> Transform:
    """The sign of each entry, 0 at 0; g/|g| for complex ones (Bernstein et al. 2018)."""
    return lambda gradients: gradients.map(lambda block: MappedBlock(block, torch.sgn))


@transform("abs", Scope.ELEMENTWISE)
def absolute() -> Transform:
    """T(g) = |g| elementwise."""
    return lambda gradients: gradients.map(lambda block: MappedBlock(block, torch.abs))
