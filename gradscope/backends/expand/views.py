"""Views: one rule for all of them, since a view is no more than shape, strides and offset."""

from typing import Any

import torch
from torch import Tensor

from gradscope.backends.expand.facts import aten
from gradscope.backends.expand.signals import refuse
from gradscope.backends.expand.tensor import PerSample, leaves

# They change what an entry is, and leave leading axes alone.
_REINTERPRET = frozenset(("view_as_real", "view_as_complex"))


def view(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the view, wrapped: the first sample's, repeated at the stride over samples.

    The result shares memory with the argument, so later writes in place are seen by both.
    """
    base, *rest = args
    if not isinstance(base, PerSample):
        refuse(f"it has no rule for {name} of a constant, and a copy would not be a view")
    raw = base.raw
    if name in ("_conj", "_neg_view", "detach", "alias"):
        first: Any = raw[0]
    elif name in _REINTERPRET:
        return PerSample(func(raw, *rest, **kwargs)).marked(False, base.is_neg())
    else:
        first = func(raw[0], *rest, **kwargs)

    def repeated(view: Tensor) -> PerSample:
        if view.dtype != raw.dtype:
            refuse(f"{name} reads the memory as {view.dtype}")
        whole = raw.as_strided(
            (raw.shape[0], *view.shape), (raw.stride(0), *view.stride()), view.storage_offset()
        )
        return PerSample(whole).marked(
            base.is_conj() != (name == "_conj"), base.is_neg() != (name == "_neg_view")
        )

    return leaves(repeated, first)


def reshape_in_place(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Change a tensor's shape in place: take the view, and let the wrapper become it."""
    target, *rest = args
    functional = _out_of_place(name.removesuffix("_"), func)
    if functional is None or not isinstance(target, PerSample):
        refuse(f"{name} changes a tensor's shape or memory in place", "Write it out of place.")
    made = view(functional._schema.name.partition("::")[2], functional, args, kwargs)
    with torch._C._DisableTorchDispatch():
        func(target, *rest, **kwargs)  # the wrapper's own shape and strides
    target.raw = made.raw
    return target


def _out_of_place(name: str, func: Any) -> Any:
    """Return the operator `name` that takes what `func` takes, or None."""
    packet = getattr(aten, name, None)
    wanted = [str(a.type) for a in func._schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if [str(a.type) for a in found._schema.arguments] == wanted:
            return found
    return None
