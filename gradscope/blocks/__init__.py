"""Blocks: per-sample gradients in a form that keeps their structure.

A block represents the per-sample gradients (n, *shape) of one parameter. It computes exactly its
dense form, squared norms, weighted sum, elementwise-square sum, dot product and Gram matrix. It
takes a shortcut if its structure allows one, and uses dense tiles otherwise.
"""

from collections.abc import Mapping

from torch import Tensor

from gradscope.blocks.base import Block, DenseBlock, wide
from gradscope.blocks.convolution import ConvolutionBlock, Geometry
from gradscope.blocks.derived import (
    CenteredBlock,
    DerivedBlock,
    ExpectedBlock,
    KroneckerBlock,
    MappedBlock,
    PreconditionedBlock,
    RandomBlock,
    ScaledBlock,
    SquaredBlock,
)
from gradscope.blocks.gradients import Evaluation, Gradients
from gradscope.blocks.groups import grouped, in_groups
from gradscope.blocks.joined import JoinedBlock, joined
from gradscope.blocks.layers import LayerWeights, belongs, bias_of, layer_of
from gradscope.blocks.outer import OuterBlock
from gradscope.blocks.scatter import ScatterBlock, SparseBlock
from gradscope.blocks.segments import SegmentBlock, segmented
from gradscope.blocks.total import TotalBlock, total
from gradscope.blocks.variants import ChosenVariant, Clock, Tuner, active_tuner, unmeasured

__all__ = [
    "Block",
    "CenteredBlock",
    "ChosenVariant",
    "Clock",
    "ConvolutionBlock",
    "DenseBlock",
    "DerivedBlock",
    "Evaluation",
    "ExpectedBlock",
    "Geometry",
    "Gradients",
    "JoinedBlock",
    "KroneckerBlock",
    "LayerWeights",
    "MappedBlock",
    "OuterBlock",
    "PreconditionedBlock",
    "RandomBlock",
    "ScaledBlock",
    "ScatterBlock",
    "SegmentBlock",
    "SparseBlock",
    "SquaredBlock",
    "TotalBlock",
    "Tuner",
    "active_tuner",
    "belongs",
    "bias_of",
    "from_factors",
    "grouped",
    "in_groups",
    "joined",
    "layer_of",
    "segmented",
    "total",
    "unmeasured",
    "wide",
]


def from_factors(kind: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Block:
    """Return the block that has these `Factors`."""
    if kind == "scatter":
        return ScatterBlock(tensors["index"], tensors["rows"], shape[0])
    return OuterBlock(tensors["left"], tensors["right"], shape)
