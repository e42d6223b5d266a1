"""Layers: a weight whose gradient has factors, together with its bias, as one matrix.

The gradient of a bias is the sum of the output gradients over positions, Σₜ bₜ. These bₜ are also
one factor of the weight's gradient Σₜ bₜ ⊗ aₜ. Both together are the gradient Σₜ bₜ ⊗ (aₜ, 1) of
one matrix (o, i + 1). The code recognises a bias by its numbers, not by modules.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.blocks.base import Block, DenseBlock, precise
from gradscope.blocks.gradients import Gradients
from gradscope.blocks.outer import OuterBlock

Shapes = Mapping[str, tuple[int, ...]]

_ROUNDINGS = 4  # roundings of a factor and a bias before the comparison: a sum over frames, a cast


class LayerWeights(NamedTuple):
    """A weight, optionally with its bias, read as k matrices (r, c)."""

    weight: str  # its name
    bias: str | None  # the name of the bias in the matrices, if any
    sizes: tuple[int, int, int]  # (k, r, c), including the bias
    # whether the bias is the last row (for weights stored inputs first), not the last column
    below: bool = False

    def of(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the weight and its bias alone."""
        names = [name for name in self[:2] if name is not None]
        return gradients.of({name: gradients[name] for name in names})

    def factors(self, gradients: Gradients) -> tuple[Tensor, Tensor] | None:
        """Return left (n, k, t, r) and right (n, k, t, c), with ones for the bias, or None.

        None means: the weight has no factors in this batch, or the bias is not their sum.
        """
        found = gradients[self.weight].factors()
        if found is None or found.kind != "outer":
            return None
        left, right = found.tensors.values()
        if self.bias is not None:
            if not bool(belongs(gradients[self.bias], right if self.below else left).all()):
                return None
            left, right = (with_ones(left), right) if self.below else (left, with_ones(right))
        sizes = (left.shape[1], left.shape[-1], right.shape[-1])
        return (left, right) if sizes == self.sizes else None

    def dense(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the matrices (n, k, r, c) of {name: (n, *shape)}."""
        weight = rows[self.weight]
        (k, r, c), n = self.sizes, len(weight)
        if self.bias is None:
            return weight.reshape(n, k, r, c)
        shape, axis = ((n, k, r - 1, c), 2) if self.below else ((n, k, r, c - 1), 3)
        own = weight.reshape(shape)
        return torch.cat([own, rows[self.bias].reshape(n, k, -1).unsqueeze(axis).to(own)], axis)

    def split(self, matrices: Tensor, shapes: Shapes) -> dict[str, Tensor]:
        """Split the matrices (n, k, r, c) into {name: (n, *shape)}, of which none keeps them."""
        n, axis = len(matrices), 2 if self.below else 3
        if self.bias is None:
            return {self.weight: matrices.reshape(n, *shapes[self.weight])}
        size = matrices.shape[axis] - 1
        weight, bias = matrices.narrow(axis, 0, size), matrices.narrow(axis, size, 1)
        return {
            self.weight: weight.contiguous().view(n, *shapes[self.weight]),
            self.bias: bias.contiguous().view(n, *shapes[self.bias]),
        }

    def split_factors(self, left: Tensor, right: Tensor, shapes: Shapes) -> dict[str, Block]:
        """Split Σₜ left ⊗ right of (n, k, t, r) and (n, k, t, c) into {name: block}."""
        if self.bias is None:
            return {self.weight: OuterBlock(left, right, shapes[self.weight])}
        if self.below:
            left, column = left[..., :-1], left[..., -1:]
            bias = column.mT @ right
        else:
            right, column = right[..., :-1], right[..., -1:]
            bias = column.mT @ left
        return {
            self.weight: OuterBlock(left, right, shapes[self.weight]),
            self.bias: DenseBlock(bias.reshape(len(bias), *shapes[self.bias])),
        }


def bias_of(weight: str) -> str | None:
    """Return the name of a weight's bias: the last word with "weight" replaced by "bias"."""
    path, dot, word = weight.rpartition(".")
    return f"{path}{dot}{word.replace('weight', 'bias')}" if "weight" in word else None


def layer_of(weight: str, sizes: tuple[int, int, int], shapes: Shapes) -> LayerWeights | None:
    """Return the layer with matrices of `sizes` (k, r, c), or None if they do not fit the weight.

    `shapes` has the shapes of all parameters.
    """
    (k, r, c), bias = sizes, bias_of(weight)
    shape = shapes[weight]
    entries = prod(shape)
    length = -1 if bias is None or bias not in shapes else prod(shapes[bias])
    if k * r * c == entries:
        return LayerWeights(weight, None, sizes)
    beside = (k * r * (c - 1), k * r) == (entries, length)
    below = (k * (r - 1) * c, k * c) == (entries, length)
    if beside and below:  # k(r-1)c = kr(c-1): the order of the axes decides
        beside = shape[0] == k * r
    return LayerWeights(weight, bias, sizes, below=not beside) if beside or below else None


def with_ones(factor: Tensor) -> Tensor:
    """Return (..., f) with a last column of ones, (..., f + 1)."""
    return torch.cat([factor, factor.new_ones(*factor.shape[:-1], 1)], -1)


def belongs(bias: Block, factor: Tensor) -> Tensor:
    """Return (n,), True where a bias gradient (k·f) equals the factor (n, k, t, f) summed over t.

    Two sums of the same t numbers in float32 or wider have a tolerance relative to the sum of
    magnitudes. It is t units in the last place, plus a few units of the precision to which the
    inputs were rounded. If the tolerance reaches one half, nothing can be concluded: False. Values
    that are not finite never contradict.
    """
    n, k, t, f = factor.shape
    if prod(bias.shape) != k * f:
        return torch.zeros(n, dtype=torch.bool, device=factor.device)
    found, values = bias.dense().reshape(n, k, f), precise(factor)
    rounded = _ROUNDINGS * max(torch.finfo(d).eps for d in (found.dtype, factor.dtype))
    slack = rounded + t * torch.finfo(values.dtype).eps
    off = (found - values.sum(2)).abs()
    contradicts: Tensor = (off > slack * values.abs().sum(2)).flatten(1).any(1)
    return ~contradicts & (slack < 0.5)
