"""What is known about a program from one forward pass: for those that differ with the batch's size.

A loop over the samples records other operations for another number of samples, so that there is
nothing to compare. There the gradients of the batch itself show which sample owns each entry of
each value. A value of which each entry belongs to one sample at most lies on the samples' side. A
value that several samples use (a parameter, what is made of parameters, a row that is looked up
once for all samples) lies on the other side. The frontier is every edge between the two sides.
"""

from collections.abc import Iterable
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.analysis import (
    Analysis,
    FrontierEdge,
    downstream,
    unsupported_at,
)
from gradscope.backends.hooks.graph.axes import OwnerPasses, SpreadError
from gradscope.backends.hooks.graph.movement import VIEWS, operation_name
from gradscope.backends.hooks.graph.trace import Output, RecordedProgram, Trace

_PLAIN = VIEWS | {"Alias", "Clone", "Permute", "T", "ToCopy", "Transpose"}
_SHARED = "a value is made from several samples, or is used by them"


def analyse_owners(trace: Trace, parameters: set[int], seed: int) -> Analysis:
    """Find the frontier of one batch; it holds for the same program on as many samples.

    Args:
        trace: The forward pass.
        parameters: `id` of each selected parameter.
        seed: Of the weights that losses get.

    Raises:
        UnsupportedError: Several samples own an entry that only one may own.
    """
    leaves = {
        k: leaf for k, node in enumerate(trace.nodes) if (leaf := internals.leaf(node)) is not None
    }
    given = [k for k, leaf in leaves.items() if id(leaf) in parameters]
    wanted = downstream(trace, given)
    some = OwnerPasses.of(trace.losses.detach(), seed)
    numbers = _numbers(trace, sorted(wanted - {*given}), leaves, some)
    for k, leaf in leaves.items():
        if id(leaf) not in parameters and leaf.shape[:1] == (trace.n,):
            _require_own_inputs(trace, k, numbers.get((k, 0)), some)
    axes: dict[Output, tuple[int, ...]] = {}
    shared = _plain(trace, given)
    for output, number in numbers.items():
        if output[0] in leaves:
            continue
        found = owned_axes(some.owners(number), number.shape)
        if found is None:
            shared.add(output[0])
        else:
            axes[output] = found
    shared = (_upstream(trace, shared) | {*given}) & wanted
    if 0 in shared:
        raise unsupported_at(trace, 0, _SHARED)
    frontier = tuple(
        FrontierEdge(node, slot, source)
        for node in sorted(wanted - shared)
        for slot, source in enumerate(trace.edges[node])
        if source[0] in shared
    )
    nodes = {edge.node for edge in frontier}
    return Analysis(
        program=RecordedProgram.of(trace),
        axes={},
        open={(k, j): axes.get((k, j), (0,)) for k in nodes for j in range(len(trace.shapes[k]))},
        order=(),
        ways={},
        frontier=frontier,
        sizes={},
    )


def _numbers(
    trace: Trace, nodes: list[int], leaves: dict[int, Tensor], some: OwnerPasses
) -> dict[Output, Tensor]:
    """Return, for each output, the passes in which its entries are not zero, as binary numbers.

    Gradients are looked at while they go by, so that few of them are in memory at a time.
    """
    found: dict[Output, Tensor] = {}

    def record(place: int, node: int, gradients: Iterable[Tensor | None]) -> None:
        for k, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if not bool(gradient.isfinite().all()):
                raise SpreadError
            bits = (gradient != 0).to(torch.int32) << place
            found[node, k] = found[node, k] | bits if (node, k) in found else bits

    for place, weights in enumerate(some.weights):
        passing = (nodes, partial(record, place))
        at = trace.gradients([(k, 0) for k in leaves], weights, passing)
        for (k, _), gradient in at.items():
            record(place, k, [gradient])
    return found


def _require_own_inputs(trace: Trace, node: int, number: Tensor | None, some: OwnerPasses) -> None:
    """Refuse if losses of several samples have a gradient by one sample's inputs."""
    if number is not None and bool(some.owners(number)[1].any()):
        raise unsupported_at(
            trace, node, "the losses of several samples have a gradient by one's inputs"
        )


def owned_axes(owners: tuple[Tensor, Tensor], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the fewest axes along which each entry has one owner, None if an entry has several.

    Args:
        owners: The owner of each entry (-1: nobody), and whether the entry is shared.
        shape: The value's.
    """
    owner, shared = owners
    if bool(shared.any()):
        return None
    every = range(len(shape))
    if not owner.numel():
        return tuple(every) or (0,)
    for size in range(1, len(shape)):
        for axes in combinations(every, size):
            rest = [k for k in every if k not in axes]
            last = owner.amax(rest, keepdim=True)
            if bool(((owner < 0) | (owner == last)).all()):
                return axes
    return tuple(every) or (0,)


def _plain(trace: Trace, given: Iterable[int]) -> set[int]:
    """Return the views and copies of parameters, also of those that one sample uses alone."""
    found = {*given}
    for k in sorted(range(len(trace.nodes)), key=lambda k: internals.moment(trace.nodes[k])):
        sources = {source for source, _ in trace.edges[k]}
        if sources and sources <= found and operation_name(trace.kinds[k]) in _PLAIN:
            found.add(k)
    return found


def _upstream(trace: Trace, nodes: Iterable[int]) -> set[int]:
    """Return the nodes and all that they were computed from."""
    stack, found = [*nodes], {*nodes}
    while stack:
        new = {source for source, _ in trace.edges[stack.pop()] if source >= 0} - found
        stack += new
        found |= new
    return found
