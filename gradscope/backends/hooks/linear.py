"""Large linear layers by the faster kernel, forwards and backwards.

`F.linear` is taken over as two operations, so that autograd computes the gradient of the weights
only where it is asked for: `GradscopeWeight`, where weight and bias enter, gives zeros, and
`GradscopeLinear` adds the product to them. Both can be differentiated again.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.overrides import TorchFunctionMode

from gradscope.blocks.products import multiplied, plain

_LARGE = 2**16  # entries of a weight from which on the detour pays
_DTYPES = (torch.float32,)  # oneDNN's kernel takes no other
_KNOWN = (Tensor, nn.Parameter)
Layer = tuple[Tensor, Tensor, Tensor | None]  # input (..., i), weight (o, i), bias (o,)


class FastLinear(TorchFunctionMode):
    """In this mode large linear layers run by `multiplied`, everything else as ever."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one function of torch."""
        if func is F.linear:
            layer = _layer(*args, **(kwargs or {}))
            if _is_large(layer):
                return _run(layer)
        return func(*args, **(kwargs or {}))


def has_large_layers(model: nn.Module) -> bool:
    """Whether there is a weight that the mode is worth it for."""
    weights = (p.detach() for p in model.parameters() if p.dim() == 2 and p.numel() >= _LARGE)
    return any(plain([weight], *_DTYPES) for weight in weights)


def _layer(input: Any, weight: Any, bias: Any = None) -> Layer:  # named as torch does
    return input, weight, bias


def _is_large(layer: Layer) -> bool:
    x, weight, bias = layer
    given = [t for t in layer if t is not None]
    return (
        all(type(t) in _KNOWN for t in given)
        and weight.dim() == 2
        and weight.numel() >= _LARGE
        and x.dim() >= 2
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in given)
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0
        and not _saves_elsewhere()
        and plain(given, *_DTYPES)
    )


def _saves_elsewhere() -> bool:
    """Whether what is saved passes through hooks, as a checkpoint's does, which runs this again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


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
        moved = multiplied(gradient, weight.mT) if ctx.needs_input_grad[0] else None
        return moved, gradient if ctx.needs_input_grad[1] else None, None
