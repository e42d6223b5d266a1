"""All uses of torch's graph interfaces that are documented only for inspection.

They are `Node.next_functions`, `Node._input_metadata`, `Node._sequence_nr`, `Node._saved_*`,
calling a Node, `AccumulateGrad.variable`, `GradientEdge` and the engine's `run_backward`. `probe`
tests all of them before the first graph is read. If a torch release changes them, the backend
raises and names the change. New uses belong into this module and into `probe`.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradscope.model.releases import expect, torch_changed

FUSED_RECURRENT = frozenset({"MkldnnRnnLayerBackward0", "CudnnRnnBackward0", "MiopenRnnBackward0"})

_OF_SHAPES = re.compile("_sym_|_sizes|_strides|_numel")
_NO_CONSTANT: Any = object()


def kind(node: Node) -> str:
    """Return the node's type, such as "AddmmBackward0"."""
    return _short(node.name())


@cache
def _short(name: str) -> str:
    return name.rpartition("::")[2]


def is_custom(node: Node) -> bool:
    """Whether the operation is an autograd.Function written in Python."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def edges(node: Node) -> tuple[tuple[Node | None, int], ...]:
    """Return the source node and its output index for each input of the forward operation."""
    return node.next_functions


def outputs(node: Node) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each output of the forward operation."""
    return [(tuple(m.shape), m.dtype) for m in node._input_metadata]


def output_dtypes(node: Node) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the forward operation's outputs."""
    return tuple([m.dtype for m in node._input_metadata])


def leaf(node: Node) -> Tensor | None:
    """Return the tensor whose gradient the node accumulates, or None for an operation."""
    return node.variable if kind(node) == "AccumulateGrad" else None  # type: ignore[attr-defined]


def edge(node: Node, output: int) -> "torch.autograd.graph.GradientEdge":
    """Return the handle of an operation's output for `torch.autograd.grad`."""
    return torch.autograd.graph.GradientEdge(node, output)


def backward(
    losses: Tensor, weights: Tensor, edges: Sequence["torch.autograd.graph.GradientEdge"]
) -> tuple[Tensor | None, ...]:
    """Return the gradient of Σᵢ wᵢ Lᵢ by each edge, or None; the graph is kept.

    `torch.autograd.grad` takes twice as long for a small model. With `grad_outputs`, it also
    imports torch's symbolic shapes, which takes a third of a second.

    Args:
        losses: Losses of any shape, with their graph.
        weights: Their weights, of the same shape.
        edges: Handles of operations' outputs; see `edge`.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    keep_graph, create_graph, allow_unused = True, False, True
    asked = (losses,), (weights,), keep_graph, create_graph, tuple(edges), allow_unused
    found: tuple[Tensor | None, ...] = engine.run_backward(*asked, accumulate_grad=False)
    return found


def moment(node: Node) -> int:
    """Return a number that increases with the time of the forward operation."""
    return node._sequence_nr()


def root(losses: Tensor) -> Node:
    """Return the node of a tensor that has a graph."""
    node = losses.grad_fn
    assert node is not None
    return node


def saved(node: Node, name: str) -> Any:
    """Return the value that the operation saved under `name`; tensors without their graph.

    torch returns negative sizes and indices as unsigned numbers. They are corrected here.

    Raises:
        UnsupportedError: Operations of this kind do not save this value.
    """
    attribute = f"_saved_{name}"
    if not hasattr(type(node), attribute):
        raise torch_changed("the hooks backend", f"{kind(node)} has no {attribute}")
    value = getattr(node, attribute)
    return value.detach() if isinstance(value, Tensor) else _signed(value)


def saved_attribute(node: Node, name: str) -> Any:
    """Return the value that the operation saved under `name`, or None."""
    return saved(node, name) if hasattr(type(node), f"_saved_{name}") else None


def constants(node: Node) -> dict[str, Any]:
    """Return the numbers, flags and strings that are part of an operation, by attribute.

    Shapes and tensors are left out, except single numbers on the CPU. For indices, the result has
    their dtype and rank. For an autograd.Function in Python, it has the stored attributes.
    """
    own: dict[str, Any] = vars(node) if is_custom(node) else {}
    names = (*_attributes(type(node)), *own)
    read = ((name, constant(node, name)) for name in names)
    return {name: value for name, value in read if value is not _NO_CONSTANT}


def constant(node: Node, attribute: str) -> Any:
    """Return the constant under `attribute`, or `_NO_CONSTANT`."""
    value = getattr(node, attribute, None)
    if isinstance(value, Tensor):
        single = value.dim() == 0 and value.device.type == "cpu"
        return value.item() if single else _NO_CONSTANT
    if isinstance(value, tuple | list):
        if any(isinstance(v, Tensor) for v in value):
            return tuple(None if v is None else (v.dtype, v.dim()) for v in value)
        value = tuple(value)
    simple = value is None or isinstance(value, int | float | complex | str | tuple)
    return _signed(value) if simple else _NO_CONSTANT


@cache
def _attributes(kind: type) -> tuple[str, ...]:
    names = (name for name in dir(kind) if name.startswith("_saved_"))
    return tuple(name for name in names if not _OF_SHAPES.search(name))


def _signed(value: Any) -> Any:
    """Correct negative numbers that torch returns as unsigned."""
    if isinstance(value, tuple | list):
        return tuple(map(_signed, value))
    return value - 2**64 if type(value) is int and value >= 2**63 else value


def saved_tensors(node: Node) -> tuple[Tensor, ...]:
    """Return the tensors that an autograd.Function in Python saved."""
    return tuple(node.saved_tensors)  # type: ignore[attr-defined]


def pull(node: Node, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients of an operation's inputs, given the gradients of its outputs."""
    # an autograd.Function in Python only has `apply`
    call: Any = node if callable(node) else getattr(node, "apply")  # noqa: B009
    with torch.no_grad():
        result = call(*gradients)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


class _Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return -x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def probe() -> None:
    """Read small graphs with every function of this module; check shapes and types.

    Values are checked by the certificate; torch's fake tensors have none.

    Raises:
        Exception: This torch release records, names or runs graphs differently.
    """

    def made(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device="cpu", requires_grad=True)

    bias, inputs, weight = made(2), made(4, 3), made(3, 2)
    index = torch.zeros(4, dtype=torch.int64, device="cpu")
    out = torch.addmm(bias, inputs, weight)
    negated = _Negated.apply(out)  # type: ignore[no-untyped-call]
    node, custom = root(out), root(negated)  # keeps its saved tensors while `negated` exists
    table = root(torch.nn.functional.embedding(index, weight))
    total, ones = out.sum(), torch.ones_like(out)
    (gradient,) = torch.autograd.grad(total, [edge(node, 0)], retain_graph=True)
    passed = backward(out, 2 * ones, [edge(node, 0), edge(table, 0)])
    leaves = [leaf(source) for source, _ in edges(node) if source is not None]
    expect(
        {
            "the name of addmm's Node": (kind(node), "AddmmBackward0"),
            "_input_metadata": (outputs(node), [((4, 2), torch.float32)]),
            "_input_metadata's dtypes": (output_dtypes(node), (torch.float32,)),
            "_sequence_nr": (moment(root(total)) > moment(node), True),
            "next_functions": (edges(root(total)), ((node, 0),)),
            "AccumulateGrad's first variable": (leaves[0] is bias, True),
            "the leaves next to addmm's Node": (len(leaves), 3),
            "an operation's variable": (leaf(node), None),
            "which Node belongs to a Function": ([*map(is_custom, (node, custom))], [False, True]),
            "_saved_mat1": (saved(node, "mat1").shape, inputs.shape),
            "_saved_alpha": (constant(node, "_saved_alpha"), 1),
            "_saved_padding_idx": (saved(table, "padding_idx"), -1),
            "the attributes _saved_*": ("_saved_beta" in constants(node), True),
            "an attribute that is not saved": (saved_attribute(node, "nothing"), None),
            "the gradient by a GradientEdge": (gradient.shape, out.shape),
            "the engine's run_backward": (
                [None if g is None else (g.shape, g.dtype) for g in passed],
                [(out.shape, torch.float32), None],
            ),
            "a Node's call": ([g is not None for g in pull(node, (ones,))], [True] * 3),
            "a Function's saved_tensors": ([t.shape for t in saved_tensors(custom)], [out.shape]),
            "a Function's apply": ([g is not None for g in pull(custom, (ones,))], [True]),
        }
    )
