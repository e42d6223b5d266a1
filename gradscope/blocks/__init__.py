"""Per-sample gradients as blocks, which know their own structure.

A block stands for the per-sample gradients (n, *shape) of one parameter. It knows exactly its
dense form, squared norms, weighted sum, elementwise-square sum, dot product and Gram matrix, and
takes a shortcut where its structure allows one. What has no shortcut falls back to dense tiles.
"""

from gradscope.blocks.base import Block
from gradscope.blocks.convolution import ConvolutionBlock
from gradscope.blocks.dense import DenseBlock
from gradscope.blocks.derived import ScaledBlock
from gradscope.blocks.elementwise import MappedBlock, RandomBlock, SquaredBlock
from gradscope.blocks.gradients import Evaluation, Gradients
from gradscope.blocks.linear import CenteredBlock, KroneckerBlock, PreconditionedBlock
from gradscope.blocks.outer import OuterBlock
from gradscope.blocks.scatter import ScatterBlock
from gradscope.blocks.sparse import SparseBlock
from gradscope.blocks.total import TotalBlock, total
from gradscope.blocks.windows import Geometry

__all__ = [
    "Block",
    "CenteredBlock",
    "ConvolutionBlock",
    "DenseBlock",
    "Evaluation",
    "Geometry",
    "Gradients",
    "KroneckerBlock",
    "MappedBlock",
    "OuterBlock",
    "PreconditionedBlock",
    "RandomBlock",
    "ScaledBlock",
    "ScatterBlock",
    "SparseBlock",
    "SquaredBlock",
    "TotalBlock",
    "total",
]
