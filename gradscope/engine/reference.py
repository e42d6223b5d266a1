"""Ordinary autograd on the user's model: the reference that a backend's answers are compared with.

The model is whole in this process, or fully_shard has sharded it over several processes. All
processes make each pass of a sharded model together, and a process that skips a pass leaves the
remaining processes waiting forever. So a proof takes every decision that leads to a pass by
`Problem.any`, which is true on all processes if it is true on one. An error on one process is
raised on all processes when the next pass begins.
"""

from functools import partial

import torch
from torch import Tensor

from gradscope.backends.loop import by_autograd
from gradscope.core.batch import Batch
from gradscope.core.precision import doubled
from gradscope.errors import ModelError, RefusedError
from gradscope.model.problem import Problem, summed

_BUCKETS = 4093  # sums in a sketch: a prime, so that no regular pattern falls into one of them


def gradients(
    problem: Problem, batch: Batch, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses (n,) and {name: ∇ Σ wᵢ Lᵢ}, each gradient `compressed`.

    Gradients of a sharded model are compressed one by one during the backward pass.
    """
    if problem.model_parallel is None:
        losses = problem.losses(batch)
        weights = None if weights is None else weights.to(losses)
        return losses.detach(), by_autograd(problem, losses, weights)
    found: dict[str, Tensor] = {}

    def passes(name: str, gradient: Tensor) -> Tensor:
        found[name] = compressed(problem, gradient.detach())
        return gradient.new_zeros(()).expand_as(gradient)  # the gradient is not kept

    named = problem.parameters
    # no process enters the backward pass if one has failed
    with problem.model_parallel.raise_on_all():
        losses = problem.losses(batch)
    handles = [p.register_hook(partial(passes, k)) for k, p in named.items()]  # type: ignore[no-untyped-call]
    try:
        total = summed(losses, None if weights is None else weights.to(losses))
        torch.autograd.grad(total, [*named.values()], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    zero = doubled(losses.new_zeros(()))
    return losses.detach(), {name: found.get(name, zero) for name in named}


def compressed(problem: Problem, gradient: Tensor) -> Tensor:
    """Return the gradient, or its sketch if the model is sharded."""
    return gradient if problem.model_parallel is None else sketch(gradient)


def sketch(t: Tensor) -> Tensor:
    """Return sums of entries with fixed random signs, (4093,): a linear map that keeps the norm.

    The norm is right on average, to 2 % (Alon, Matias and Szegedy, 1999; in buckets: Charikar, Chen
    and Farach-Colton, 2002). A tensor with at most 4093 entries is only flattened.
    """
    real = torch.view_as_real(t) if t.is_complex() else t
    flat = doubled(real).flatten()
    if len(flat) <= _BUCKETS:
        return flat
    draw = torch.Generator(flat.device).manual_seed(0)
    signs = torch.randint(0, 2, flat.shape, generator=draw, dtype=torch.int8, device=flat.device)
    flat = flat * (2 * signs - 1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % _BUCKETS))
    return padded.view(-1, _BUCKETS).sum(0)


def tolerated(problem: Problem) -> tuple[type[Exception], ...]:
    """Return the errors that only skip a cross-check, as a model may not support a copy or split.

    With a sharded model, every error ends the proof on all processes.
    """
    return (ModelError, RefusedError) if problem.model_parallel is None else ()
