"""Everything that torch documents for inspection but does not promise, in this one module.

`Node.next_functions`, `Node._input_metadata`, `Node._saved_*`, `AccumulateGrad.variable`, calling a
Node, `GradientEdge`, and what the engine is about to do. A torch release that changes them breaks
this file and its test, loudly.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

FUSED_RECURRENT = frozenset({"MkldnnRnnLayerBackward0", "CudnnRnnBackward0", "MiopenRnnBackward0"})

_UNSIGNED_MINUS_ONE = 2**64 - 1


def kind(node: Node) -> str:
    """Return the node's type, such as "AddmmBackward0"."""
    return node.name().rpartition("::")[2]


def edges(node: Node) -> tuple[tuple[Node | None, int], ...]:
    """Return, for each input of the forward operation, the node it came from and which output."""
    return tuple(node.next_functions)


def output_shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the forward operation's outputs."""
    return tuple(tuple(int(s) for s in m.shape) for m in _metadata(node))


def output_dtypes(node: Node) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the forward operation's outputs."""
    return tuple(m.dtype for m in _metadata(node))


def is_asked_for(node: Node, slot: int) -> bool:
    """Whether the backward pass under way goes on from an operation's input to what made it.

    A Function written in Python is told only which inputs require a gradient.
    """
    source = node.next_functions[slot][0]
    if source is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(source))
    except RuntimeError:  # torch does not say it of leaves, nor where a node is called by itself
        return True


def leaf(node: Node) -> Tensor | None:
    """Return the tensor whose gradient the node accumulates, or None for an operation."""
    return node.variable if kind(node) == "AccumulateGrad" else None  # type: ignore[attr-defined]


def edge(node: Node, output: int) -> GradientEdge:
    """Return the handle by which `torch.autograd.grad` knows an operation's output."""
    return GradientEdge(node, output)


def root(losses: Tensor) -> Node:
    """Return the node of a tensor that has a graph."""
    node = losses.grad_fn
    assert node is not None
    return node


def saved(node: Node, name: str) -> Any:
    """Return what the operation saved under `name`, tensors without their graph.

    A size or index of -1 comes out of torch as an unsigned number and is set right here.
    """
    value = getattr(node, f"_saved_{name}")
    if isinstance(value, Tensor):
        return value.detach()
    return -1 if isinstance(value, int) and value == _UNSIGNED_MINUS_ONE else value


def saved_tensors(node: Node) -> tuple[Tensor, ...]:
    """Return what a Function written in Python saved."""
    return tuple(node.saved_tensors)  # type: ignore[attr-defined]


def pull(node: Node, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operation's direct inputs, given those of its outputs."""
    # a Function written in Python can only be applied
    call: Any = node if callable(node) else getattr(node, "apply")  # noqa: B009
    with torch.no_grad():
        result = call(*gradients)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _metadata(node: Node) -> list[Any]:
    return node._input_metadata
