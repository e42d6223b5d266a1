"""Own-loss gradients of coupled samples: ∂Lᵢ/∂θ through everybody's statistics.

Where a sample's loss depends on its batch (BatchNorm on batch statistics, contrastive losses), the
gradient of its own loss is still defined, for the batch as it is: one joint forward pass, then one
backward pass for each loss. The rows sum to the gradient of the total loss, and depend on which
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
    own_loss_backends,
    refusing,
    require_unhooked,
)
from gradscope.backends.loop import dense
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem

_BYTES = 2**28  # gradients that one batched backward pass may hold


@own_loss_backends.register("loop")
@contextmanager
def loop(problem: Problem) -> Iterator[Evaluate]:
    """One joint forward pass, one backward pass a sample."""
    remedy = "Its backward pass fails in ordinary training too."

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        losses = problem.losses(batch)
        with refusing("loop", problem.model, remedy):
            single = [_pulled(problem, losses, pick) for pick in _picks(losses)]
        rows = [torch.stack(column) for column in zip(*single, strict=True)]
        return _evaluation(problem, losses, rows)

    yield evaluate


@own_loss_backends.register("vmap")
@contextmanager
def vmap(problem: Problem) -> Iterator[Evaluate]:
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
        rows = [torch.cat(column) for column in zip(*parts, strict=True)]
        return _evaluation(problem, losses, rows)

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


def _evaluation(problem: Problem, losses: Tensor, rows: list[Tensor]) -> Evaluation:
    named = zip(problem.parameters, rows, strict=True)
    return Evaluation(losses.detach(), Gradients({k: DenseBlock(g) for k, g in named}))
