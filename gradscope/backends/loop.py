"""`loop`: one sample at a time through ordinary autograd. The reference for all others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradscope.backends.base import ROWS, Evaluate, Request, backends, refusing
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem
from gradscope.core.scalar import summed


@backends.register("loop")
@contextmanager
def loop(problem: Problem) -> Iterator[Evaluate]:
    """One sample at a time, a batch of one each: slow, and the reference for the others."""

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        losses = []
        values = {k: p.new_empty(len(batch), *p.shape) for k, p in problem.parameters.items()}
        for i in range(len(batch)):
            loss, gradients = one_sample(problem, batch.one(i))
            losses.append(loss)
            for name, gradient in gradients.items():
                values[name][i] = gradient
        blocks = {name: DenseBlock(value) for name, value in values.items()}
        return Evaluation(torch.stack(losses), Gradients(blocks))

    yield evaluate


def one_sample(problem: Problem, sample: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss () and {name: gradient (*shape)} of a batch of one.

    A parameter that the loss does not reach gets zeros.
    """
    losses = problem.losses(sample)
    loss = losses.detach()[0]
    if not losses.requires_grad:
        return loss, {k: torch.zeros_like(p) for k, p in problem.parameters.items()}
    with refusing("loop", problem.model, "Its backward pass fails in ordinary training too."):
        gradients = torch.autograd.grad(
            summed(losses),
            list(problem.parameters.values()),
            retain_graph=True,  # a part of the graph may be the model's own, and be needed again
            allow_unused=True,
            materialize_grads=True,
        )
    return loss, {k: dense(g) for k, g in zip(problem.parameters, gradients, strict=True)}


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient without graph; that of a sparse embedding in its dense form."""
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient
