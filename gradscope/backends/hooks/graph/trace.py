"""A forward pass as autograd recorded it: nodes in a reproducible order, and how they connect."""

from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from gradscope.backends.hooks.graph import internals


@dataclass(frozen=True, eq=False)
class Trace:
    """The graph behind the losses of one forward pass.

    Attributes:
        losses: (n,), with their graph.
        nodes: Every node, breadth first from the losses; the same program gives the same order.
        edges: For each node and input: (index of the node it came from or -1, which output).
        kinds: Each node's type.
        shapes: For each node, the shapes of its forward outputs.
    """

    losses: Tensor
    nodes: tuple[Node, ...]
    edges: tuple[tuple[tuple[int, int], ...], ...]
    kinds: tuple[str, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def n(self) -> int:
        """The number of samples."""
        return int(self.losses.shape[0])

    def same_program(self, other: "Trace") -> bool:
        """Whether both passes recorded the same operations, connected in the same way."""
        return self.kinds == other.kinds and self.edges == other.edges


def trace(losses: Tensor) -> Trace:
    """Walk the graph behind `losses` (n,), which must have one."""
    start = internals.root(losses)
    nodes, place = [start], {start: 0}
    edges: list[tuple[tuple[int, int], ...]] = []
    for node in nodes:  # grows while it is walked
        row = []
        for source, output in internals.edges(node):
            if source is not None and source not in place:
                place[source] = len(nodes)
                nodes.append(source)
            row.append((-1 if source is None else place[source], output))
        edges.append(tuple(row))
    return Trace(
        losses=losses,
        nodes=tuple(nodes),
        edges=tuple(edges),
        kinds=tuple(internals.kind(node) for node in nodes),
        shapes=tuple(internals.output_shapes(node) for node in nodes),
    )
