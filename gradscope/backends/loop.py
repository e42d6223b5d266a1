"""`loop`: one backward pass a sample through ordinary autograd. The reference for all others.

Independent samples are evaluated one at a time. Where a sample's loss depends on its batch
(BatchNorm on batch statistics, contrastive losses), the gradient of its own loss, ∂Lᵢ/∂θ through
everybody's statistics, is still defined, for the batch as it is: one joint forward pass, then one
backward pass for each loss. These rows sum to the gradient of the total loss, and depend on which
samples share a batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from gradscope.backends.base import (
    ROWS,
    Evaluate,
    Request,
    backends,
    own_loss_backends,
    refusing,
    require_unhooked,
)
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem, slopes

OUTSIDE = "Its backward pass fails in ordinary training too."

_BYTES = 2**28  # gradients that one batched backward pass may hold


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
    """Return the loss () and {name: gradient (*shape)} of a batch of one."""
    losses = problem.losses(sample)
    with refusing("loop", problem.model, OUTSIDE):
        gradients = slopes(losses, problem.parameters.values())
    rows = dict(zip(problem.parameters, map(dense, gradients), strict=True))
    return losses.detach()[0], rows


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient without graph; that of a sparse embedding in its dense form."""
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


@own_loss_backends.register("loop")
@contextmanager
def own_loss(problem: Problem) -> Iterator[Evaluate]:
    """One joint forward pass, one backward pass a sample."""

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        losses = problem.losses(batch)
        with refusing("loop", problem.model, OUTSIDE):
            single = [_pulled(problem, losses, pick) for pick in _picks(losses)]
        return _joint(problem, losses, [torch.stack(rows) for rows in zip(*single, strict=True)])

    yield evaluate


@own_loss_backends.register("vmap")
@contextmanager
def own_loss_at_once(problem: Problem) -> Iterator[Evaluate]:
    """One joint forward pass, all losses pulled back in batched vector-Jacobian products."""
    size = sum(prod(p.shape) * p.element_size() for p in problem.parameters.values())
    step = max(1, _BYTES // max(1, size))
    remedy = "Use backend loop: one ordinary backward pass a sample."

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        require_unhooked("vmap", problem)
        losses = problem.losses(batch)
        with refusing("vmap", problem.model, remedy):
            picks = torch.split(_picks(losses), step)
            parts = [_pulled(problem, losses, some, batched=True) for some in picks]
        return _joint(problem, losses, [torch.cat(rows) for rows in zip(*parts, strict=True)])

    yield evaluate


def own_gradient(problem: Problem, batch: Batch, sample: int) -> dict[str, Tensor]:
    """Return {name: ∂Lᵢ/∂θ (*shape)} of one sample within its batch."""
    losses = problem.losses(batch)
    rows = _pulled(problem, losses, _picks(losses)[sample])
    return dict(zip(problem.parameters, rows, strict=True))


def _picks(losses: Tensor) -> Tensor:
    return torch.eye(len(losses), dtype=losses.dtype, device=losses.device)


def _pulled(
    problem: Problem, losses: Tensor, picks: Tensor, *, batched: bool = False
) -> list[Tensor]:
    """Return the gradients of Σᵢ picks[i] Lᵢ, or of each row of picks when batched."""
    parameters: list[Tensor] = list(problem.parameters.values())
    lead = picks.shape[:1] if batched else ()
    if not losses.requires_grad:
        return [p.new_zeros(*lead, *p.shape) for p in parameters]
    found = torch.autograd.grad(
        losses,
        parameters,
        grad_outputs=picks,
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=batched,
    )
    return [
        p.new_zeros(*lead, *p.shape) if g is None else dense(g)
        for g, p in zip(found, parameters, strict=True)
    ]


def _joint(problem: Problem, losses: Tensor, rows: list[Tensor]) -> Evaluation:
    named = zip(problem.parameters, rows, strict=True)
    return Evaluation(losses.detach(), Gradients({k: DenseBlock(g) for k, g in named}))
