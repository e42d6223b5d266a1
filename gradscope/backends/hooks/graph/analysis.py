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
from gradscope.backends.hooks.graph.movement import Growth, Output, movers, stays
from gradscope.backends.hooks.graph.trace import Program, Trace
from gradscope.core.problem import summed
from gradscope.errors import CoupledSamplesError, UnsupportedError

_CONSTANT: Growth = (-1, None)

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
        program: What was analysed.
        axes: The sample axis of each output at the frontier that has the samples in order.
        open: The axis of each output at the frontier whose owners each batch must tell: masked,
            sorted or packed rows, or rows without a gradient so far.
        movers: Operations that may move samples on their way from the frontier's nodes to the
            losses, by node.
        frontier: Every edge by which a selected parameter's influence reaches samples.
        sizes: For each output that grows with the batch: (axis, entries a sample or None).
    """

    program: Program
    axes: dict[Output, SampleAxis]
    open: dict[Output, int]
    movers: dict[int, tuple[int, ...]]
    frontier: tuple[FrontierEdge, ...]
    sizes: dict[Output, Growth | None]

    def fits(self, other: Trace) -> bool:
        """Whether another forward pass is this program, up to the number of samples."""
        if not other.same_program(self.program):
            return False
        shapes = all(
            self._fits(self.sizes.get((node, output), _CONSTANT), shape, found, other.n)
            for node, shapes in enumerate(self.program.shapes)
            for output, (shape, found) in enumerate(zip(shapes, other.shapes[node], strict=True))
        )
        return shapes and self.program.same_constants(other)

    def layouts(self, batch: Trace) -> tuple[dict[Output, SampleAxis], dict[Output, int]]:
        """Return the sample axes that are known in a batch, and those that it must tell itself.

        A layout that was found on other samples holds only where nothing moves samples after it.
        """
        moving = {k for ks in self.movers.values() for k in ks if not self._stays(batch, k)}
        moved = {output for output in self.axes if moving.intersection(self.movers[output[0]])}
        known = {output: axis for output, axis in self.axes.items() if output not in moved}
        return known, self.open | {output: self.axes[output].axis for output in moved}

    def _stays(self, batch: Trace, node: int) -> bool:
        return stays(batch, node, self.sizes.get(batch.edges[node][0]))

    @staticmethod
    def _fits(
        growth: Growth | None, shape: tuple[int, ...], found: tuple[int, ...], n: int
    ) -> bool:
        if growth is None or len(shape) != len(found):
            return growth is None
        axis, positions = growth
        if axis < 0:
            return shape == found
        same = shape[:axis] + shape[axis + 1 :] == found[:axis] + found[axis + 1 :]
        return same and (positions is None or found[axis] == positions * n)


def analyse(first: Trace, second: Trace, parameters: set[int]) -> Analysis:
    """Compare two forward passes of a program.

    Args:
        first: At n samples; single losses are differentiated in it, its graph is kept.
        second: At another number of samples.
        parameters: `id` of each selected parameter.

    Raises:
        UnsupportedError: The program depends on the number of samples.
        CoupledSamplesError: A loss depends on other samples.
    """
    if not first.same_program(second):
        raise UnsupportedError(
            "the model runs other operations for another number of samples",
            where=_first_difference(first, second),
            remedy=OTHERS,
        )
    sizes = _growths(first, second)
    on_samples = {node for node, _ in sizes}
    wanted = _upstream_closed(first, _leaves(first, parameters))
    frontier = tuple(
        FrontierEdge(node, slot, source)
        for node in sorted(on_samples)
        for slot, source in enumerate(first.edges[node])
        if source[0] in wanted and source[0] not in on_samples
    )
    inputs = {node for node in on_samples if internals.leaf(first.nodes[node]) is not None}
    needed = {edge.node for edge in frontier} | inputs
    observed = {output: growth for output, growth in sizes.items() if output[0] in needed}
    axes, still_open = _layouts(first, _single_axes(first, observed))
    _refuse_mixing(first, on_samples, wanted)
    after = movers(first, second, sizes)
    on_frontier = {edge.node: after[edge.node] for edge in frontier}
    return Analysis(
        program=Program.of(first),
        axes={output: axis for output, axis in axes.items() if output[0] in on_frontier},
        open={output: axis for output, axis in still_open.items() if output[0] in on_frontier},
        movers=on_frontier,
        frontier=frontier,
        sizes=sizes,
    )


def _growths(first: Trace, second: Trace) -> dict[Output, Growth | None]:
    """Return how each output grows with the batch; None where several axes do."""
    sizes: dict[Output, Growth | None] = {}
    for node, (shapes, others) in enumerate(zip(first.shapes, second.shapes, strict=True)):
        for output, (shape, other) in enumerate(zip(shapes, others, strict=True)):
            try:
                growth = changed_axis(shape, first.n, other, second.n)
            except ValueError:
                sizes[node, output] = None
            else:
                if growth is not None:
                    sizes[node, output] = growth
    return sizes


def _single_axes(trace: Trace, observed: dict[Output, Growth | None]) -> dict[Output, Growth]:
    """Refuse outputs at the frontier of which several axes grow."""
    for (node, output), growth in observed.items():
        if growth is None:
            raise UnsupportedError(
                f"an output of shape {trace.shapes[node][output]} has no single sample axis",
                where=f"operation {trace.kinds[node]}",
                remedy=OTHERS,
            )
    return {output: growth for output, growth in observed.items() if growth is not None}


def _leaves(trace: Trace, parameters: set[int]) -> set[int]:
    return {k for k, node in enumerate(trace.nodes) if id(internals.leaf(node)) in parameters}


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


def _refuse_mixing(trace: Trace, on_samples: set[int], wanted: set[int]) -> None:
    """Refuse values without a sample axis that parameters reach by way of samples."""
    for node in sorted((_upstream_closed(trace, on_samples) - on_samples) & wanted):
        raise UnsupportedError(
            "a value without a sample axis is computed from all samples of the batch",
            where=f"operation {trace.kinds[node]}",
            remedy=OTHERS,
        )


def _layouts(
    trace: Trace, growths: dict[Output, Growth]
) -> tuple[dict[Output, SampleAxis], dict[Output, int]]:
    """Find each output's layout from the gradients of single losses with respect to it.

    Returns:
        The layouts that are certain, and the axes whose layout each batch must tell.
    """
    axes: dict[Output, SampleAxis] = {}
    still_open: dict[Output, int] = {}
    samples = sorted({0, trace.n // 2, trace.n - 1}) if growths else []
    gradients = {j: _single_loss_gradients(trace, list(growths), j) for j in samples}
    for place, (output, (axis, positions)) in enumerate(growths.items()):
        supports = {
            j: support(gradient, axis)
            for j, found in gradients.items()
            if (gradient := found[place]) is not None
        }
        _refuse_overlap(trace, output, supports)
        fitting = (
            [] if positions is None else consistent(layouts(axis, positions), trace.n, supports)
        )
        if len(fitting) == 1:
            axes[output] = fitting[0]
        else:
            still_open[output] = axis
    return axes, still_open


def _single_loss_gradients(
    trace: Trace, outputs: list[Output], sample: int
) -> tuple[Tensor | None, ...]:
    edges = [internals.edge(trace.nodes[node], output) for node, output in outputs]
    loss = summed(trace.losses[sample : sample + 1])
    return torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)


def _refuse_overlap(trace: Trace, output: Output, supports: dict[int, Tensor]) -> None:
    """Refuse when the losses of two samples touch one entry.

    An entry of the inputs is one sample's own. Any other may hold what several samples have in
    common (a token that is looked up once for all of them), and they may be independent.
    """
    if not supports or not bool((torch.stack(list(supports.values())).sum(0) > 1).any()):
        return
    where = f"operation {trace.kinds[output[0]]}"
    if internals.leaf(trace.nodes[output[0]]) is not None:
        raise CoupledSamplesError(
            "the loss of one sample has a gradient with respect to the values of another",
            where=where,
        )
    raise UnsupportedError(
        "a value is made from several samples, or is used by them", where=where, remedy=OTHERS
    )


def _first_difference(first: Trace, second: Trace) -> str:
    for a, b in zip(first.kinds, second.kinds, strict=False):
        if a != b:
            return f"operation {a} at {first.n} samples, {b} at {second.n}"
    return f"{len(first.kinds)} operations at {first.n} samples, {len(second.kinds)} at {second.n}"
