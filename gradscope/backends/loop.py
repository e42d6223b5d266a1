"""`loop`: one backward pass per sample with ordinary autograd. The reference for all backends.

Independent samples are evaluated one at a time. A sample's loss may also depend on its batch
(BatchNorm with batch statistics, contrastive losses). The gradient of this loss, ∂Lᵢ/∂θ through the
shared statistics, is then still defined for the given batch. It takes one joint forward pass and
one backward pass for each loss. These rows sum to the gradient of the total loss, and they depend
on which samples share a batch.
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
from gradscope.core.batch import Batch, Tokens
from gradscope.model.problem import Problem, slopes

_CACHED = 2**23  # bytes of dense gradients that are still in the cache when they are stored


@backends.register("loop")
@contextmanager
def loop(problem: Problem) -> Iterator[Evaluate]:
    """One sample at a time, as a batch of one: slow, and the reference for all backends."""

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
    return losses.detach()[0], by_autograd(problem, losses)


def one_graph(problem: Problem, batch: Tokens) -> Evaluation:
    """Return the gradients of tokens, from one forward pass per sample.

    The backward passes are batched vector-Jacobian products if the model supports them.
    """
    size = _CACHED if problem.device.type == "cpu" else CHUNK_BYTES
    values = {k: p.new_empty(len(batch), *p.shape) for k, p in problem.parameters.items()}
    found, batched = [], True
    for k in range(len(batch.sample_batch)):
        rows = (batch.sample == k).nonzero().flatten()
        own = batch.select(rows)
        losses = problem.losses(own)
        every = _picks(losses)
        found.append((rows, losses.detach()))
        for some in chunks(problem, own, size):
            if batched and len(some) > 1:
                try:
                    _into(values, rows[some], _pulled(problem, losses, every[some]))
                    continue
                except (RuntimeError, ValueError, NotImplementedError):  # no batching rule
                    batched = False
            for row, pick in zip(rows[some], every[some], strict=True):
                _into(values, row, by_autograd(problem, losses, pick))
    order, losses = (torch.cat(one) for one in zip(*found, strict=True))
    return dense_evaluation(losses[order.argsort()], values)


def _into(values: dict[str, Tensor], rows: Tensor, found: dict[str, Tensor]) -> None:
    for name, gradient in found.items():
        values[name][rows] = gradient


def by_autograd(
    problem: Problem, losses: Tensor, weights: Tensor | None = None
) -> dict[str, Tensor]:
    """Return {name: ∇ Σᵢ wᵢ Lᵢ (*shape)} of losses (n,), dense and without a graph."""
    remedy = "loss.backward() fails in ordinary training too: correct the model or the loss."
    if not problem.model.training:
        remedy = (
            "loss.backward() fails in the same way in eval mode. If it works in train mode, use "
            "mode train, or turn off the cache that the model keeps for generation "
            "(transformers: config.use_cache = False)."
        )
    with refusing("loop", problem.model, remedy):
        found = slopes(losses, problem.parameters.values(), weights)
    return dict(zip(problem.parameters, map(_dense, found), strict=True))


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient without a graph; sparse gradients (of embeddings) become dense."""
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


@own_loss_backends.register("loop")
@contextmanager
def own_loss(problem: Problem) -> Iterator[Evaluate]:
    """One joint forward pass, one backward pass per sample."""

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        losses = problem.losses(batch)
        single = [by_autograd(problem, losses, pick) for pick in _picks(losses)]
        rows = {name: torch.stack([one[name] for one in single]) for name in problem.parameters}
        return dense_evaluation(losses.detach(), rows)

    yield evaluate


@own_loss_backends.register("vmap")
@contextmanager
def own_loss_at_once(problem: Problem) -> Iterator[Evaluate]:
    """One joint forward pass; batched vector-Jacobian products of all losses."""
    remedy = 'Use backend="loop": it takes one ordinary backward pass per sample.'

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        require_unhooked("vmap", problem)
        losses = problem.losses(batch)
        picks = _picks(losses)
        with refusing("vmap", problem.model, remedy):
            parts = [
                _pulled(problem, losses, picks[some])
                for some in chunks(problem, batch, CHUNK_BYTES)
            ]
        rows = {name: torch.cat([part[name] for part in parts]) for name in problem.parameters}
        return dense_evaluation(losses.detach(), rows)

    yield evaluate


def own_gradient(problem: Problem, batch: Batch, sample: int) -> dict[str, Tensor]:
    """Return {name: ∂Lᵢ/∂θ (*shape)} of one sample within its batch."""
    losses = problem.losses(batch)
    return by_autograd(problem, losses, _picks(losses)[sample])


def _picks(losses: Tensor) -> Tensor:
    return torch.eye(len(losses), dtype=losses.dtype, device=losses.device)


def _pulled(problem: Problem, losses: Tensor, picks: Tensor) -> dict[str, Tensor]:
    """Return {name: (m, *shape)} of Σᵢ picks[k, i] Lᵢ, for each row k of picks (m, n)."""
    parameters = problem.parameters
    found: Sequence[Tensor | None] = [None] * len(parameters)
    if losses.requires_grad:
        found = torch.autograd.grad(
            losses,
            list(parameters.values()),
            grad_outputs=picks,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
    return {
        name: p.new_zeros(len(picks), *p.shape) if g is None else _dense(g)
        for (name, p), g in zip(parameters.items(), found, strict=True)
    }
