"""Whose entries are whose in one batch, followed from the losses back through its own indices.

The gradient at an operation's input comes from its outputs alone. So where it is known which
sample owns each entry of the outputs, it follows for the inputs: most operations leave entries in
place; an index, a mask or a scatter says itself where each one goes. The rest is left unknown.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.axes import Growth, SampleAxis
from gradscope.backends.hooks.graph.movement import VIEWS, Way, named
from gradscope.backends.hooks.graph.trace import Output, Trace


class Known(Enum):
    """What is known of an output's owners when it is not a list of them."""

    IN_ORDER = "as in the batch that was analysed"
    NOTHING = "not which"


Owners = Tensor | Known  # (entries of the axis,) int64, -1 for those that belong to nobody


@dataclass(frozen=True, eq=False)
class Step:
    """One operation in one batch, seen from one of its inputs."""

    saved: Callable[[str], Any]  # reads what the operation saved, by name
    slot: int  # which of its inputs
    shape: tuple[int, ...]  # the input's
    axis: int  # the one that holds the samples
    out_shape: tuple[int, ...]  # the output's
    out_axis: int

    @property
    def length(self) -> int:
        """The entries of the input's axis."""
        return self.shape[self.axis]


@dataclass(frozen=True, eq=False)
class Followed:
    """Follows one batch of an analysed program."""

    batch: Trace
    order: tuple[int, ...]  # of the nodes on samples, the losses' first
    ways: Mapping[tuple[int, int], Way]  # by node and slot, of the inputs on samples
    sizes: Mapping[Output, Growth | None]
    axes: Mapping[Output, SampleAxis]  # of the batch that was analysed

    def owners(self) -> dict[Output, Owners]:
        """Return what is known of each output on samples that has a gradient."""
        found: dict[Output, Owners] = dict.fromkeys(self._outputs(0), Known.IN_ORDER)
        for node in self.order:
            arrived = {k: found[k] for k in self._outputs(node) if k in found}
            if not arrived:
                continue
            for slot, source in enumerate(self.batch.edges[node]):
                way = self.ways.get((node, slot))
                if way is None:
                    continue
                both = [self._before(k, owners, slot, source, way) for k, owners in arrived.items()]
                known = [found[source], *both] if source in found else both
                found[source] = self._simplest(source, self._agreed(source, known))
        return found

    def _outputs(self, node: int) -> Iterable[Output]:
        outputs = ((node, k) for k in range(len(self.batch.shapes[node])))
        return [output for output in outputs if output in self.sizes]

    def _before(
        self, output: Output, owners: Owners, slot: int, source: Output, way: Way
    ) -> Owners:
        """Return the owners of an operation's input, by those of one of its outputs."""
        if owners is Known.IN_ORDER and way is Way.STAYS:
            return owners
        listed, sizes = self._listed(output, owners), (self.sizes[source], self.sizes[output])
        if listed is None or sizes[0] is None or sizes[1] is None:
            return Known.NOTHING
        node = output[0]
        name = named(self.batch.kinds[node])
        step = Step(
            saved=lambda k: internals.found(self.batch.nodes[node], k),
            slot=slot,
            shape=self.batch.shapes[source[0]][source[1]],
            axis=sizes[0][0],
            out_shape=self.batch.shapes[node][output[1]],
            out_axis=sizes[1][0],
        )
        if way is Way.MOVES:
            test = _MOVES.get(name)
            found = None if test is None else test(step, listed)
        elif name in VIEWS:
            found = _viewed(step, listed)
        else:
            found = listed if step.length == len(listed) else None
        return Known.NOTHING if found is None else found

    def _listed(self, output: Output, owners: Owners) -> Tensor | None:
        """Return the list of an output's owners, or None where it is not known."""
        if isinstance(owners, Tensor):
            return owners
        axis = self.axes.get(output) if owners is Known.IN_ORDER else None
        if axis is None:
            return None
        return axis.owners(self.batch.n, self.batch.losses.device)

    def _agreed(self, output: Output, known: list[Owners]) -> Owners:
        """Return what is known of an output by way of all operations that use it."""
        first, *others = known
        for other in others:
            if first is other:
                continue
            a, b = self._listed(output, first), self._listed(output, other)
            if a is None or b is None or not _compatible(a, b):
                return Known.NOTHING
            first = torch.where(a < 0, b, a)
        return first

    def _simplest(self, output: Output, owners: Owners) -> Owners:
        """Return that the owners are in order where they are."""
        if isinstance(owners, Known):
            return owners
        usual = self._listed(output, Known.IN_ORDER)
        in_order = usual is not None and _compatible(usual, owners)
        return Known.IN_ORDER if in_order else owners


def _compatible(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and bool(((a == b) | (a < 0) | (b < 0)).all()))


def _viewed(step: Step, owners: Tensor) -> Tensor | None:
    """The same entries in the same order, in another shape."""
    (before, length, after), (o_before, o_length, o_after) = (
        (prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))
        for shape, axis in ((step.shape, step.axis), (step.out_shape, step.out_axis))
    )
    front, back = gcd(before, o_before), gcd(after, o_after)  # nothing changes within these
    every = owners.view(1, -1, 1).expand(o_before // front, o_length, o_after // back)
    found = every.reshape(before // front, length, after // back).transpose(0, 1).flatten(1)
    one = found.amax(1)
    return one if _compatible(found, one.unsqueeze(1).expand_as(found)) else None


def _indexed(step: Step, owners: Tensor) -> Tensor | None:
    """`input[..., index, ...]`: each output entry came from the place that the index says."""
    found = _places(step.saved("indices"), step.axis)
    if found is None:  # other axes are indexed
        return owners if len(owners) == step.length else None
    places, first = found
    behind = places.dim() - 1 - (step.out_axis - first)
    if step.out_axis < first or behind < 0:
        return None
    along = owners.view(-1, *[1] * behind).expand_as(places)
    return _returned(places.flatten(), along.flatten(), step.length)


def _put(step: Step, owners: Tensor) -> Tensor | None:
    """`input[..., index, ...] = values`, or added to what is there."""
    if step.slot == 0:
        return owners
    found = _places(step.saved("indices"), step.out_axis)
    if found is None or found[0].dim() != 1 or len(found[0]) != step.length:
        return None
    return owners[found[0]]


def _places(indices: tuple[Tensor | None, ...], axis: int) -> tuple[Tensor, int] | None:
    """Return the index of an axis, broadcast with those of others, and where its own axes begin."""
    every: dict[int, Tensor] = {}
    at = 0
    for index in indices:
        if index is None:
            at += 1
            continue
        mask = index.dtype in (torch.bool, torch.uint8)
        for column in index.nonzero().unbind(1) if mask else (index,):
            every[at] = column
            at += 1
    if axis not in every:
        return None
    shape = torch.broadcast_shapes(*(t.shape for t in every.values()))  # type: ignore[no-untyped-call]
    side_by_side = max(every) - min(every) == len(every) - 1
    return every[axis].expand(shape), min(every) if side_by_side else 0


def _selected(step: Step, owners: Tensor) -> Tensor | None:
    """`index_select` along the samples' axis."""
    return _returned(step.saved("index").flatten(), owners, step.length)


def _gathered(step: Step, owners: Tensor) -> Tensor | None:
    index = _column(step)
    return None if index is None else _returned(index, owners, step.length)


def _added(step: Step, owners: Tensor) -> Tensor | None:
    """`index_add`, `index_copy` and `scatter` of the slot 1 into the slot 0."""
    index = _column(step)
    if step.slot == 0 or index is None:
        return owners if step.slot == 0 else None
    given = owners[index]
    rest = owners.new_full((step.length - len(given),), -1)  # is not scattered at all
    return torch.cat([given, rest]) if len(rest) else given


def _column(step: Step) -> Tensor | None:
    """Return the index (m,) along the samples' axis where it is the same along all others."""
    index: Tensor = step.saved("index")
    for axis in reversed(range(index.dim())):
        if index.dim() > 1 and axis != step.out_axis:
            if index.shape[axis] > 1 and index.stride(axis) != 0:
                return None
            index = index.select(axis, 0) if index.shape[axis] else index.sum(axis)
    return index.flatten()


def _returned(places: Tensor, owners: Tensor, length: int) -> Tensor | None:
    """Return whose the entries are that were taken from `places`, if each is one sample's."""
    some = owners >= 0
    places, owners = places[some] % max(1, length), owners[some]
    found = owners.new_full((length,), -1)
    found[places] = owners
    return found if torch.equal(found[places], owners) else None


_MOVES: Mapping[str, Callable[[Step, Tensor], Tensor | None]] = {
    "Index": _indexed,
    "IndexSelect": _selected,
    "Gather": _gathered,
    "IndexPut": _put,
    **dict.fromkeys(("IndexAdd", "IndexCopy", "Scatter", "ScatterAdd"), _added),
}
