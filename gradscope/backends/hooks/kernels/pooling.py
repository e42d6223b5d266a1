"""Max pooling with the channels last: the same numbers and places, up to eight times as fast."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradscope.backends.hooks.kernels.conditions import recordable

_CHANNELS, _ENTRIES = 8, 2**8  # of one sample, from which on the copies pay
_DTYPES = (torch.float32, torch.float64)
_aten = torch.ops.aten


def max_pool(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """Return what `F.max_pool2d` does, or None where it had better do it (named as torch does)."""
    if return_indices or not recordable([input], *_DTYPES) or not _pays(input):
        return None
    window = [_pair(v) for v in (kernel_size, stride or kernel_size, padding, dilation)]
    found: Tensor = GradscopePool.apply(input, (*window, ceil_mode))  # type: ignore[no-untyped-call]
    return found


def _pays(x: Tensor) -> bool:
    return (
        x.dim() == 4
        and x.shape[1] >= _CHANNELS
        and x[0].numel() >= _ENTRIES
        and x.is_contiguous()
        and not x.is_contiguous(memory_format=torch.channels_last)
    )


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else [*value]


class GradscopePool(Function):
    """Max pooling; what is saved and its derivatives are torch's own."""

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
