"""Stored rows to tensors: dtype, scale and the shape of a sample, one batch at a time."""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from gradscope.errors import DatasetError


def converter(
    shape: Sequence[int],
    stored: torch.dtype,
    *,
    dtype: str | None,
    scale: float | None,
    reshape: tuple[int, ...] | None,
) -> Callable[[Tensor], Tensor]:
    """Return what makes stored rows (n, *shape) into a tensor (n, ...) of its own memory.

    Without a dtype, floating-point numbers keep theirs and integers become int64, the one kind
    that class labels and embedding indices may be; scaled integers become float32.

    Args:
        shape: The stored shape of one sample.
        stored: The stored dtype.
        dtype: The name of the dtype to make.
        scale: The number to multiply by, before the cast.
        reshape: The shape to make of one sample.

    Raises:
        DatasetError: The shape or dtype cannot be had from what is stored.
    """
    goal = _goal(stored, dtype, scaled=scale is not None)
    if stored.is_complex and not goal.is_complex:
        raise DatasetError(
            f"complex numbers cannot be made {dtype}", remedy="Give a complex dtype, or none."
        )
    new = _new_shape(tuple(shape), reshape)

    def convert(rows: Tensor) -> Tensor:
        values = rows.clone()  # the stored array is not the model's to write to
        if scale is not None:
            values = values.to(torch.promote_types(stored, torch.float64)) * scale
        return _cast(values, goal).reshape(len(rows), *new)

    return convert


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _goal(stored: torch.dtype, dtype: str | None, *, scaled: bool) -> torch.dtype:
    if dtype is not None:
        goal = getattr(torch, dtype)
        assert isinstance(goal, torch.dtype)  # the spec lists them
        return goal
    if stored.is_floating_point or stored.is_complex:
        return stored
    if scaled:
        return torch.float32
    return stored if stored == torch.bool else torch.int64


def _cast(values: Tensor, goal: torch.dtype) -> Tensor:
    """Cast; a number that an integer dtype cannot hold is an error, never cut or wrapped."""
    result = values.to(goal)
    if goal.is_floating_point or goal.is_complex or goal == values.dtype:
        return result
    lost = result.to(values.dtype) != values
    if lost.any():
        name, first = dtype_name(goal), values[lost][0].item()
        raise DatasetError(
            f"{int(lost.sum())} values cannot be made {name}, the first is {first}",
            remedy="Give a dtype that holds them.",
        )
    return result


def _new_shape(shape: tuple[int, ...], reshape: tuple[int, ...] | None) -> tuple[int, ...]:
    if reshape is None:
        return shape
    size, known = prod(shape), prod(k for k in reshape if k != -1)
    fits = size % known == 0 if -1 in reshape else size == known
    if not fits:
        raise DatasetError(
            f"a sample of shape {shape} ({size} numbers) cannot be reshaped to {reshape}",
            remedy="The numbers of entries must agree; -1 stands for what is left.",
        )
    return tuple(size // known if k == -1 else k for k in reshape)
