"""Propagation from the frontier back to the parameters, through operations on parameters only.

Transposes and reshapes keep a block's structure. Other operations (a mask, a weight norm, a softmax
over a parameter) are differentiated densely for all samples together: by a rule, or by one batched
vector-Jacobian product.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.trace import Output, Trace
from gradscope.backends.hooks.parameter_rules import pull_dense
from gradscope.backends.hooks.rules import scatter
from gradscope.blocks import Block, DenseBlock, OuterBlock, SegmentBlock, total

PullbackRule = Callable[[Trace, int, Block], Block | None]


def pull_back(
    trace: Trace, arrived: Sequence[tuple[Output, Block]], parameters: Mapping[str, Tensor]
) -> dict[str, list[Block]]:
    """Return the blocks whose sum is each parameter's gradient; an empty list means zero."""
    names = {id(p): name for name, p in parameters.items()}
    parts: dict[str, list[Block]] = {name: [] for name in parameters}
    waiting: dict[Output, list[Block]] = {}

    def move(place: Output, block: Block) -> None:
        """Move a block back as far as it keeps its structure."""
        while (step := _STEPS.get(trace.kinds[place[0]])) is not None:
            moved = step(trace, place[0], block)
            if moved is None:
                break
            block, place = moved, trace.edges[place[0]][0]
        leaf = internals.leaf(trace.nodes[place[0]])
        if leaf is None:
            waiting.setdefault(place, []).append(block)
        elif id(leaf) in names:
            parts[names[id(leaf)]].append(block)

    for output, block in arrived:
        move(output, block)
    stuck: dict[Output, list[Block]] = {}
    while waiting:
        # later operations first: then most of an output's gradients have arrived
        output = max(waiting, key=lambda k: internals.moment(trace.nodes[k[0]]))
        blocks = waiting.pop(output)
        found = pull_dense(trace, output, total(blocks).dense())
        if found is None:
            stuck.setdefault(output, []).extend(blocks)
        for source, values in (found or {}).items():
            move(source, DenseBlock(values))
    if stuck:
        for name, block in _dense_pull(trace, stuck, parameters).items():
            parts[name].append(block)
    return parts


def _dense_pull(
    trace: Trace, stuck: Mapping[Output, Sequence[Block]], parameters: Mapping[str, Tensor]
) -> dict[str, Block]:
    """Propagate dense gradients back through the rest of the parameter-only graph."""
    outputs = [internals.edge(trace.nodes[node], output) for node, output in stuck]
    vectors = [total(blocks).dense() for blocks in stuck.values()]

    def pulled(vectors: list[Tensor], *, batched: bool) -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            outputs,
            list(parameters.values()),
            grad_outputs=vectors,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=batched,
        )

    try:
        found = pulled(vectors, batched=True)
    except RuntimeError:  # no batching rule: one sample at a time
        rows = [pulled([v[i] for v in vectors], batched=False) for i in range(len(vectors[0]))]
        found = [None if c[0] is None else torch.stack(c) for c in zip(*rows, strict=True)]
    named = zip(parameters, found, strict=True)
    return {name: DenseBlock(value) for name, value in named if value is not None}


def _source_shape(trace: Trace, node: int) -> tuple[int, ...]:
    source, output = trace.edges[node][0]
    return trace.shapes[source][output]


def _transposed(trace: Trace, node: int, block: Block) -> Block:
    if len(block.shape) < 2:  # a scalar or a vector is its own transpose
        return block
    if trace.kinds[node] == "TBackward0":
        return block.transpose(0, 1)
    axes = (internals.saved(trace.nodes[node], f"dim{k}") for k in (0, 1))
    return block.transpose(*(axis % len(block.shape) for axis in axes))


def _permuted(trace: Trace, node: int, block: Block) -> Block | None:
    axes = internals.saved(trace.nodes[node], "dims")
    return block.transpose(1, 0) if [a % 2 for a in axes] == [1, 0] else None


def _cast(trace: Trace, node: int, block: Block) -> Block:
    source, output = trace.edges[node][0]
    return block.to(internals.output_dtypes(trace.nodes[source])[output])


def _looked_up(trace: Trace, node: int, block: Block) -> Block | None:
    """Position ids without a sample axis: every sample looked up the same rows."""
    operation = trace.nodes[node]
    if internals.saved(operation, "scale_grad_by_freq"):
        return None
    index = internals.saved(operation, "indices").flatten()
    rows = block.dense().reshape(block.n, len(index), -1)
    size = _source_shape(trace, node)[0]
    padding = internals.saved(operation, "padding_idx")
    return scatter(index.expand(block.n, -1), rows, size, padding)


def _stacked(trace: Trace, node: int, block: Block) -> Block | None:
    """One matrix of a stack, such as an expert: its rows get the matrix's index as group."""
    operation, shape = trace.nodes[node], _source_shape(trace, node)
    if isinstance(block, OuterBlock) and block.sizes[0] == 1:
        block = SegmentBlock.of(block)
    if not isinstance(block, SegmentBlock) or block.sizes[1] > 1:
        return None
    if internals.saved(operation, "dim") != 0:
        return None
    return block.as_stack_entry(internals.saved(operation, "index") % shape[0], shape[0])


_STEPS: dict[str, PullbackRule] = {
    **dict.fromkeys(("TBackward0", "TransposeBackward0"), _transposed),
    **dict.fromkeys(
        (
            *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"),
            *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1"),
        ),
        lambda trace, node, block: block.reshape(_source_shape(trace, node)),
    ),
    **dict.fromkeys(("CloneBackward0", "AliasBackward0"), lambda trace, node, block: block),
    "ToCopyBackward0": _cast,
    "PermuteBackward0": _permuted,
    "SelectBackward0": _stacked,
    "EmbeddingBackward0": _looked_up,
}
