"""The labels of a scope, bound to its model and loss."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from gradscope.core.batch import Batch
from gradscope.core.problem import Loss, Problem
from gradscope.errors import SpecError
from gradscope.stages.chains import Chain
from gradscope.stages.labels.expectation import Expanded, expected, linear_reducer
from gradscope.stages.labels.predictive import PREDICTIVE, draw, predictive
from gradscope.stages.losses import options

Mode = Literal["data", "sampled", "exact"]


class Labels:
    """The labels of a scope, bound to its problem.

    Args:
        mode: Which labels.
        problem: The model and the loss.
        seed: Of what is drawn.
        own_loss: Samples are coupled, so that none may be repeated in its batch.

    Raises:
        SpecError: The loss or the coupling does not go with the labels.
    """

    def __init__(self, mode: Mode, problem: Problem, seed: int, *, own_loss: bool) -> None:
        require(mode, problem.loss)
        if mode == "exact" and own_loss:
            raise SpecError(
                "exact labels repeat each sample for every class, which changes what coupled "
                "samples see of each other",
                where="labels exact",
                remedy="Use labels sampled.",
            )
        self.mode = mode
        self._bound = partial(labelled, mode, problem, seed=seed)
        self._last: tuple[Batch, Batch] | None = None

    def of(self, batch: Batch) -> Batch:
        """Return the batch against the labels; asked again for the last one, it is the same."""
        if self.mode == "data":
            return batch
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self._bound(batch)
        return self._last[1]

    def chain(self, chain: Chain) -> Chain:
        """Return what a chain becomes under these labels."""
        return expected(chain) if self.mode == "exact" else chain

    def each(self, batch: Batch) -> int:
        """Return how many gradients a sample costs."""
        return len(self._bound(batch.one(0))) if self.mode == "exact" else 1

    def require_one(self) -> None:
        """Check that a sample has one gradient.

        Raises:
            SpecError: It has one for each class.
        """
        if self.mode == "exact":
            raise SpecError(
                "with exact labels a sample has one gradient for each class",
                where="labels exact",
                remedy='Ask for an expectation such as "square | mean", or use labels sampled.',
            )


def require(mode: Mode, loss: Loss, chains: Iterable[Chain] = ()) -> None:
    """Check that loss and chains go with the labels.

    Raises:
        SpecError: The loss has no predictive distribution, or a chain no expectation over labels.
    """
    if mode == "data":
        return
    if predictive(loss) is None:
        name = getattr(loss, "__name__", type(loss).__name__)
        known = ", ".join(fn.__name__ for fn in PREDICTIVE)
        raise SpecError(
            f"the loss {name!r} defines no distribution that labels could be drawn from",
            where=f"labels {mode}",
            remedy=f"Losses that do: {known}. Or use labels data.",
        )
    if mode == "exact":
        for chain in chains:
            linear_reducer(chain)


def labelled(mode: Mode, problem: Problem, batch: Batch, seed: int) -> Batch:
    """Return the batch against the labels of `mode`; those of `exact` are an `Expanded`.

    Args:
        mode: Not "data".
        problem: The model, and a loss that `require` has let through.
        batch: The samples; their own targets say at most which entries are ignored.
        seed: Of the draws.
    """
    found = predictive(problem.loss)
    assert found is not None
    settings = options(problem.loss)
    outputs = _outputs(problem, batch)
    p = found.probabilities(outputs).cpu()
    if mode == "sampled":
        drawn = draw(p, batch.index, seed).to(outputs.device)
        return replace(batch, targets=found.targets(drawn, batch.targets, settings))
    *positions, classes = p.shape[1:]
    if prod(positions) != 1:
        raise SpecError(
            f"exact labels need one class a sample; here there are {prod(positions)} positions, so "
            f"{classes}^{prod(positions)} labels",
            where="labels exact",
            remedy="Use labels sampled.",
        )
    n = len(batch)
    many = batch.select(torch.arange(n).repeat_interleave(classes))
    every = torch.arange(classes, device=outputs.device).repeat(n).reshape(n * classes, *positions)
    targets = found.targets(every, many.targets, settings)
    return Expanded(many.inputs, targets, many.index, p.reshape(n, classes).to(outputs.device))


def _outputs(problem: Problem, batch: Batch) -> Tensor:
    """Return what the model gives for a batch, having left it as it was."""
    found: list[Tensor] = []

    def keep(outputs: Tensor, targets: Any) -> Tensor:
        found.append(outputs.detach())
        return outputs.new_zeros(len(batch))

    replace(problem, loss=keep).losses(batch)
    return found[0]
