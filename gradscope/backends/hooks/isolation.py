"""Separate evaluation of samples that are not finite.

The masked fallback passes zeros to an operation for all samples but one. The operation multiplies
them by its saved values, and 0 · NaN is NaN. So the NaN of one sample would reach the rows of all
samples. The batch is evaluated in parts, with each non-finite sample alone in its part.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradscope.backends.hooks.graph.axes import SpreadError
from gradscope.blocks import Evaluation, Gradients, joined
from gradscope.core.batch import Batch, samples_of
from gradscope.errors import UnsupportedError
from gradscope.model.problem import Problem


def isolating(
    problem: Problem,
    batch: Batch,
    evaluate: Callable[[Batch], Evaluation],
    alone: Callable[[Batch], Evaluation],
) -> Evaluation:
    """Return the evaluation of a batch; evaluate in parts if the whole batch raises `SpreadError`.

    Args:
        problem: The problem that `evaluate` is bound to.
        batch: Samples, or tokens of samples.
        evaluate: Evaluates the batch or a part of it, or raises `SpreadError`.
        alone: Evaluates a single sample, or the tokens of a single sample.

    Raises:
        UnsupportedError: `evaluate` raises `SpreadError`, and the model is sharded.
    """
    try:
        return evaluate(batch)
    except SpreadError:
        if problem.model_parallel is None:
            return _in_parts(problem, batch, evaluate, alone)
    raise UnsupportedError(
        "a sample's gradient is not finite, and an operation spreads it to rows of other samples",
        where=batch.description,
        remedy="Remove samples with NaN or infinity in inputs or losses, or use one process.",
    )


def _in_parts(
    problem: Problem,
    batch: Batch,
    evaluate: Callable[[Batch], Evaluation],
    alone: Callable[[Batch], Evaluation],
) -> Evaluation:
    """Return the evaluation of a batch from parts of it; see `isolating`.

    Each sample with a non-finite loss is a part. The other samples form one part, which is halved
    until no part raises. This takes at most 2 log₂ n evaluations per non-finite gradient.
    """
    owner = samples_of(batch)
    finite = problem.losses(batch).detach().isfinite().cpu()
    lost = torch.unique(owner[~finite])
    kept = torch.unique(owner[~torch.isin(owner, lost)])
    found: list[tuple[Tensor, Evaluation]] = []

    def add(samples: Tensor) -> None:
        if not len(samples):
            return
        rows = torch.isin(owner, samples).nonzero().flatten()
        part = batch.select(rows)
        try:
            found.append((rows, alone(part) if len(samples) == 1 else evaluate(part)))
        except SpreadError:
            for half in samples.tensor_split(2):
                add(half)

    add(kept)
    for sample in lost:
        add(sample[None])
    return _together(found)


def _together(found: Sequence[tuple[Tensor, Evaluation]]) -> Evaluation:
    """Join evaluations of parts, given with the positions of their rows, in batch order."""
    place = torch.cat([rows for rows, _ in found]).argsort()
    parts = [part for _, part in found]
    losses = torch.cat([part.losses for part in parts])
    place = place.to(losses.device)
    blocks = {
        name: joined([part.gradients[name] for part in parts], place) for name in parts[0].gradients
    }
    new = any(part.new for part in parts)
    return Evaluation(losses[place], Gradients(blocks), new=new)
