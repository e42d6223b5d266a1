"""Faster kernels for operations of the model, while hooks records its forward pass.

Some of torch's own kernels take several times what the processor needs: matrix products and tanh
where oneDNN's are faster, max pooling where the channels do not come last. The same operations, by
other kernels of torch's, are recorded as functions of ours, which can be differentiated again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.overrides import TorchFunctionMode

from gradscope.backends.hooks.graph import internals
from gradscope.blocks.products import multiplied, plain, tanh

_KNOWN = (Tensor, nn.Parameter)
_aten = torch.ops.aten
Layer = tuple[Tensor, Tensor, Tensor | None]  # input (..., i), weight (o, i), bias (o,)


@dataclass(frozen=True)
class Sizes:
    """From which sizes on a function of ours costs little beside what its kernel saves."""

    weight: int = 2**16  # entries of a linear layer's weight
    tanh: int = 2**6  # entries of one sample: a batch of any size is to be recorded alike
    pooled: int = 2**8  # likewise
    channels: int = 8
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)  # oneDNN's kernels take no other

    def is_large(self, weight: Tensor) -> bool:
        """Whether a linear layer with this weight is run by another kernel."""
        large = weight.dim() == 2 and weight.numel() >= self.weight
        return large and plain([weight], *self.dtypes)


class FasterKernels(TorchFunctionMode):
    """In this mode some operations run by another kernel, all others as ever."""

    def __init__(self, sizes: Sizes = Sizes()) -> None:
        super().__init__()
        self._sizes = sizes
        self._ours: dict[Any, Callable[..., Tensor | None]] = {
            F.linear: self._linear,
            torch.addmm: self._addmm,
            **dict.fromkeys((torch.mm, Tensor.mm), self._mm),
            **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), self._product),
            **dict.fromkeys((torch.tanh, Tensor.tanh), self._tanh),
            **dict.fromkeys((F.max_pool2d, torch.max_pool2d), self._max_pool),
        }

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one function of torch."""
        given = kwargs or {}
        if torch.compiler.is_compiling():  # a part of the model that the user has compiled
            return func(*args, **given)
        ours = self._ours.get(func)
        found = None if ours is None else ours(*args, **given)
        return func(*args, **given) if found is None else found

    # Each has its function's own parameters, and returns None for what it leaves to torch.

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> Tensor | None:
        given = [t for t in (input, weight, bias) if t is not None]
        if not _recordable(given, *self._sizes.dtypes) or not self._sizes.is_large(weight):
            return None
        fits = input.dim() >= 2 and input.shape[-1] == weight.shape[1]
        if not fits or (bias is not None and bias.shape != weight.shape[:1]):
            return None
        layer, zeros = (input, weight, bias), None
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            zeros = _applied(GradscopeWeight, weight, bias, layer)
        return _applied(GradscopeLinear, input, zeros, layer)

    def _product(
        self, input: Any, other: Any = None, bias: Any = None, **more: Any
    ) -> Tensor | None:
        if more or not isinstance(other, Tensor) or other.dim() != 2:
            return None
        parameter = other._base if other._is_view() else other  # or a view such as its transpose
        return self._linear(input, other.T, bias) if isinstance(parameter, nn.Parameter) else None

    def _mm(self, input: Any, mat2: Any = None, **more: Any) -> Tensor | None:
        matrix = isinstance(input, Tensor) and input.dim() == 2  # torch refuses anything else
        return self._product(input, mat2, **more) if matrix else None

    def _addmm(self, input: Any, mat1: Any, mat2: Any, *rest: Any, **more: Any) -> Tensor | None:
        matrices = not rest and mat1.dim() == 2
        return self._product(mat1, mat2, input, **more) if matrices else None

    def _tanh(self, input: Any, **more: Any) -> Tensor | None:
        if more or not _recordable([input], *self._sizes.dtypes):
            return None
        enough = input.dim() > 1 and input[0].numel() >= self._sizes.tanh
        return _applied(GradscopeTanh, input) if enough else None

    def _max_pool(
        self,
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor | None:
        if return_indices or not _recordable([input], torch.float32, torch.float64):
            return None
        pays = (
            input.dim() == 4
            and input.shape[1] >= self._sizes.channels
            and input[0].numel() >= self._sizes.pooled
            and input.is_contiguous()
            and not input.is_contiguous(memory_format=torch.channels_last)
        )
        if not pays:
            return None
        sizes = (kernel_size, stride or kernel_size, padding, dilation)
        window = [[v, v] if isinstance(v, int) else [*v] for v in sizes]
        return _applied(GradscopePool, input, (*window, ceil_mode))


def pays_for(model: nn.Module) -> bool:
    """Whether a model may have such operations: the mode costs a little at every operation."""
    return any(Sizes().is_large(p.detach()) or p.dim() == 4 for p in model.parameters())


def _recordable(given: Sequence[Any], *dtypes: torch.dtype) -> bool:
    """Whether autograd records these, and nobody else does: no hook, no other mode of torch's."""
    return (
        all(type(t) in _KNOWN for t in given)
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in given)
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0
        # what is saved passes through no hooks, as a checkpoint's does, which runs this again
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and plain(given, *dtypes)
    )


def _applied(function: type[Function], *arguments: Any) -> Tensor:
    found: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return found


class GradscopeWeight(Function):
    """Where weight and bias enter: zeros of the output's shape, whose gradient is the output's.

    A linear layer is two operations, so that autograd computes the weights' gradient only where it
    is asked for: this one, and `GradscopeLinear`, which adds the product to the zeros. The layer
    is no argument of its own, so that no gradient of the input is asked for here.
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
        """Return the output (..., o), as no view, so that the model may write into it."""
        ctx.layer = layer
        ctx.save_for_backward(layer[1].detach())
        found = multiplied(*layer)
        whole: Tensor = _aten._unsafe_view(found, found.shape) if found._is_view() else found
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradient of the input (..., i), and that of the zeros."""
        (weight,) = ctx.saved_tensors
        weight = ctx.layer[1] if torch.is_grad_enabled() else weight
        gradient = gradient.contiguous()  # the kernel would copy it for itself, and others again
        asked = ctx.needs_input_grad[0] and internals.is_asked_for(ctx, 0)
        moved = multiplied(gradient, weight.mT) if asked else None
        return moved, gradient if ctx.needs_input_grad[1] else None, None


class GradscopeTanh(Function):
    """tanh; its derivatives are torch's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return tanh(x) (...)."""
        y = tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient · (1 − tanh²(x))."""
        found: Tensor = _aten.tanh_backward(gradient, *ctx.saved_tensors)
        return found


class GradscopePool(Function):
    """Max pooling with the channels last; what is saved and its derivatives are torch's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: tuple[Any, ...]) -> Tensor:
        """Return the maxima (n, c, h', w')."""
        last = x.contiguous(memory_format=torch.channels_last)
        values, places = _aten.max_pool2d_with_indices(last, *window)
        ctx.window = window
        ctx.save_for_backward(x, places.contiguous())
        found: Tensor = values.contiguous()
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient, each number at the place of its maximum (n, c, h, w)."""
        x, places = ctx.saved_tensors
        return _aten.max_pool2d_with_indices_backward(gradient, x, *ctx.window, places), None
