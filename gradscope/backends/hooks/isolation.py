"""Samples that are not finite, kept away from the others of their batch.

The masked fallback gives an operation zeros for all samples but one. The operation multiplies them
by what it saved, and 0 · NaN is NaN: one sample's NaN reaches the rows of all samples. The batch is
then evaluated in parts, and a sample that is not finite is alone in its part.
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
    """Return the evaluation of a batch, in parts where the batch as a whole raises `SpreadError`.

    Args:
        problem: The problem that `evaluate` is bound to.
        batch: Samples, or tokens of samples.
        evaluate: Evaluates the batch or a part of it, or raises `SpreadError`.
        alone: Evaluates a single sample, or the tokens of a single sample.

    Raises:
        UnsupportedError: The same, of a model that is divided over processes.
    """
    try:
        return evaluate(batch)
    except SpreadError:
        if problem.model_parallel is None:
            return _in_parts(problem, batch, evaluate, alone)
    raise UnsupportedError(
        "a sample's gradient is not finite, and an operation mixes it into the other samples' rows",
        where=batch.description,
        remedy="Leave the sample out: look for inputs and losses that are NaN or infinite. Or use "
        "one process.",
    )


def _in_parts(
    problem: Problem,
    batch: Batch,
    evaluate: Callable[[Batch], Evaluation],
    alone: Callable[[Batch], Evaluation],
) -> Evaluation:
    """Return the evaluation of a batch from parts of it; see `isolating`.

    A sample whose loss is not finite is a part. The other samples are one part, which is halved
    until no part raises: at most 2 log₂ n evaluations for each gradient that is not finite.
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
    """Return evaluations of parts, each with the positions of its rows, as one in their order."""
    place = torch.cat([rows for rows, _ in found]).argsort()
    parts = [part for _, part in found]
    losses = torch.cat([part.losses for part in parts])
    place = place.to(losses.device)
    blocks = {
        name: joined([part.gradients[name] for part in parts], place) for name in parts[0].gradients
    }
    new = any(part.new for part in parts)
    return Evaluation(losses[place], Gradients(blocks), new=new)
