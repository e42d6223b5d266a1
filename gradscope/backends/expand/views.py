"""Views, and changes of a tensor's shape in place.

A view of the memory of all samples is the view of one sample, with the stride over samples. For
frequent views, torch makes it from the memory in one call, with the axes shifted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscope.backends.expand.facts import aten
from gradscope.backends.expand.tensor import PerSample, leaves, refuse

# returns the view of the memory (n, *shape), given the arguments of the view of a sample (*shape)
_Frequent = Callable[..., Tensor | Sequence[Tensor]]
_frequent: dict[str, _Frequent] = {}

# they reinterpret entries and keep leading axes
_REINTERPRET = frozenset(("view_as_real", "view_as_complex"))


def _axis(axis: int, width: int) -> int:
    """Return the axis of the memory for an axis of a sample with `width` axes.

    Raises:
        IndexError: There is no such axis.
    """
    if -width <= axis < width:
        return axis % width + 1
    raise IndexError(
        f"Dimension out of range (expected to be in range of [{-width}, {width - 1}], but got "
        f"{axis})"
    )


def _frequently(*keys: str) -> Callable[[_Frequent], _Frequent]:
    def add(made: _Frequent) -> _Frequent:
        _frequent.update(dict.fromkeys(keys, made))
        return made

    return add


@_frequently("detach.default", "alias.default")
def _same(raw: Tensor) -> Tensor:
    return raw


@_frequently("t.default")
def _transposed(raw: Tensor) -> Tensor:
    return raw.transpose(1, 2) if raw.dim() == 3 else raw


@_frequently("transpose.int")
def _exchanged(raw: Tensor, first: int, second: int) -> Tensor:
    width = raw.dim() - 1
    return raw.transpose(_axis(first, width), _axis(second, width))


@_frequently("permute.default")
def _permuted(raw: Tensor, axes: list[int]) -> Tensor:
    width = raw.dim() - 1
    return raw.permute(0, *[_axis(axis, width) for axis in axes])


@_frequently("view.default", "_unsafe_view.default")
def _reshaped(raw: Tensor, size: list[int]) -> Tensor:
    return raw.view(raw.shape[0], *size)


@_frequently("expand.default")
def _expanded(raw: Tensor, size: list[int]) -> Tensor:
    missing = len(size) - raw.dim() + 1
    raw = raw[(slice(None), *[None] * missing)] if missing else raw
    return raw.expand(raw.shape[0], *size)


@_frequently("unsqueeze.default")
def _unsqueezed(raw: Tensor, axis: int) -> Tensor:
    return raw.unsqueeze(_axis(axis, raw.dim()))


@_frequently("squeeze.dim")
def _squeezed(raw: Tensor, axis: int) -> Tensor:
    return raw.squeeze(_axis(axis, raw.dim() - 1))


@_frequently("select.int")
def _selected(raw: Tensor, axis: int, index: int) -> Tensor:
    return raw.select(_axis(axis, raw.dim() - 1), index)


@_frequently("slice.Tensor")
def _sliced(raw: Tensor, axis: int = 0, *bounds: Any) -> Tensor:
    found: Tensor = aten.slice.Tensor(raw, _axis(axis, raw.dim() - 1), *bounds)
    return found


@_frequently("unbind.int")
def _unbound(raw: Tensor, axis: int = 0) -> Sequence[Tensor]:
    return raw.unbind(_axis(axis, raw.dim() - 1))


@_frequently("split.Tensor", "unsafe_split.Tensor")
def _split(raw: Tensor, size: int, axis: int = 0) -> Sequence[Tensor]:
    return torch.split(raw, size, _axis(axis, raw.dim() - 1))


def view(key: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the view, wrapped: the view of the first sample, with the stride over samples.

    The result shares memory with the argument, so later in-place writes change both.
    """
    base, frequent = args[0], _frequent.get(key)
    if not isinstance(base, PerSample):
        refuse(f"{key} of a constant has no rule, and a copy would not be a view")
    raw = base.raw
    if frequent is not None and not (kwargs or base.lazy or raw.dim() == 1):
        found = frequent(raw, *args[1:])
        return PerSample(found) if isinstance(found, Tensor) else [*map(PerSample, found)]
    name, rest = key.partition(".")[0], args[1:]
    if name in ("_conj", "_neg_view", "detach", "alias"):
        first: Any = raw[0]
    elif name in _REINTERPRET:
        return PerSample(func(raw, *rest, **kwargs)).marked(False, base.is_neg())
    else:
        first = func(raw[0], *rest, **kwargs)

    def repeated(view: Tensor) -> PerSample:
        if view.dtype != raw.dtype:
            refuse(f"{name} reinterprets the memory as {view.dtype}")
        whole = raw.as_strided(
            (raw.shape[0], *view.shape), (raw.stride(0), *view.stride()), view.storage_offset()
        )
        return PerSample(whole).marked(
            base.is_conj() != (name == "_conj"), base.is_neg() != (name == "_neg_view")
        )

    return leaves(repeated, first)


def reshape_in_place(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Change a tensor's shape in place: take the view, and put its memory into the wrapper."""
    target, *rest = args
    # the out-of-place operator with the same arguments
    packet = getattr(aten, name.removesuffix("_"), None)
    overloads = [getattr(packet, each) for each in (packet.overloads() if packet else ())]
    alike = (f for f in overloads if _types(f) == _types(func))
    functional = next(alike, None)
    if functional is None or not isinstance(target, PerSample):
        refuse(f"{name} changes a tensor's shape or memory in place", "Use the out-of-place form.")
    made = view(str(functional).removeprefix("aten."), functional, args, kwargs)
    with torch._C._DisableTorchDispatch():
        func(target, *rest, **kwargs)  # sets the shape and strides of the wrapper
    target.raw = made.raw
    return target


def _types(func: Any) -> list[str]:
    return [str(argument.type) for argument in func._schema.arguments]
