"""The shapes that aggregates and reducers' states will have over all samples, told by a few."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from gradscope.blocks import Evaluation, Gradients
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem
from gradscope.engine import usable
from gradscope.run.job import Job
from gradscope.run.run import keeps_states
from gradscope.stages.chain import Chain, bind

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_Found = list[Mapping[str, Tensor]]


def aggregate_shapes(
    job: Job, chains: Sequence[Chain], batch: Batch, evaluation: Evaluation
) -> tuple[list[Shapes], list[Shapes]]:
    """Return what the result file holds besides rows: results, and the states it keeps.

    Some grow with the number of samples: it is told by the difference that half of these makes.

    Args:
        job: What is computed.
        chains: The job's, after their earlier passes.
        batch: Any samples.
        evaluation: Of these.
    """
    kept = usable(job.scope, batch, evaluation)
    reduced = [chain for chain in chains if chain.reducer is not None]
    if kept is None:
        return [], []
    gradients, problem, samples = kept
    n, few = gradients.n, gradients.n // 2
    every = [job.scope.labels.chain(bind("mean")), *reduced]
    states, results = _found(every, *kept)
    if few and job.scope.labels.mode != "exact":  # which goes with sums only
        part = slice(0, few)
        half = _found(every, gradients.select(part), problem, samples.select(part))
        times = (len(job.rows) - n) / (n - few)
        stored, made = _grown(states, half[0], times), _grown(results, half[1], times)
    else:
        stored, made = _grown(states, states, 0), _grown(results, results, 0)
    size = sum(prod(shape) * dtype.itemsize for one in stored for shape, dtype in one.values())
    return made[1:], stored if keeps_states(job, size) else []


def _found(
    chains: Sequence[Chain], gradients: Gradients, problem: Problem, batch: Batch
) -> tuple[_Found, _Found]:
    """Return each chain's state and result."""
    states = [chain.update(None, gradients, problem, batch) for chain in chains]
    results = [chain.result(state) for chain, state in zip(chains, states, strict=True)]
    return [*states], [*results]


def _grown(found: _Found, half: _Found, times: float) -> list[Shapes]:
    """Return shapes that have grown by their difference to those of `half`, so many times."""

    def shape(now: Tensor, before: Tensor) -> tuple[int, ...]:
        return tuple(
            a + round((a - b) * times) for a, b in zip(now.shape, before.shape, strict=True)
        )

    return [
        {key: (shape(now, before[key]), now.dtype) for key, now in tensors.items() if key in before}
        for tensors, before in zip(found, half, strict=True)
    ]
