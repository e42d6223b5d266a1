"""Facts about operators from their schemas and tags, and the registry of expand rules."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch

from gradscope.core.registry import Registry

aten = torch.ops.aten

# A rule takes the `Expansion` and the operator's arguments, and returns the physical result. It
# returns NotImplemented if it does not apply. Then the operator runs sample by sample, which is
# exact for every operator.
Rule = Callable[..., Any]

rules: Registry[Rule] = Registry("expand rule")


def each(keys: str, *more: Any) -> Callable[[Rule], Rule]:
    """Register a rule for many operators; it is called with `more` and the operator first."""

    def add(rule: Rule) -> Rule:
        for key in keys.split():
            name, _, overload = key.partition(".")
            overload = overload or "default"
            func = getattr(getattr(aten, name), overload)
            rules.register(f"{name}.{overload}")(partial(rule, *more, func))
        return rule

    return add


# elementwise operators without torch's tag
_ALSO_POINTWISE = (
    "copy fill zero masked_fill isclose _to_copy polar complex hardswish lift _prelu_kernel "
    "_prelu_kernel_backward elu_backward leaky_relu_backward hardtanh_backward mish_backward "
    "softplus_backward hardswish_backward hardsigmoid_backward softshrink_backward "
    "hardshrink_backward celu_backward zeros_like ones_like full_like empty_like"
)
_NOT_POINTWISE = ("equal", "rrelu")  # despite torch's tag
# not views by their schema, but their results are views that nobody writes to
_ALSO_VIEWS = (
    *("_unsafe_view", "_reshape_alias"),
    *("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"),
)
# They update running statistics in train mode, but the schema does not declare the writes.
_HIDDEN_WRITES = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), ("running_mean", "running_var")
)


@dataclass(frozen=True)
class OperatorFacts:
    """The facts about an operator."""

    key: str  # its full name, without the namespace aten
    name: str  # without namespace and overload
    overload: str
    parameters: tuple[tuple[str, Any, bool], ...]  # (name, default, whether keyword-only)
    may_write: tuple[str, ...]  # names of arguments that it may write to
    # for each result, the written argument that it returns, or None
    returns_written: tuple[str | None, ...]
    view: bool  # whether its results are views of its first argument
    pointwise: bool  # whether it acts elementwise, with broadcasting
    random: bool  # whether it may draw random numbers
    reshapes_in_place: bool  # whether it changes the shape of an existing tensor
    nested: bool  # whether an argument may be a list of tensors
    makes_new: bool  # whether the result is new memory that is probably written to later

    @cached_property
    def axis_argument(self) -> int:
        """The position of an argument `dim`, if it is the only argument that depends on axes."""
        names = [name for name, _, _ in self.parameters]
        others = {"dims", "dim1", "dim2", "index", "input_size", "input_sizes"}
        single = "dim" in names and not self.nested and others.isdisjoint(names)
        return names.index("dim") if single else -1

    @cached_property
    def returns_any_written(self) -> bool:
        """Whether a result is an argument that the operator writes to."""
        return any(self.returns_written)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name, including defaults."""
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
def facts_of(func: Any) -> OperatorFacts:
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
    packet = getattr(getattr(torch.ops, func.namespace), base, None)
    functional = getattr(packet, func._overloadname, func)  # the out-of-place form of the operator
    tagged = torch.Tag.pointwise in {*func.tags, *functional.tags} and base not in _NOT_POINTWISE
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return OperatorFacts(
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
        pointwise=tagged or base in _ALSO_POINTWISE.split(),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        reshapes_in_place=torch.Tag.inplace_view in func.tags,
        nested=any(str(a.type).count("Tensor") and "List" in str(a.type) for a in schema.arguments),
        makes_new=name.startswith("new_") or name.endswith("_like"),
    )
