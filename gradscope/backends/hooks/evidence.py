"""Proof that samples do not affect each other, if the graph's shapes do not show it.

If batches of two sizes run the same operations, the graph shows where samples interact. Otherwise,
evaluations in float64 must show that no loss and no gradient depends on other samples.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradscope.core.batch import Batch
from gradscope.errors import ModelError, RefusedError
from gradscope.model.independence import regrouped, require_unaffected
from gradscope.model.problem import Problem, slopes
from gradscope.model.rounding import all_in_float64, nearby

_ALL = 8  # samples, at most, that are each evaluated alone
_TRIALS, _LUCK = 4, 100.0  # perturbed evaluations; a gap may be this many times their spread
_EXACT = 2.0**-44  # relative error of a parameter's gradient that needs no explanation


def gradients_independent(problem: Problem, batch: Batch, losses: Tensor) -> bool:
    """Whether float64 shows that neither losses (n,) nor gradients depend on other samples.

    False if the model does not run in float64.

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
    """Whether each parameter's batch gradient is the sum of the gradients of the batch's parts."""
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
        # written so that NaN stays in the list
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
    """Return how much rounding changes each parameter's gradient of the batch."""
    every = [torch.arange(len(batch))]
    trials = [_slopes(near, batch, weights, every) for near in nearby(problem, _TRIALS)]
    return [
        torch.stack([(trial[k] - one).norm() for trial in trials]).amax()
        for k, one in enumerate(whole)
    ]
