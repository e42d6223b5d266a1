"""Gradients of all samples through operations on parameters only, such as a mask or a norm.

A rule gets the gradients (n, *shape) of one output, and returns the gradient (n, *shape) of each
input, or None if it does not apply. Most kernels of derivatives broadcast. So an elementwise
operation is differentiated for all samples by one call of its node.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.trace import Output, Trace

Pulled = Sequence[Tensor | None] | None
ParameterRule = Callable[[Trace, Output, Tensor], Pulled]


def pull_dense(trace: Trace, output: Output, gradients: Tensor) -> dict[Output, Tensor] | None:
    """Return the gradients (n, *shape) of an operation's inputs, or None without a rule.

    Args:
        trace: The forward pass.
        output: An output of an operation on parameters only.
        gradients: (n, *shape), the gradients of this output.
    """
    rule = _RULES.get(trace.kinds[output[0]])
    try:
        found = None if rule is None else rule(trace, output, gradients)
    except RuntimeError:  # a kernel that does not broadcast, for example with sparse factors
        return None
    if found is None:
        return None
    pulled: dict[Output, Tensor] = {}
    for source, value in zip(trace.edges[output[0]], found, strict=True):
        if source[0] < 0:
            continue
        if value is None:
            return None
        own = _unbroadcast(value, trace.shapes[source[0]][source[1]])
        if own is None:
            return None
        pulled[source] = pulled[source] + own if source in pulled else own
    return pulled


def _unbroadcast(values: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Sum (n, *broadcast shape) to (n, *shape), or return None if the shapes do not fit."""
    extra = values.dim() - 1 - len(shape)
    if extra < 0 or values.layout != torch.strided:
        return None
    axes = [*range(1, 1 + extra)]
    axes += [k + 1 + extra for k, s in enumerate(shape) if s == 1 < values.shape[k + 1 + extra]]
    summed = values.sum(axes, keepdim=True) if axes else values
    n = len(values)
    return summed.reshape(n, *shape) if summed.numel() == n * prod(shape) else None


def _broadcast(trace: Trace, output: Output, gradients: Tensor) -> Pulled:
    """Elementwise operations, whose derivatives broadcast over the samples."""
    found = internals.pull(trace.nodes[output[0]], (gradients,))
    shape = gradients.shape
    return found if all(t is None or t.shape == shape for t in found) else None


def _saved(trace: Trace, output: Output, name: str) -> Any:
    return internals.saved(trace.nodes[output[0]], name)


def _source_shapes(trace: Trace, output: Output) -> list[tuple[int, ...]]:
    return [trace.shapes[node][k] for node, k in trace.edges[output[0]]]


def _expanded(trace: Trace, output: Output, gradients: Tensor) -> Pulled:
    return (gradients,)


def _summed(trace: Trace, output: Output, gradients: Tensor) -> Pulled:
    (shape,), kind = _source_shapes(trace, output), trace.kinds[output[0]]
    if not prod(shape):
        return None
    if kind.startswith("Mean"):
        gradients = gradients * (prod(gradients.shape[1:]) / prod(shape))
    if kind.endswith("1") and shape:  # along some axes
        axes = _saved(trace, output, "dim") or range(len(shape))
        if not _saved(trace, output, "keepdim"):
            for axis in sorted(axis % len(shape) for axis in axes):
                gradients = gradients.unsqueeze(axis + 1)
    else:
        gradients = gradients.reshape(len(gradients), *[1] * len(shape))
    return (gradients.expand(-1, *shape),)


def _product(trace: Trace, output: Output, gradients: Tensor) -> Pulled:
    """`self @ mat2` of two matrices."""
    edges = trace.edges[output[0]]
    left = gradients @ _saved(trace, output, "mat2").mH if edges[0][0] >= 0 else None
    right = _saved(trace, output, "self").mH @ gradients if edges[1][0] >= 0 else None
    return left, right


def _times_vector(trace: Trace, output: Output, gradients: Tensor) -> Pulled:
    """`self @ vec`."""
    edges = trace.edges[output[0]]
    left = right = None
    if edges[0][0] >= 0:
        left = gradients.unsqueeze(-1) * _saved(trace, output, "vec").conj()
    if edges[1][0] >= 0:
        right = gradients @ _saved(trace, output, "self").conj()
    return left, right


def _dot(trace: Trace, output: Output, gradients: Tensor) -> Pulled:
    """The dot product of two real vectors."""
    edges = trace.edges[output[0]]
    if gradients.is_complex():
        return None
    names = ("other" if trace.kinds[output[0]] == "VdotBackward0" else "tensor", "self")
    return [
        gradients.unsqueeze(-1) * _saved(trace, output, name) if source >= 0 else None
        for name, (source, _) in zip(names, edges, strict=True)
    ]


def _permuted(trace: Trace, output: Output, gradients: Tensor) -> Pulled:
    axes = [axis % (gradients.dim() - 1) for axis in _saved(trace, output, "dims")]
    back = sorted(range(len(axes)), key=axes.__getitem__)
    return (gradients.permute(0, *(axis + 1 for axis in back)),)


def _diagonal(trace: Trace, output: Output, gradients: Tensor) -> Pulled:
    """A matrix, or several, with given diagonals."""
    rank = gradients.dim() - 1
    axes = [_saved(trace, output, name) % rank + 1 for name in ("dim1", "dim2")]
    return (gradients.diagonal(_saved(trace, output, "offset"), axes[0], axes[1]),)


def _part(trace: Trace, output: Output, gradients: Tensor) -> Pulled:
    """A part of a tensor along one axis: select, slice, split or unbind."""
    (shape,) = _source_shapes(trace, output)
    kind = trace.kinds[output[0]]
    axis = _saved(trace, output, "dim") % len(shape)
    whole = gradients.new_zeros(len(gradients), *shape)
    if kind == "SelectBackward0":
        whole.select(axis + 1, _saved(trace, output, "index") % shape[axis]).copy_(gradients)
    elif kind == "UnbindBackward0":
        whole.select(axis + 1, output[1]).copy_(gradients)
    elif kind == "SliceBackward0":
        names = ("start", "end", "step")
        span = slice(*(_saved(trace, output, name) for name in names))
        whole[(slice(None),) * (axis + 1) + (span,)] = gradients
    else:  # an output begins after those before it
        before = sum(own[axis] for own in trace.shapes[output[0]][: output[1]])
        whole.narrow(axis + 1, before, gradients.shape[axis + 1]).copy_(gradients)
    return (whole,)


def _concatenated(trace: Trace, output: Output, gradients: Tensor) -> Pulled:
    shapes, edges = _source_shapes(trace, output), trace.edges[output[0]]
    if any(source < 0 for source, _ in edges) or len({*map(len, shapes)}) > 1:
        return None
    axis = _saved(trace, output, "dim") % (gradients.dim() - 1)
    if trace.kinds[output[0]] == "StackBackward0":
        return gradients.unbind(axis + 1)
    sizes = [shape[axis] for shape in shapes]
    places = [sum(sizes[:k]) for k in range(len(sizes))]
    return [gradients.narrow(axis + 1, *span) for span in zip(places, sizes, strict=True)]


def _named(rule: ParameterRule, names: str) -> dict[str, ParameterRule]:
    return dict.fromkeys((f"{name}Backward0" for name in names.split()), rule)


_RULES: dict[str, ParameterRule] = {
    **_named(
        _broadcast,
        "Abs Add Cos Div Exp Expm1 "
        "Log Log1P Mul Neg Pow Reciprocal "
        "Relu Rsqrt Sigmoid Sin Softplus "
        "Sqrt Sub Tanh",
    ),
    **_named(_expanded, "Expand"),
    **_named(_summed, "Mean Sum"),
    **dict.fromkeys(("MeanBackward1", "SumBackward1"), _summed),
    **_named(_product, "Mm"),
    **_named(_times_vector, "Mv"),
    **_named(_dot, "Dot Vdot"),
    **_named(_permuted, "Permute"),
    **_named(_diagonal, "DiagEmbed"),
    **_named(
        _part,
        "Select Slice Split SplitWithSizes Unbind",
    ),
    **_named(_concatenated, "Cat Stack"),
}
