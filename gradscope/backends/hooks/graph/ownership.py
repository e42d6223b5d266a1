"""Analysis of a program from one forward pass, for programs that depend on the batch size.

A loop over samples records different operations for a different number of samples, so two passes
cannot be compared. Instead, the gradients of the batch show which sample owns each entry of each
value. A value is on the samples' side if at most one sample owns each entry. A value is on the
other side if several samples use it: a parameter, a function of parameters, or a row that is looked
up once for all samples. The frontier is every edge between the two sides.
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
_SHARED = "a value is computed from several samples, or several samples use it"


def analyse_owners(trace: Trace, parameters: set[int], seed: int) -> Analysis:
    """Find the frontier of one batch; valid for the same program on the same number of samples.

    Args:
        trace: The forward pass.
        parameters: `id` of each selected parameter.
        seed: Seed of the weights of the losses.

    Raises:
        UnsupportedError: Several samples own an entry that may have only one owner.
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
    """Return, for each output, the passes with nonzero entries, as binary numbers.

    Gradients are read during the backward pass, so few of them are in memory at a time.
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
    """Raise if the losses of several samples have a gradient by one sample's inputs."""
    if number is not None and bool(some.owners(number)[1].any()):
        raise unsupported_at(
            trace,
            node,
            "the losses of several samples have a gradient with respect to one sample's inputs",
        )


def owned_axes(owners: tuple[Tensor, Tensor], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the fewest axes along which each entry has one owner, or None for shared entries.

    Args:
        owners: The owner of each entry (-1: no owner), and whether the entry is shared.
        shape: The shape of the value.
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
    """Return the views and copies of parameters, including those that only one sample uses."""
    found = {*given}
    for k in sorted(range(len(trace.nodes)), key=lambda k: internals.moment(trace.nodes[k])):
        sources = {source for source, _ in trace.edges[k]}
        if sources and sources <= found and operation_name(trace.kinds[k]) in _PLAIN:
            found.add(k)
    return found


def _upstream(trace: Trace, nodes: Iterable[int]) -> set[int]:
    """Return the nodes and everything that they were computed from."""
    stack, found = [*nodes], {*nodes}
    while stack:
        new = {source for source, _ in trace.edges[stack.pop()] if source >= 0} - found
        stack += new
        found |= new
    return found
