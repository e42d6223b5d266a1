"""Own-loss gradients of coupled samples: ∂Lᵢ/∂θ through everybody's statistics.

Where a sample's loss depends on its batch (BatchNorm on batch statistics, contrastive losses), the
gradient of its own loss is still defined, for the batch as it is: one joint forward pass, then one
backward pass for each loss. The rows sum to the gradient of the total loss, and depend on which
samples share a batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from gradscope.backends.base import Backend, Evaluate, refusing, require_unhooked
from gradscope.backends.loop import dense
from gradscope.blocks import DenseBlock, Evaluation, Gradients
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem
from gradscope.core.registry import Registry

own_loss_backends: Registry[Backend] = Registry("own-loss backend")

_BYTES = 2**28  # gradients that one batched backward pass may hold

Rows = Callable[[Tensor, list[Tensor], Tensor], list[Tensor]]


@own_loss_backends.register("loop")
@contextmanager
def loop(problem: Problem) -> Iterator[Evaluate]:
    """One joint forward pass, one backward pass a sample."""

    def rows(losses: Tensor, parameters: list[Tensor], picks: Tensor) -> list[Tensor]:
        single = [_pulled(losses, parameters, pick, batched=False) for pick in picks]
        return [torch.stack(column) for column in zip(*single, strict=True)]

    yield _joint(problem, rows, "loop", "Its backward pass fails in ordinary training too.")


@own_loss_backends.register("vmap")
@contextmanager
def vmap(problem: Problem) -> Iterator[Evaluate]:
    """One joint forward pass, all losses pulled back in batched vector-Jacobian products."""
    size = sum(prod(p.shape) * p.element_size() for p in problem.parameters.values())
    step = max(1, _BYTES // max(1, size))

    def rows(losses: Tensor, parameters: list[Tensor], picks: Tensor) -> list[Tensor]:
        parts = [
            _pulled(losses, parameters, picks[k : k + step], batched=True)
            for k in range(0, len(picks), step)
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    evaluate = _joint(
        problem, rows, "vmap", "Use backend loop: one ordinary backward pass a sample."
    )

    def unhooked(batch: Batch) -> Evaluation:
        require_unhooked("vmap", problem)
        return evaluate(batch)

    yield unhooked


def own_gradient(problem: Problem, batch: Batch, sample: int) -> dict[str, Tensor]:
    """Return {name: ∂Lᵢ/∂θ (*shape)} of one sample within its batch."""
    losses = problem.losses(batch)
    parameters: list[Tensor] = list(problem.parameters.values())
    if not losses.requires_grad:
        return {name: torch.zeros_like(p) for name, p in problem.parameters.items()}
    pick = torch.zeros_like(losses)
    pick[sample] = 1
    pulled = _pulled(losses, parameters, pick, batched=False)
    return dict(zip(problem.parameters, pulled, strict=True))


def _joint(problem: Problem, rows: Rows, name: str, remedy: str) -> Evaluate:
    def evaluate(batch: Batch) -> Evaluation:
        losses = problem.losses(batch)
        parameters: list[Tensor] = list(problem.parameters.values())
        if losses.requires_grad:
            picks = torch.eye(len(batch), dtype=losses.dtype, device=losses.device)
            with refusing(name, problem.model, remedy):
                values = rows(losses, parameters, picks)
        else:
            values = [p.new_zeros(len(batch), *p.shape) for p in parameters]
        named = zip(problem.parameters, values, strict=True)
        return Evaluation(losses.detach(), Gradients({k: DenseBlock(v) for k, v in named}))

    return evaluate


def _pulled(
    losses: Tensor, parameters: list[Tensor], picks: Tensor, *, batched: bool
) -> list[Tensor]:
    """Return the gradients of Σᵢ picks[i] Lᵢ, or of each row of picks when batched."""
    found = torch.autograd.grad(
        losses,
        parameters,
        grad_outputs=picks,
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=batched,
    )
    lead = picks.shape[:1] if batched else ()
    return [
        p.new_zeros(*lead, *p.shape) if g is None else dense(g)
        for g, p in zip(found, parameters, strict=True)
    ]
