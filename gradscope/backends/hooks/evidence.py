"""Evidence that samples are apart, for a graph that does not show it by its shapes.

Where batches of two sizes run the same operations, what samples compute together shows in the
graph. Where they do not, float64 has to show that other samples change no loss and no gradient.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradscope.core.batch import Batch
from gradscope.errors import ModelError, RefusedError
from gradscope.model.independence import regrouped, require_unaffected
from gradscope.model.problem import Problem, slopes
from gradscope.model.rounding import all_in_float64, nearby

_ALL = 8  # samples, at most, of which each is evaluated alone
_TRIALS, _LUCK = 4, 100.0  # other last digits, and how many times more two gradients may differ
_EXACT = 2.0**-44  # relative error of a parameter's gradient that needs no other explanation


def gradients_independent(problem: Problem, batch: Batch, losses: Tensor) -> bool:
    """Whether float64 shows that neither losses (n,) nor gradients depend on other samples.

    It shows nothing of a model that does not run in float64.

    Raises:
        CoupledSamplesError: A loss depends on other samples.
    """
    if not require_unaffected(problem, batch, losses, judged=True):
        return False
    try:
        with all_in_float64(problem, batch) as (wide, cast):
            return _same_gradients(wide, cast)
    except (ModelError, RefusedError):
        return False


def _same_gradients(problem: Problem, batch: Batch) -> bool:
    """Whether the gradient of the batch is the sum of its parts' gradients, by each parameter."""
    n = len(batch)
    draw = torch.Generator().manual_seed(0)
    weights = torch.rand(n, generator=draw, dtype=torch.float64) + 0.5
    weights *= torch.randint(0, 2, (n,), generator=draw) * 2 - 1
    whole = _slopes(problem, batch, weights, [torch.arange(n)])
    alone: Sequence[Tensor] = [torch.tensor([k]) for k in range(n)]
    partitions = [alone] if n <= _ALL else [regrouped(batch, draw) for _ in range(2)]
    spread: list[Tensor] | None = None
    for parts in partitions:
        sums = _slopes(problem, batch, weights, parts)
        gaps = [float((one - other).norm()) for one, other in zip(whole, sums, strict=True)]
        # written so that a NaN is left
        left = [k for k, one in enumerate(whole) if not gaps[k] <= _EXACT * float(one.norm())]
        if left and spread is None:
            spread = _spread(problem, batch, weights, whole)
        if not all(spread and gaps[k] <= _LUCK * float(spread[k]) for k in left):
            return False
    return True


def _slopes(
    problem: Problem, batch: Batch, weights: Tensor, parts: Iterable[Tensor]
) -> tuple[Tensor, ...]:
    """Return the gradient of Σᵢ wᵢ Lᵢ by each parameter, evaluated in parts of the batch."""
    parameters = [*problem.parameters.values()]
    found = tuple(torch.zeros_like(p) for p in parameters)
    for rows in parts:
        losses = problem.losses(batch.select(rows))
        for total, slope in zip(
            found, slopes(losses, parameters, weights[rows].to(losses)), strict=True
        ):
            total += slope
    return found


def _spread(
    problem: Problem, batch: Batch, weights: Tensor, whole: Sequence[Tensor]
) -> list[Tensor]:
    """Return how far rounding moves the batch's gradient, by each parameter."""
    every = [torch.arange(len(batch))]
    trials = [_slopes(near, batch, weights, every) for near in nearby(problem, _TRIALS)]
    return [
        torch.stack([(trial[k] - one).norm() for trial in trials]).amax()
        for k, one in enumerate(whole)
    ]
