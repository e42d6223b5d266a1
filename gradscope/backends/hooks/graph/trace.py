"""A forward pass as autograd recorded it: nodes in a reproducible order, and their edges."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradscope.backends.hooks.graph import internals

Output = tuple[int, int]  # (index of a node in its trace, index of the output)
Listener = Callable[[int, Sequence[Tensor | None]], None]
_PLAIN = frozenset([type(None), bool, int, float, complex, str])


@dataclass(frozen=True, eq=False)
class Trace:
    """The graph behind the losses of one forward pass."""

    losses: Tensor  # (n,), or (n, t) for tokens, with their graph
    # every node, breadth first from the losses; the same program has the same order
    nodes: tuple[Node, ...]
    # for each node and input: (index of the source node or -1, index of its output)
    edges: tuple[tuple[Output, ...], ...]
    kinds: tuple[str, ...]  # each node's type
    # for each node, the shapes of its forward outputs
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    # the dtypes of the gradients; a part of the model may compute with fewer digits
    dtypes: frozenset[torch.dtype]
    # (n, t), 1 for the requested losses of tokens, else 0
    loss_weights: Tensor | None = None

    @property
    def n(self) -> int:
        """The number of samples."""
        return int(self.losses.shape[0])

    def same_program(self, other: "Trace | RecordedProgram") -> bool:
        """Whether both passes recorded the same operations with the same edges."""
        return self.kinds == other.kinds and self.edges == other.edges

    def of_kinds(self, kinds: frozenset[str]) -> list[Node]:
        """Return the nodes of these types."""
        if kinds.isdisjoint(self.kinds):
            return []
        return [node for kind, node in zip(self.kinds, self.nodes, strict=True) if kind in kinds]

    def leaves(self, node: int) -> list[Tensor]:
        """Return the leaves from which a node's outputs are computed."""
        stack, seen, found = [node], {node}, []
        while stack:
            k = stack.pop()
            leaf = internals.leaf(self.nodes[k])
            found += [] if leaf is None else [leaf]
            new = {source for source, _ in self.edges[k] if source >= 0} - seen
            stack += sorted(new)
            seen |= new
        return found

    def gradients(
        self,
        outputs: Sequence[Output],
        weights: Tensor | None = None,
        passing: tuple[Sequence[int], Listener] | None = None,
    ) -> dict[Output, Tensor | None]:
        """Return the gradient of Σᵢ wᵢ Lᵢ, weights (n,), by each output, or None.

        For tokens it is Σᵢₜ wᵢₜ Lᵢₜ over the requested losses, with weights (n, t), (t,) or (n, 1).
        The graph is kept. `passing` is (nodes, listener): the listener is called with each of these
        nodes that the backward pass reaches and the gradients of its outputs.
        """
        if self.loss_weights is not None:
            weights = self.loss_weights if weights is None else self.loss_weights * weights
        losses = self.losses
        given = torch.ones_like(losses) if weights is None else weights.expand(losses.shape)
        nodes, listen = ((), None) if passing is None else passing
        handles = [
            self.nodes[k].register_prehook(partial(listen, k)) for k in nodes if listen is not None
        ]
        try:
            edges = [internals.edge(self.nodes[node], output) for node, output in outputs]
            gradients = internals.backward(losses, given.contiguous(), edges)
        finally:
            for handle in handles:
                handle.remove()
        return dict(zip(outputs, gradients, strict=True))


def trace(losses: Tensor) -> Trace:
    """Trace the graph of `losses` (n,), which must have one."""
    start = internals.root(losses)
    nodes, place = [start], {start: 0}
    edges: list[tuple[Output, ...]] = []
    for node in nodes:  # the list grows during the loop
        row = []
        for source, output in internals.edges(node):
            if source is None:
                row.append((-1, output))
                continue
            k = place.setdefault(source, len(nodes))
            if k == len(nodes):
                nodes.append(source)
            row.append((k, output))
        edges.append(tuple(row))
    found = [internals.outputs(node) for node in nodes]
    dtypes = {dtype for outputs in found for _, dtype in outputs}
    return Trace(
        losses=losses,
        nodes=tuple(nodes),
        edges=tuple(edges),
        kinds=(*map(internals.kind, nodes),),
        shapes=(*(tuple([shape for shape, _ in outputs]) for outputs in found),),
        dtypes=frozenset([t for t in dtypes if t.is_floating_point or t.is_complex]),
    )


@dataclass(frozen=True, eq=False)
class RecordedProgram:
    """The part of a `Trace` of n samples that remains without its tensors."""

    n: int
    edges: tuple[tuple[Output, ...], ...]
    kinds: tuple[str, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    # (index of a node, attribute, value): constants of operations
    constants: tuple[tuple[int, str, Any], ...]

    @classmethod
    def of(cls, trace: Trace) -> "RecordedProgram":
        """Return the program of a forward pass."""
        constants = (
            (k, name, value)
            for k, node in enumerate(trace.nodes)
            for name, value in internals.constants(node).items()
        )
        return cls(trace.n, trace.edges, trace.kinds, trace.shapes, tuple(constants))

    def same_constants(self, other: Trace) -> bool:
        """Whether a forward pass has the same constants, or constants that grow with the batch.

        A constant that changes otherwise may have been computed from all samples of the batch.
        """
        nodes, n = other.nodes, other.n
        for k, name, value in self.constants:
            found = getattr(nodes[k], name, None)
            if type(found) is type(value) and type(found) in _PLAIN and found == value:
                continue  # most constants: no conversion is needed
            if not _alike(value, internals.constant(nodes[k], name), self.n, n):
                return False
        return True


def _alike(a: Any, b: Any, n: int, m: int) -> bool:
    """Whether constants for n and for m samples are equal up to the batch size."""
    if a is b or a == b or (a != a and b != b):
        return type(a) is type(b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        if len(a) == n and len(b) == m:
            return True  # one for each sample
        return len(a) == len(b) and all(_alike(x, y, n, m) for x, y in zip(a, b, strict=True))
    return type(a) is int and type(b) is int and a * m == b * n
