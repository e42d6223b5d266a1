"""Inner products of a sample's gradient with a vector: one number a sample."""

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Literal

import torch
from torch import Tensor

from gradscope.blocks import Block, DenseBlock, Gradients
from gradscope.blocks.base import squares
from gradscope.stages.reducers.base import wide
from gradscope.stages.transforms.base import NeedsMean, Scope, Transform, Vector, transform


@transform("dot", Scope.LINEAR)
def dot(with_: Vector) -> Transform:
    """T(g) = ⟨g, v⟩ = Σ g · conj(v) over all parameters: the single entry `dot` (n,), in float64.

    v is stored: `with=FILE.h5:CHAIN`.
    """

    def apply(gradients: Gradients) -> Gradients:
        return gradients.of({"dot": DenseBlock(inner(gradients, with_.of(gradients)))})

    return apply


@transform("cosine", Scope.VECTOR)
def cosine(with_: Vector | None = None, to: Literal["mean"] | None = None) -> Transform | NeedsMean:
    """T(g) = Re⟨g, v⟩ / (‖g‖₂ ‖v‖₂): the single entry `cosine` (n,), 0 if g or v is zero.

    How well gradients agree (Sankararaman et al. 2020, arXiv:1904.06963). v is stored,
    `with=FILE.h5:CHAIN`; or, with `to=mean`, the mean over all samples of what reaches this stage,
    which takes an earlier pass over the data.
    """
    if (with_ is None) == (to is None):
        raise ValueError("give with=FILE.h5:CHAIN or to=mean, one of them")
    if with_ is not None:
        return _cosine(with_)
    return NeedsMean(lambda mean: _cosine(Vector(mean, "the mean of the samples")))


def inner(gradients: Gradients, vector: Mapping[str, Tensor]) -> Tensor:
    """Return ⟨gᵢ, v⟩ (n,), complex where a gradient or the vector is."""
    return reduce(add, (_inner(wide(block), vector[name]) for name, block in gradients.items()))


def _inner(block: Block, vector: Tensor) -> Tensor:
    if vector.is_complex() and not block.dtype.is_complex:
        return torch.complex(block.dot(vector.real), -block.dot(vector.imag))
    return block.dot(vector.to(block.dtype))


def _cosine(vector: Vector) -> Transform:
    def apply(gradients: Gradients) -> Gradients:
        values = vector.of(gradients)
        length = torch.stack([squares(v).sum() for v in values.values()]).sum().sqrt()
        sizes = gradients.norms * length
        found = inner(gradients, values).real
        return gradients.of({"cosine": DenseBlock(torch.where(sizes == 0, 0.0, found / sizes))})

    return apply
