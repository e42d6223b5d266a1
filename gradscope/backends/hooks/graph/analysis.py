"""What is known about a program before any of its batches is computed.

From two small forward passes: the sample axis of every operation's output, which operations are
parameter-only, and the frontier between the two. From the gradients of single losses: the layout of
merged axes, and whether samples are coupled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.axes import (
    SampleAxis,
    changed_axis,
    consistent,
    layouts,
    support,
)
from gradscope.backends.hooks.graph.trace import Trace
from gradscope.errors import CoupledSamplesError, UnsupportedError

Output = tuple[int, int]  # (index of a node in its trace, which of its outputs)

OTHERS = "Use the vmap or loop backend, or let auto choose."


@dataclass(frozen=True)
class FrontierEdge:
    """Where a parameter-only value enters an operation on samples.

    Attributes:
        node: Index of the operation on samples.
        slot: Which of its inputs the value is.
        source: The (node, output) that made the value.
    """

    node: int
    slot: int
    source: Output


@dataclass(frozen=True)
class Analysis:
    """The static facts of a program.

    Attributes:
        trace: The small forward pass that was analysed; only its shape is used afterwards.
        axes: The sample axis of each node output that has one.
        frontier: Every edge by which a selected parameter's influence reaches samples.
        unsettled: Outputs whose gradients were all zero here, so that their layout is open.
    """

    trace: Trace
    axes: dict[Output, SampleAxis]
    frontier: tuple[FrontierEdge, ...]
    unsettled: frozenset[Output]

    def fits(self, other: Trace) -> bool:
        """Whether another forward pass is this program, up to the number of samples."""
        if not self.trace.same_program(other):
            return False
        return all(
            self._grown(node, output, shape, other.n) == other.shapes[node][output]
            for node, shapes in enumerate(self.trace.shapes)
            for output, shape in enumerate(shapes)
        )

    def _grown(self, node: int, output: int, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        axis = self.axes.get((node, output))
        if axis is None:
            return shape
        return (*shape[: axis.axis], axis.positions * n, *shape[axis.axis + 1 :])


def analyse(first: Trace, second: Trace, parameters: set[int]) -> Analysis:
    """Compare two forward passes of a program.

    Args:
        first: At n samples; single losses are differentiated in it, its graph is kept.
        second: At another number of samples.
        parameters: `id` of each selected parameter.

    Raises:
        UnsupportedError: The program or its layout depends on the number of samples.
        CoupledSamplesError: A loss depends on other samples.
    """
    if not first.same_program(second):
        raise UnsupportedError(
            "the model runs other operations for another number of samples",
            where=_first_difference(first, second),
            remedy=OTHERS,
        )
    sizes = _changed_axes(first, second)
    wanted = _reaching(first, parameters)
    _refuse_mixing(first, sizes)
    on_samples = {node for node, _ in sizes}
    frontier = tuple(
        FrontierEdge(node, slot, source)
        for node in sorted(on_samples)
        for slot, source in enumerate(first.edges[node])
        if source[0] in wanted and source[0] not in on_samples
    )
    inputs = {node for node in on_samples if internals.leaf(first.nodes[node]) is not None}
    needed = {edge.node for edge in frontier} | inputs
    observed = [output for output in sizes if output[0] in needed]
    found, unsettled = _settled(first, {output: sizes[output] for output in observed})
    axes = {output: SampleAxis(axis, 1, size) for output, (axis, size) in sizes.items()}
    return Analysis(first, axes | found, frontier, unsettled)


def _changed_axes(first: Trace, second: Trace) -> dict[Output, tuple[int, int]]:
    sizes: dict[Output, tuple[int, int]] = {}
    for node, (shapes, others) in enumerate(zip(first.shapes, second.shapes, strict=True)):
        for output, (shape, other) in enumerate(zip(shapes, others, strict=True)):
            try:
                if len(shape) != len(other):
                    raise ValueError(f"an output has shape {shape} or {other}")
                change = changed_axis(shape, first.n, other, second.n)
            except ValueError as error:
                raise UnsupportedError(
                    f"no single sample axis: {error}",
                    where=f"operation {first.kinds[node]}",
                    remedy=OTHERS,
                ) from error
            if change is not None:
                sizes[node, output] = change
    return sizes


def _reaching(trace: Trace, parameters: set[int]) -> set[int]:
    """Return the nodes from which a selected parameter can be reached."""
    leaves = {k for k, node in enumerate(trace.nodes) if id(internals.leaf(node)) in parameters}
    return _upstream_closed(trace, leaves)


def _upstream_closed(trace: Trace, seeds: set[int]) -> set[int]:
    """Return all nodes that have a seed among themselves and what they were computed from."""
    consumers: dict[int, list[int]] = {}
    for node, row in enumerate(trace.edges):
        for source, _ in row:
            consumers.setdefault(source, []).append(node)
    closed, stack = set(seeds), list(seeds)
    while stack:
        for consumer in consumers.get(stack.pop(), []):
            if consumer not in closed:
                closed.add(consumer)
                stack.append(consumer)
    return closed


def _refuse_mixing(trace: Trace, sizes: dict[Output, tuple[int, int]]) -> None:
    """Refuse values without a sample axis that were computed from values with one."""
    on_samples = {node for node, _ in sizes}
    for node in sorted(_upstream_closed(trace, on_samples) - on_samples):
        raise CoupledSamplesError(
            "a value without a sample axis is computed from all samples of the batch, so a "
            "sample's loss depends on the others",
            where=f"operation {trace.kinds[node]}",
        )


def _settled(
    trace: Trace, sizes: dict[Output, tuple[int, int]]
) -> tuple[dict[Output, SampleAxis], frozenset[Output]]:
    """Find each output's layout from the gradients of single losses with respect to it."""
    if not sizes:
        return {}, frozenset()
    samples = sorted({0, trace.n // 2, trace.n - 1})
    gradients = {j: _single_loss_gradients(trace, list(sizes), j) for j in samples}
    found, unsettled = {}, set()
    for place, (output, (axis, positions)) in enumerate(sizes.items()):
        supports = {
            j: support(g[place], axis)  # type: ignore[arg-type]
            for j, g in gradients.items()
            if g[place] is not None
        }
        fitting = consistent(layouts(axis, positions), trace.n, supports)
        if not fitting:
            raise _coupled(trace, output, supports)
        found[output] = fitting[0]
        if len(fitting) > 1:
            unsettled.add(output)
    return found, frozenset(unsettled)


def _single_loss_gradients(
    trace: Trace, outputs: list[Output], sample: int
) -> tuple[Tensor | None, ...]:
    one_hot = torch.zeros_like(trace.losses)
    one_hot[sample] = 1
    edges = [internals.edge(trace.nodes[node], output) for node, output in outputs]
    return torch.autograd.grad(
        trace.losses, edges, grad_outputs=one_hot, retain_graph=True, allow_unused=True
    )


def _coupled(
    trace: Trace, output: Output, supports: dict[int, Tensor]
) -> CoupledSamplesError | UnsupportedError:
    where = f"operation {trace.kinds[output[0]]}"
    touched = torch.stack(list(supports.values())).sum(0)
    if int(touched.max()) > 1:
        return CoupledSamplesError(
            "the loss of one sample has a gradient with respect to the values of another",
            where=where,
        )
    return UnsupportedError(
        "the samples change their order inside the model", where=where, remedy=OTHERS
    )


def _first_difference(first: Trace, second: Trace) -> str:
    for a, b in zip(first.kinds, second.kinds, strict=False):
        if a != b:
            return f"operation {a} at {first.n} samples, {b} at {second.n}"
    return f"{len(first.kinds)} operations at {first.n} samples, {len(second.kinds)} at {second.n}"
