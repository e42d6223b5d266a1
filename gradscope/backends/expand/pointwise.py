"""Operators that act entry by entry, with broadcasting."""

from typing import Any

import torch
from torch import Tensor

from gradscope.backends.expand.signals import refuse
from gradscope.backends.expand.tensor import PerSample, leaves, tensors_of

_NUMBERS = frozenset(
    f"aten.{name}.Tensor" for name in ("fill", "fill_", "masked_fill", "masked_fill_")
)


def pointwise(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply `func` to the physical tensors, their logical axes aligned from the right.

    Where dtypes differ and a tensor has no logical axes, the sample axis would change the
    promotion of dtypes, and the rule does not apply.
    """
    found = tensors_of(args, kwargs)
    if _takes_a_number(func) and isinstance(args[-1], PerSample):
        return NotImplemented
    if len({t.dtype for t in found}) > 1 and any(
        t.dim() == 0 and isinstance(t, PerSample) for t in found
    ):
        return NotImplemented
    width = max(t.dim() for t in found)
    if isinstance(out := kwargs.get("out"), Tensor) and out.shape != _shape(args):
        refuse("an argument out= has another shape than the result", "Assign the result instead.")
    if isinstance(kwargs.get("memory_format"), torch.memory_format):
        kwargs = {**kwargs, "memory_format": _without_layout(kwargs["memory_format"])}

    def aligned(t: Tensor) -> Tensor:
        if not isinstance(t, PerSample):
            return t
        missing = width - t.dim()
        return t.physical[(slice(None), *[None] * missing)] if missing else t.physical

    mine, named = leaves(aligned, (args, kwargs))
    return func(*mine, **named)


def _shape(args: Any) -> torch.Size:
    """Return the logical shape that the arguments broadcast to."""
    shapes = [t.shape for t in tensors_of(args, {})]
    result: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return result


def _takes_a_number(func: Any) -> bool:
    """Whether the last argument must be a tensor without axes."""
    return str(func) in _NUMBERS


def _without_layout(wanted: torch.memory_format) -> torch.memory_format:
    """Replace the channels-last layouts, which are about ranks 4 and 5, by the layout it has."""
    if wanted in (torch.channels_last, torch.channels_last_3d):
        return torch.preserve_format
    return wanted
