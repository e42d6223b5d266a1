"""What an operator's own schema and tags say about it."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten

# Elementwise, though torch does not tag them so.
_ALSO_POINTWISE = frozenset(
    (
        "copy",
        "fill",
        "zero",
        "masked_fill",
        "isclose",
        "_to_copy",
        "polar",
        "complex",
        "hardswish",
        "lift",
        "_prelu_kernel",
        "_prelu_kernel_backward",
        "elu_backward",
        "leaky_relu_backward",
        "hardtanh_backward",
        "mish_backward",
        "softplus_backward",
        "hardswish_backward",
        "hardsigmoid_backward",
        "softshrink_backward",
        "hardshrink_backward",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "celu_backward",
    )
)
_NOT_POINTWISE = frozenset(("equal", "rrelu"))  # though torch tags them so
# Functional by their schema, but their result is a view that nobody writes to.
_ALSO_VIEWS = frozenset(
    (
        "_unsafe_view",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsafe_chunk",
        "_reshape_alias",
    )
)
# They update running statistics while training; the schema does not call these written.
_HIDDEN_WRITES = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
}


@dataclass(frozen=True)
class Facts:
    """What is known of an operator.

    Attributes:
        key: Its full name, without the namespace of torch's own.
        name: Its name without namespace and overload.
        overload: Its overload.
        parameters: Its arguments, (name, default, whether by keyword only).
        may_write: Names of the arguments that it writes to.
        returns_written: For each result, the name of the written argument it is, or None.
        view: Whether its results are views of its first argument.
        pointwise: Whether it acts entry by entry, with broadcasting.
        random: Whether it may draw random numbers.
        reshapes_in_place: Whether it changes the shape of an existing tensor.
    """

    key: str
    name: str
    overload: str
    parameters: tuple[tuple[str, Any, bool], ...]
    may_write: tuple[str, ...]
    returns_written: tuple[str | None, ...]
    view: bool
    pointwise: bool
    random: bool
    reshapes_in_place: bool

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name, defaults filled in."""
        bound = {name: default for name, default, _ in self.parameters}
        bound.update({p[0]: value for p, value in zip(self.parameters, args, strict=False)})
        bound.update(kwargs)
        return bound

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that this call writes to."""
        if not self.may_write:
            return []
        bound = self.bind(args, kwargs)
        if self.name in _HIDDEN_WRITES and not bound["training"]:
            return []
        return [bound[name] for name in self.may_write if isinstance(bound[name], torch.Tensor)]

    def unbind(self, bound: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return (args, kwargs) for a call."""
        args = [bound[name] for name, _, keyword in self.parameters if not keyword]
        return args, {name: bound[name] for name, _, keyword in self.parameters if keyword}


@cache
def facts_of(func: Any) -> Facts:
    """Read the schema and the tags of an operator."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    base = name.rstrip("_")
    aliases = {a.name: a.alias_info for a in schema.arguments if a.alias_info is not None}
    written = {k: info for k, info in aliases.items() if info.is_write}
    returned = tuple(
        next((k for k, w in written.items() if r.alias_info.before_set & w.before_set), None)
        if r.alias_info is not None
        else None
        for r in schema.returns
    )
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return Facts(
        key=str(func).removeprefix("aten."),
        name=name,
        overload=func._overloadname,
        parameters=tuple(
            (a.name, a.default_value if a.has_default_value() else None, a.kwarg_only)
            for a in schema.arguments
        ),
        may_write=(*written, *_HIDDEN_WRITES.get(name, ())),
        returns_written=returned,
        view=(views or name in _ALSO_VIEWS) and name != "lift_fresh",
        pointwise=_tagged(func, base) or base in _ALSO_POINTWISE,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        reshapes_in_place=torch.Tag.inplace_view in func.tags,
    )


def _tagged(func: Any, base: str) -> bool:
    """Whether torch calls the operator, or what it is the in-place form of, pointwise."""
    if base in _NOT_POINTWISE:
        return False
    packet = getattr(getattr(torch.ops, func.namespace), base, None)
    functional = getattr(packet, func._overloadname, func)
    return torch.Tag.pointwise in func.tags or torch.Tag.pointwise in functional.tags
