"""Large linear layers by the faster kernel, forwards and backwards.

`F.linear` is taken over as two operations, so that autograd computes the gradient of the weights
only where it is asked for: `GradscopeWeight`, where weight and bias enter, gives zeros, and
`GradscopeLinear` adds the product to them. Both can be differentiated again.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.kernels.conditions import recordable
from gradscope.blocks.products import multiplied, plain

_LARGE = 2**16  # entries of a weight from which on the detour pays
_DTYPES = (torch.float32,)  # oneDNN's kernel takes no other
Layer = tuple[Tensor, Tensor, Tensor | None]  # input (..., i), weight (o, i), bias (o,)


def large_linear(input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """Return what `F.linear` does, or None where it had better do it (named as torch does)."""
    given = [t for t in (input, weight, bias) if t is not None]
    if not recordable(given, *_DTYPES) or not is_large(weight):
        return None
    fits = input.dim() >= 2 and input.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    return _run((input, weight, bias)) if fits else None


def large_product(input: Any, other: Any = None, **more: Any) -> Tensor | None:
    """Return input (..., i) @ other (i, o), or None where `other` is no large parameter."""
    if more or not isinstance(other, Tensor) or not _is_parameter(other) or other.dim() != 2:
        return None
    return large_linear(input, other.T)


def large_mm(input: Any, mat2: Any = None, **more: Any) -> Tensor | None:
    """Return input (m, i) @ mat2 (i, o), likewise; torch's own refuses anything but matrices."""
    matrix = isinstance(input, Tensor) and input.dim() == 2
    return large_product(input, mat2, **more) if matrix else None


def large_addmm(input: Any, mat1: Any, mat2: Any, *rest: Any, **more: Any) -> Tensor | None:
    """Return input (o,) + mat1 (m, i) @ mat2 (i, o), likewise: a linear layer written out."""
    if rest or more or not isinstance(mat2, Tensor) or not _is_parameter(mat2):
        return None
    return large_linear(mat1, mat2.T, input) if mat1.dim() == mat2.dim() == 2 else None


def _is_parameter(t: Tensor) -> bool:
    """Whether this is a parameter, or a view of one such as its transpose."""
    return isinstance(t._base if t._is_view() else t, nn.Parameter)


def is_large(weight: Tensor) -> bool:
    """Whether the detour pays for a layer with this weight."""
    return weight.dim() == 2 and weight.numel() >= _LARGE and plain([weight], *_DTYPES)


def _run(layer: Layer) -> Tensor:
    x, weight, bias = layer
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    zeros = _applied(GradscopeWeight, weight, bias, layer) if trained else None
    return _applied(GradscopeLinear, x, zeros, layer)


def _applied(function: type[Function], *arguments: Any) -> Tensor:
    found: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return found


def _whole(t: Tensor) -> Tensor:
    """Return the same numbers as no view, so that the model may write into them."""
    found: Tensor = torch.ops.aten._unsafe_view(t, t.shape) if t._is_view() else t
    return found


class GradscopeWeight(Function):
    """Where weight and bias enter: zeros of the output's shape, whose gradient is the output's.

    The layer is no argument of its own, so that no gradient of the input is asked for here.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        """Return zeros (..., o), which take no memory."""
        ctx.layer = layer
        ctx.save_for_backward(layer[0].detach())  # shows when it is overwritten
        return weight.new_zeros(()).expand(*layer[0].shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return Σ b⊗a over all positions, and Σ b."""
        (x,) = ctx.saved_tensors
        x = ctx.layer[0] if torch.is_grad_enabled() else x
        rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)
        weight = multiplied(rows.mT, inputs.mT) if ctx.needs_input_grad[0] else None
        return weight, rows.sum(0) if ctx.needs_input_grad[1] else None, None


class GradscopeLinear(Function):
    """The layer's output, as a function of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, zeros: Tensor | None, layer: Layer) -> Tensor:
        """Return the output (..., o)."""
        ctx.layer = layer
        ctx.save_for_backward(layer[1].detach())
        return _whole(multiplied(*layer))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradient of the input (..., i), and that of the zeros."""
        (weight,) = ctx.saved_tensors
        weight = ctx.layer[1] if torch.is_grad_enabled() else weight
        gradient = gradient.contiguous()  # the kernel would copy it for itself, and others again
        asked = ctx.needs_input_grad[0] and internals.is_asked_for(ctx, 0)
        moved = multiplied(gradient, weight.mT) if asked else None
        return moved, gradient if ctx.needs_input_grad[1] else None, None
