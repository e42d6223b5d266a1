"""`loop`: one backward pass a sample through ordinary autograd. The reference for all others.

Independent samples are evaluated one at a time. Where a sample's loss depends on its batch
(BatchNorm on batch statistics, contrastive losses), the gradient of its own loss, ∂Lᵢ/∂θ through
everybody's statistics, is still defined, for the batch as it is: one joint forward pass, then one
backward pass for each loss. These rows sum to the gradient of the total loss, and depend on which
samples share a batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradscope.backends.base import (
    CHUNK_BYTES,
    ROWS,
    Evaluate,
    Request,
    backends,
    chunks,
    dense_evaluation,
    own_loss_backends,
    refusing,
    require_unhooked,
)
from gradscope.blocks import Evaluation
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem, slopes

OUTSIDE = "Its backward pass fails in ordinary training too."


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
        return dense_evaluation(torch.stack(losses), values)

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
        rows = {name: torch.stack([one[name] for one in single]) for name in problem.parameters}
        return dense_evaluation(losses.detach(), rows)

    yield evaluate


@own_loss_backends.register("vmap")
@contextmanager
def own_loss_at_once(problem: Problem) -> Iterator[Evaluate]:
    """One joint forward pass, all losses pulled back in batched vector-Jacobian products."""
    remedy = "Use backend loop: one ordinary backward pass a sample."

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        require_unhooked("vmap", problem)
        losses = problem.losses(batch)
        picks = _picks(losses)
        with refusing("vmap", problem.model, remedy):
            parts = [
                _pulled(problem, losses, picks[some], batched=True)
                for some in chunks(problem, batch, CHUNK_BYTES)
            ]
        rows = {name: torch.cat([part[name] for part in parts]) for name in problem.parameters}
        return dense_evaluation(losses.detach(), rows)

    yield evaluate


def own_gradient(problem: Problem, batch: Batch, sample: int) -> dict[str, Tensor]:
    """Return {name: ∂Lᵢ/∂θ (*shape)} of one sample within its batch."""
    losses = problem.losses(batch)
    return _pulled(problem, losses, _picks(losses)[sample])


def _picks(losses: Tensor) -> Tensor:
    return torch.eye(len(losses), dtype=losses.dtype, device=losses.device)


def _pulled(
    problem: Problem, losses: Tensor, picks: Tensor, *, batched: bool = False
) -> dict[str, Tensor]:
    """Return the gradients of Σᵢ picks[i] Lᵢ, or of each row of picks when batched."""
    parameters = problem.parameters
    found: Sequence[Tensor | None] = [None] * len(parameters)
    if losses.requires_grad:
        found = torch.autograd.grad(
            losses,
            list(parameters.values()),
            grad_outputs=picks,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=batched,
        )
    lead = picks.shape[:1] if batched else ()
    return {
        name: p.new_zeros(*lead, *p.shape) if g is None else dense(g)
        for (name, p), g in zip(parameters.items(), found, strict=True)
    }
