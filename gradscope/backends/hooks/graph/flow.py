"""The gradients that arrive at the frontier of a batch, and whose they are where that is open."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradscope.backends.hooks.graph import internals
from gradscope.backends.hooks.graph.analysis import OTHERS
from gradscope.backends.hooks.graph.axes import Marks, OwnedAxis, owned
from gradscope.backends.hooks.graph.movement import Output
from gradscope.backends.hooks.graph.trace import Trace
from gradscope.core.problem import summed
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
    trace: Trace, axes: Mapping[Output, int], at: Mapping[Output, Tensor | None], seed: int
) -> dict[Output, OwnedAxis]:
    """Find the owners of the entries of open axes, by one more backward pass (few, in half).

    With each loss weighted by a mark of its own, an entry's gradient shows the mark of its owner.

    Args:
        trace: The recorded pass; its graph is kept.
        axes: By output.
        at: The gradient of Σᵢ Lᵢ with respect to each output.
        seed: Of the marks.

    Raises:
        UnsupportedError: An entry belongs to no single sample.
    """
    wanted = [output for output in axes if at.get(output) is not None]
    if not wanted:
        return {}
    marks = Marks.of(trace.losses.detach(), seed)
    passes = [gradients_at(trace, wanted, weights) for weights in marks.weights]
    found = {}
    for output in wanted:
        once, often = at[output], [weighted[output] for weighted in passes]
        assert once is not None
        # no gradient at all is one of zeros
        weighted = [torch.zeros_like(once) if t is None else t for t in often]
        try:
            found[output] = owned(once, weighted, axes[output], marks)
        except ValueError as error:
            raise UnsupportedError(
                str(error), where=f"operation {trace.kinds[output[0]]}", remedy=OTHERS
            ) from error
    return found
