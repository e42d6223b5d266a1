"""Static facts of a program, found before its batches are computed.

Two small forward passes give the sample axis of every output, the parameter-only operations, and
the frontier between parameters and samples. Gradients of single losses give the layout of merged
axes, and show whether samples are coupled. Each batch decides what remains open.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.axes import (
    CONSTANT,
    SEVERAL_OWNERS,
    Axis,
    Growth,
    OwnedAxis,
    OwnerPasses,
    OwnerWeights,
    SampleAxis,
    growth,
    layouts,
    nonzero,
    owned_alike,
    owned_exactly,
    owned_singly,
    support,
)
from gradscope.backends.hooks.graph.movement import (
    Movement,
    Owners,
    OwnersKnown,
    OwnerTracker,
    ways,
)
from gradscope.backends.hooks.graph.trace import Output, RecordedProgram, Trace
from gradscope.errors import CoupledSamplesError, UnsupportedError
from gradscope.model.problem import summed

OTHERS = (
    'Use backend="auto": it takes the first backend that runs this model and passes the proof. '
    "The backend expand supports most models that hooks does not."
)
# operations whose rules support several nodes at once
REPEATABLE = frozenset(
    f"{name}Backward0"
    for name in ("Mm", "Bmm", "Addmm", "Baddbmm", "Convolution", "Add", "Sub", "Mul", "Expand")
)
_VIEWS_OF_WEIGHTS = frozenset(
    f"{name}Backward0"
    for name in (
        "T",
        "Permute",
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Unsqueeze",
        "Clone",
        "Alias",
    )
)
_SIZES = 8  # numbers of samples whose shapes are remembered


@dataclass(frozen=True)
class FrontierEdge:
    """An edge by which a parameter-only value enters an operation on samples."""

    node: int  # index of the operation on samples
    slot: int  # index of the operation's input
    source: Output  # the (node, output) that made the value


@dataclass(frozen=True)
class Analysis:
    """The static facts of a program."""

    program: RecordedProgram  # the analysed program
    # outputs with the samples in order, at the frontier or where samples move: their sample axes
    axes: dict[Output, SampleAxis]
    # outputs at the frontier whose owners each batch must determine: their axes. They have masked,
    # sorted or packed rows, or rows without a gradient so far.
    open: dict[Output, tuple[int, ...]]
    # the nodes on samples, losses first; and how samples pass through each input
    order: tuple[int, ...]
    ways: dict[tuple[int, int], Movement]
    # every edge by which a selected parameter affects samples
    frontier: tuple[FrontierEdge, ...]
    # the growth of each output that grows with the batch, or None if several axes grow
    sizes: dict[Output, Growth | None]
    # {number of samples: shapes that fit}, so that equal shapes need no second comparison
    fitting: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    # {number of samples: shapes, and the owners that follow from them alone}
    tracked: dict[int, tuple[Any, Mapping[Output, Owners]]] = field(default_factory=dict)

    @cached_property
    def outputs(self) -> dict[int, list[Output]]:
        """The outputs of each operation at the frontier."""
        shapes = self.program.shapes
        nodes = sorted({edge.node for edge in self.frontier})
        return {k: [(k, j) for j in range(len(shapes[k]))] for k in nodes}

    @cached_property
    def alike(self) -> tuple[tuple[FrontierEdge, ...], ...]:
        """The frontier, grouped by operations that use one value in the same way."""
        found: dict[Any, list[FrontierEdge]] = {}
        for edge in self.frontier:
            kind = self.program.kinds[edge.node]
            key = (kind, edge.slot, *self._origin(edge.source)) if kind in REPEATABLE else edge
            found.setdefault(key, []).append(edge)
        return tuple(map(tuple, found.values()))

    @cached_property
    def _permutations(self) -> dict[int, Any]:
        """The order of axes of each permutation, which is equal in every batch."""
        named = self.program.constants
        return {node: value for node, name, value in named if name == "_saved_dims"}

    def _origin(self, output: Output) -> tuple[Any, ...]:
        """Return what an output is a transpose or view of, and the views on the way."""
        kinds, views = self.program.kinds, []
        while kinds[output[0]] in _VIEWS_OF_WEIGHTS:
            order = self._permutations.get(output[0])
            views.append((kinds[output[0]], self.program.shapes[output[0]], order))
            output = self.program.edges[output[0]][0]
        return (*views, output)

    @property
    def moves(self) -> bool:
        """Whether an operation moves samples, and so may read more than one of them."""
        return any(way is Movement.MOVES for way in self.ways.values())

    def fits(self, other: Trace) -> bool:
        """Whether another forward pass has this program, up to the number of samples."""
        if not other.same_program(self.program):
            return False
        if self.fitting.get(other.n) != other.shapes:
            if not self._same_shapes(other):
                return False
            if len(self.fitting) >= _SIZES:
                self.fitting.clear()
            self.fitting[other.n] = other.shapes
        return self.program.same_constants(other)

    def _same_shapes(self, other: Trace) -> bool:
        """Whether all outputs have the analysed shapes, up to the number of samples."""
        for node, shapes in enumerate(self.program.shapes):
            for output, (shape, found) in enumerate(zip(shapes, other.shapes[node], strict=True)):
                grows = self.sizes.get((node, output), CONSTANT)
                if grows is None:
                    continue
                axis, positions = grows
                if axis >= 0 and len(shape) == len(found):
                    grown = found[axis] if positions is None else positions * other.n
                    shape = (*shape[:axis], grown, *shape[axis + 1 :])
                if shape != found:
                    return False
        return True

    def located(
        self,
        batch: Trace,
        at: Mapping[Output, Tensor | None],
        seed: int,
        agree: Callable[[bool], bool] | None = None,
    ) -> dict[Output, Axis]:
        """Return the sample axes of a batch, given the gradient `at` each output of Σᵢ Lᵢ.

        A layout found on other samples is valid only if no later operation moves samples.
        Elsewhere, the batch's own indices determine the owners of entries. If they do not, one more
        backward pass (a few in half precision) weights each loss differently, so that a gradient
        shows its owner's weight. If rounding hides the weight, passes with subsets of the losses,
        or one pass per loss, find the owner. For a sharded model, `agree` says whether any process
        needs these passes. Then all processes make them.

        Raises:
            UnsupportedError: An entry has no single owner.
        """
        known: Mapping[Output, Owners] = {}
        if any(way is not Movement.STAYS for way in self.ways.values()):
            known = self._tracked(batch)
        found: dict[Output, Axis] = {}
        unknown: dict[Output, tuple[int, ...]] = {}
        for output in at:
            axis, owners = self.axes.get(output), known.get(output, OwnersKnown.IN_ORDER)
            if isinstance(owners, Tensor):
                found[output] = OwnedAxis(self._axes(output)[0], owners)
            elif axis is not None and owners is OwnersKnown.IN_ORDER:
                found[output] = axis
            elif output in self.axes or output in self.open:
                unknown[output] = self._axes(output)
        wanted = {
            k: gradient for k in unknown if (gradient := at.get(k)) is not None and gradient.numel()
        }
        if not (bool(wanted) if agree is None else agree(bool(wanted))):
            return found
        error: UnsupportedError | None = None
        for attempt in _attempts(batch, seed):
            passes = _passes(batch, [*(wanted if agree is None else at)], attempt.weights)
            kept: dict[Output, list[Tensor]] = {k: [] for k in wanted}
            for gradients in passes:
                for k, once in wanted.items():
                    t = gradients[k]  # no gradient means zeros
                    kept[k].append(
                        attempt.keep(torch.zeros_like(once) if t is None else t, unknown[k])
                    )
            axes = attempt.find(wanted, kept, unknown)
            found |= axes
            wanted = {k: once for k, once in wanted.items() if k not in axes}
            if wanted:
                error = unsupported_at(batch, [*wanted][-1][0], SEVERAL_OWNERS)
            if not (bool(wanted) if agree is None else agree(bool(wanted))):
                return found
        if error is not None and wanted:
            raise error
        return found

    def _tracked(self, batch: Trace) -> Mapping[Output, Owners]:
        """Return the owners that a batch's indices show; without indices, shapes determine them."""
        shapes, known = self.tracked.get(batch.n, ((), {}))
        if shapes == batch.shapes:
            return known
        tracker = OwnerTracker(batch, self.order, self.ways, self.sizes, self.axes)
        known = tracker.owners()
        if not tracker.used_indices:
            self.tracked.clear()
            self.tracked[batch.n] = batch.shapes, known
        return known

    def _axes(self, output: Output) -> tuple[int, ...]:
        grows = self.sizes.get(output)
        if grows is None:
            return self.open[output]
        return (grows[0],)


class _OwnerSearch(NamedTuple):
    """A method to find the owners of entries by backward passes."""

    weights: Tensor  # (passes, n), weights of the losses
    # maps (gradient of a pass, axes) to the part that is kept
    keep: Callable[[Tensor, tuple[int, ...]], Tensor]
    # maps (gradients of Σᵢ Lᵢ, kept parts of each pass, axes), by output, to the axes it finds
    find: Callable[
        [Mapping[Output, Tensor], Mapping[Output, list[Tensor]], Mapping[Output, tuple[int, ...]]],
        dict[Output, Axis],
    ]


def _attempts(batch: Trace, seed: int) -> Iterator[_OwnerSearch]:
    """Yield the methods to find owners, from the fastest to the most certain."""
    losses = batch.losses.detach()
    marks = OwnerWeights.of(losses, seed, batch.dtypes)
    yield _OwnerSearch(marks.weights, lambda t, axes: t, partial(_by_marks, batch.n, marks))
    some = OwnerPasses.of(losses, seed)
    if len(some.weights) < batch.n:
        exactly = partial(owned_exactly, passes=some)
        yield _OwnerSearch(some.weights, nonzero, partial(_one_by_one, exactly))
    every = torch.eye(batch.n, dtype=losses.dtype, device=losses.device)
    yield _OwnerSearch(every, nonzero, partial(_one_by_one, owned_singly))


def _by_marks(
    n: int,
    marks: OwnerWeights,
    wanted: Mapping[Output, Tensor],
    kept: Mapping[Output, list[Tensor]],
    axes: Mapping[Output, tuple[int, ...]],
) -> dict[Output, Axis]:
    """Return the axes that weights of the losses show, together for outputs of one shape."""
    groups: dict[Any, list[Output]] = {}
    for k, once in wanted.items():
        groups.setdefault((once.shape, once.dtype, axes[k]), []).append(k)
    found: dict[Output, Axis] = {}
    for (shape, _, own), alike in groups.items():
        each = owned_alike([wanted[k] for k in alike], [kept[k] for k in alike], own, marks)
        for k, one in zip(alike, each, strict=True):
            if one is not None:
                even = one.in_order and shape and len(own) == 1 and shape[own[0]] % n == 0
                found[k] = SampleAxis(own[0], 1, shape[own[0]] // n) if even else one.axis
    return found


def _one_by_one(
    find: Callable[[list[Tensor], tuple[int, ...]], OwnedAxis],
    wanted: Mapping[Output, Tensor],
    kept: Mapping[Output, list[Tensor]],
    axes: Mapping[Output, tuple[int, ...]],
) -> dict[Output, Axis]:
    found: dict[Output, Axis] = {}
    for k in wanted:
        with suppress(ValueError):
            found[k] = find(kept[k], axes[k])
    return found


def _passes(
    batch: Trace, outputs: list[Output], weights: Tensor
) -> Iterator[dict[Output, Tensor | None]]:
    """Yield the gradients by outputs in backward passes with weights (passes, n)."""
    alike = (-1, *[1] * (batch.losses.dim() - 1))  # one weight for all positions of a sample
    return (batch.gradients(outputs, row.view(alike)) for row in weights)


def analyse(first: Trace, second: Trace, parameters: set[int]) -> Analysis:
    """Compare two forward passes of a program.

    Args:
        first: A pass on n samples. Single losses are differentiated in it; its graph is kept.
        second: A pass on a different number of samples.
        parameters: `id` of each selected parameter.

    Raises:
        UnsupportedError: The program depends on the number of samples.
        CoupledSamplesError: A loss depends on other samples.
    """
    if not first.same_program(second):
        raise _other_program(first, second)
    found = {
        (node, k): growth(shape, first.n, other, second.n)
        for node, shapes in enumerate(first.shapes)
        for k, (shape, other) in enumerate(zip(shapes, second.shapes[node], strict=True))
    }
    sizes = {output: grows for output, grows in found.items() if grows != CONSTANT}
    sizes |= _empty(first, sizes)
    on_samples = {node for node, _ in sizes}
    leaves = ((k, internals.leaf(node)) for k, node in enumerate(first.nodes))
    wanted = downstream(first, [k for k, leaf in leaves if id(leaf) in parameters])
    frontier = tuple(
        FrontierEdge(node, slot, source)
        for node in sorted(on_samples)
        for slot, source in enumerate(first.edges[node])
        if source[0] in wanted and source[0] not in on_samples
    )
    inputs = {node for node in on_samples if internals.leaf(first.nodes[node]) is not None}
    needed = {edge.node for edge in frontier} | inputs
    order, how = ways(first, second, sizes)
    moved = {
        first.edges[node][slot] for (node, slot), way in how.items() if way is not Movement.STAYS
    }
    at_moves = {node for (node, _), way in how.items() if way is not Movement.STAYS}
    also = {
        k: v
        for k, v in sizes.items()
        if v is not None and k[0] not in needed and (k[0] in at_moves or k in moved)
    }
    axes, still_open = _layouts(first, {k: v for k, v in sizes.items() if k[0] in needed}, also)
    axes |= _layouts_by_use(first, [k for k in still_open if k[0] in needed], sizes, how)
    for node in sorted((downstream(first, on_samples) - on_samples) & wanted):
        what = "a value without a sample axis is computed from all samples of the batch"
        raise unsupported_at(first, node, what)
    return Analysis(
        program=RecordedProgram.of(first),
        axes=axes,
        open={k: axis for k, axis in still_open.items() if k not in axes},
        order=order,
        ways=how,
        frontier=frontier,
        sizes=sizes,
    )


def _empty(trace: Trace, grown: Iterable[Output]) -> dict[Output, Growth]:
    """Return the growth of outputs that are empty in this batch but may have entries later.

    If an operation without a sample axis uses such an output, the output must stay empty: with
    entries, that operation would depend on samples.
    """
    found: dict[Output, Growth] = {
        (node, k): (shape.index(0), None)
        for node, shapes in enumerate(trace.shapes)
        for k, shape in enumerate(shapes)
        if shape.count(0) == 1 and (node, k) not in grown
    }
    while True:
        on_samples = {node for node, _ in (*grown, *found)}
        fixed = {
            source
            for node, row in enumerate(trace.edges)
            for source in row
            if node not in on_samples and source in found
        }
        if not fixed:
            return found
        found = {output: grows for output, grows in found.items() if output not in fixed}


def _other_program(first: Trace, second: Trace) -> UnsupportedError:
    differing = (
        f"operation {a} at {first.n} samples, {b} at {second.n}"
        for a, b in zip(first.kinds, second.kinds, strict=False)
        if a != b
    )
    lengths = (
        f"{len(first.kinds)} operations at {first.n} samples, {len(second.kinds)} at {second.n}"
    )
    return UnsupportedError(
        "the model runs different operations for different numbers of samples",
        where=next(differing, lengths),
        remedy=OTHERS,
    )


def downstream(trace: Trace, seeds: Iterable[int]) -> set[int]:
    """Return all nodes that are seeds or were computed from seeds.

    Outputs without entries do not count as used.
    """
    consumers: dict[int, list[int]] = {}
    for node, row in enumerate(trace.edges):
        for source, output in row:
            if source >= 0 and 0 not in trace.shapes[source][output]:
                consumers.setdefault(source, []).append(node)
    stack = [*seeds]
    closed = set(stack)
    while stack:
        for consumer in consumers.get(stack.pop(), []):
            if consumer not in closed:
                closed.add(consumer)
                stack.append(consumer)
    return closed


def _layouts(
    trace: Trace, sizes: dict[Output, Growth | None], also: Mapping[Output, Growth]
) -> tuple[dict[Output, SampleAxis], dict[Output, tuple[int, ...]]]:
    """Find the layouts of outputs from the gradients of single losses with respect to them.

    Returns the certain layouts, then the axes whose layout each batch must determine. Outputs in
    `also` may be shared by samples.
    """
    growths: dict[Output, Growth] = {}
    for (node, k), grows in sizes.items():
        if grows is None:
            shape = trace.shapes[node][k]
            what = f"an output of shape {shape} has several axes that depend on the batch size"
            raise unsupported_at(trace, node, what)
        growths[node, k] = grows
    growths.update(also)
    axes: dict[Output, SampleAxis] = {}
    still_open: dict[Output, tuple[int, ...]] = {}
    samples = sorted({0, trace.n // 2, trace.n - 1}) if growths else []
    edges = [internals.edge(trace.nodes[node], k) for node, k in growths]
    gradients = {}
    for j in samples:
        loss = summed(trace.losses[j : j + 1])
        gradients[j] = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
    for place, (output, (axis, positions)) in enumerate(growths.items()):
        supports = {
            j: support(gradient, axis)
            for j, found in gradients.items()
            if (gradient := found[place]) is not None
        }
        if output not in also:
            _refuse_overlap(trace, output, supports)
        fitting = [] if positions is None else layouts(axis, positions, trace.n, supports)
        if len(fitting) == 1:
            axes[output] = fitting[0]
        else:
            still_open[output] = (axis,)
    return axes, still_open


def _layouts_by_use(
    trace: Trace,
    outputs: Iterable[Output],
    sizes: Mapping[Output, Growth | None],
    how: Mapping[tuple[int, int], Movement],
) -> dict[Output, SampleAxis]:
    """Find layouts of outputs whose uses all leave the samples in place.

    The gradient of a loss can be zero for another reason, such as a bias between two InstanceNorms.
    A random gradient of one sample's results still shows what reaches an entry.
    """
    uses: dict[Output, list[tuple[int, int]]] = {k: [] for k in outputs}
    for node, row in enumerate(trace.edges):
        for slot, source in enumerate(row):
            if source in uses:
                uses[source].append((node, slot))
    plain = {
        output: users
        for output, users in uses.items()
        if users
        and all(how.get(k) is Movement.STAYS and len(trace.shapes[k[0]]) == 1 for k in users)
    }
    grown = {
        (node, 0): grows
        for users in plain.values()
        for node, _ in users
        if (grows := sizes.get((node, 0))) is not None
    }
    known = _layouts(trace, {}, grown)[0]
    found: dict[Output, SampleAxis] = {}
    for output, users in plain.items():
        grows = sizes[output]
        if grows is None or grows[1] is None or any((k, 0) not in known for k, _ in users):
            continue
        each = [_reach(trace, use, known[use[0], 0], grows[0]) for use in users]
        supports = {j: torch.stack([one[j] for one in each]).any(0) for j in each[0]}
        fitting = layouts(grows[0], grows[1], trace.n, supports)
        if len(fitting) == 1:
            found[output] = fitting[0]
    return found


def _reach(trace: Trace, use: tuple[int, int], layout: SampleAxis, axis: int) -> dict[int, Tensor]:
    """Return masks over an axis of an operation's input: entries that affect a sample's results."""
    node, slot = use
    draw = torch.Generator().manual_seed(0)
    given = torch.randn(trace.shapes[node][0], generator=draw)
    given = given.to(trace.losses.device, internals.output_dtypes(trace.nodes[node])[0])
    source, output = trace.edges[node][slot]
    found = {}
    for j in {0, trace.n // 2, trace.n - 1}:
        pulled = internals.pull(trace.nodes[node], (layout.only(given, trace.n, j),))[slot]
        shape = trace.shapes[source][output]
        found[j] = (
            torch.zeros(shape[axis], dtype=torch.bool)
            if pulled is None
            else support(pulled.sum_to_size(shape), axis)
        )
    return found


def _refuse_overlap(trace: Trace, output: Output, supports: dict[int, Tensor]) -> None:
    """Raise if the losses of two samples touch one entry.

    Each entry of the inputs belongs to one sample. Other entries may be shared by independent
    samples, such as a token that is looked up once for all.
    """
    if not supports or not bool((torch.stack(list(supports.values())).sum(0) > 1).any()):
        return
    if internals.leaf(trace.nodes[output[0]]) is not None:
        raise CoupledSamplesError(
            "the loss of one sample has a gradient with respect to the inputs of another sample",
            where=f"operation {trace.kinds[output[0]]}",
        )
    raise unsupported_at(
        trace, output[0], "a value is computed from several samples, or several samples use it"
    )


def unsupported_at(trace: Trace, node: int, what: str) -> UnsupportedError:
    """Return the error that names an operation."""
    return UnsupportedError(what, where=f"operation {trace.kinds[node]}", remedy=OTHERS)
