"""What a node rule is: from an operation's output gradients to a parameter's per-sample block.

A rule is registered under the operation's node type and gets a `Site`. It returns the block of the
value at `site.slot`, or None where it does not apply; the masked fallback then takes over.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.axes import Axis, OwnedAxis, SharedAxes
from gradscope.blocks import Block, DenseBlock
from gradscope.core.registry import Registry


@dataclass(frozen=True, eq=False)
class Site:
    """One frontier edge of one batch."""

    node: Node  # the operation on samples
    slot: int  # the input of it that is parameter-only
    n: int  # the number of samples
    shape: tuple[int, ...]  # the shape of the value at `slot`
    # the gradient of each of the operation's outputs, or None where it is zero
    gradients: tuple[Tensor | None, ...]
    axes: tuple[Axis | None, ...]  # the sample axis of each output, or None
    # by node, what a rule computes once for all of the node's edges
    shared: dict[Node, Any] = field(default_factory=dict)

    @property
    def gradient(self) -> Tensor:
        """The gradient of the first output."""
        gradient = self.gradients[0]
        assert gradient is not None  # the rules' operations have one differentiable output
        return gradient

    @property
    def axis(self) -> Axis:
        """The sample axis of the first output."""
        axis = self.axes[0]
        assert axis is not None
        return axis

    def saved(self, name: str) -> Any:
        """Return what the operation saved under `name`."""
        return internals.saved(self.node, name)

    def first(self, values: Tensor) -> Tensor:
        """Return a tensor laid out like the first output with the samples in front: (n, ...).

        The former sample axis, now one further, holds one sample's positions.
        """
        return self.axis.first(values, self.n)

    def reduced(self, values: Tensor, shape: tuple[int, ...] | None = None) -> Block:
        """Sum a tensor laid out like the output, sample by sample, to the shape it came from.

        Args:
            values: The gradient before broadcasting is undone.
            shape: What was broadcast; the slot's shape when not given.
        """
        shape = self.shape if shape is None else shape
        if isinstance(self.axis, SharedAxes):
            return DenseBlock(self.axis.summed(values, shape, self.n).reshape(self.n, *self.shape))
        if isinstance(self.axis, OwnedAxis):
            padded = (1,) * (values.dim() - len(shape)) + shape
            axes = [k for k, size in enumerate(padded) if size == 1 and k != self.axis.axis]
            summed = values.sum(axes, keepdim=True) if axes else values
            return DenseBlock(self.axis.summed(summed, self.n).reshape(self.n, *self.shape))
        moved = self.first(values)
        padded = (1,) * (moved.dim() - 1 - len(shape)) + shape
        axes = [k + 1 for k, size in enumerate(padded) if size == 1]
        summed = moved.sum(axes, keepdim=True) if axes else moved
        return DenseBlock(summed.reshape(self.n, *self.shape))


Rule = Callable[[Site], Block | None]

node_rules: Registry[Rule] = Registry("node rule")


def masked(site: Site) -> Block:
    """Any operation: its backward is linear in the output gradient, so mask all but one sample.

    Exact for every operation, at the price of one backward of the operation a sample.
    """
    rows = []
    for sample in range(site.n):
        only = tuple(
            g if g is None or axis is None else axis.only(g, site.n, sample)
            for g, axis in zip(site.gradients, site.axes, strict=True)
        )
        rows.append(internals.pull(site.node, only)[site.slot])
    some = next(g for g in (*rows, *site.gradients) if g is not None)
    values = torch.zeros(site.n, *site.shape, dtype=some.dtype, device=some.device)  # never sparse
    for sample, row in enumerate(rows):
        if row is not None:
            # the engine, too, sums to the input's shape what an operation broadcast
            values[sample] = (row.to_dense() if row.is_sparse else row).sum_to_size(site.shape)
    return DenseBlock(values)
