"""Faster kernels for operations of the model, while hooks records its forward pass.

Some of torch's own kernels take several times what the processor needs. The same operations, by
other kernels of torch's, are recorded as functions of ours that can be differentiated again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradscope.backends.hooks.kernels.linear import (
    is_large,
    large_addmm,
    large_linear,
    large_mm,
    large_product,
)
from gradscope.backends.hooks.kernels.pointwise import fast_tanh
from gradscope.backends.hooks.kernels.pooling import max_pool

_OURS: Mapping[Any, Callable[..., Tensor | None]] = {
    F.linear: large_linear,
    torch.addmm: large_addmm,
    **dict.fromkeys((torch.mm, Tensor.mm), large_mm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), large_product),
    **dict.fromkeys((torch.tanh, Tensor.tanh), fast_tanh),
    F.max_pool2d: max_pool,
    torch.max_pool2d: max_pool,
}


class FasterKernels(TorchFunctionMode):
    """In this mode some operations run by another kernel, all others as ever."""

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
        ours = _OURS.get(func)
        found = None if ours is None else ours(*args, **given)
        return func(*args, **given) if found is None else found


def pays_for(model: nn.Module) -> bool:
    """Whether a model may have such operations: the mode costs a little at every operation."""
    return any(is_large(p.detach()) or p.dim() == 4 for p in model.parameters())
