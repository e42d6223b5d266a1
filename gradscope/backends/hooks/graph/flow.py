"""The gradients that arrive at the frontier of a batch, and whose they are where that is open."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.analysis import OTHERS, Output
from gradscope.backends.hooks.graph.axes import OwnedAxis, owned
from gradscope.backends.hooks.graph.trace import Trace
from gradscope.core.scalar import summed
from gradscope.errors import UnsupportedError


def gradients_at(
    trace: Trace, outputs: Sequence[Output], weights: Tensor
) -> dict[Output, Tensor | None]:
    """Return the gradient of Σᵢ wᵢ Lᵢ with respect to each output, None where there is none.

    Args:
        trace: The recorded pass; its graph is kept.
        outputs: Which outputs.
        weights: (n,).
    """
    gradients = torch.autograd.grad(
        summed(trace.losses, weights),
        [internals.edge(trace.nodes[node], output) for node, output in outputs],
        retain_graph=True,
        allow_unused=True,
    )
    return dict(zip(outputs, gradients, strict=True))


def opened(
    trace: Trace, axes: Mapping[Output, int], at: Mapping[Output, Tensor | None]
) -> dict[Output, OwnedAxis]:
    """Find the owners of the entries of open axes, by one more backward pass.

    With the losses weighted 1, 2, ..., n an entry's gradient grows by the weight of its owner.

    Raises:
        UnsupportedError: An entry belongs to no single sample.
    """
    wanted = [output for output in axes if at.get(output) is not None]
    if not wanted:
        return {}
    weights = torch.arange(1, trace.n + 1, device=trace.losses.device)
    weighted = gradients_at(trace, wanted, weights.to(trace.losses.dtype))
    found = {}
    for output in wanted:
        once, often = at[output], weighted[output]
        assert once is not None and often is not None
        try:
            found[output] = owned(once, often, axes[output], trace.n)
        except ValueError as error:
            raise UnsupportedError(
                str(error), where=f"operation {trace.kinds[output[0]]}", remedy=OTHERS
            ) from error
    return found
