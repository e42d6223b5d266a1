"""Ordinary autograd on the user's model: the reference that a backend's answers are compared with.

A proof asks the reference for losses, for gradients of weighted sums of losses, and for the same
with other last digits of the parameters. `Reference` evaluates a model that is whole in this
process, `ShardedReference` one that fully_shard has sharded over several.

Each pass of a sharded model is one of all processes, and whoever makes another pass than the rest
waits forever. So a proof takes every decision that leads to a pass by `any`, which is true on all
processes if it is on one. An error on one process reaches the others when they begin their next
pass.
"""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from gradscope.backends.loop import by_autograd
from gradscope.core.batch import Batch
from gradscope.core.precision import doubled, products
from gradscope.errors import ModelError, RefusedError
from gradscope.model.problem import Problem, summed
from gradscope.model.rounding import computed_in, nearby
from gradscope.process.stops import within

_BUCKETS = 4093  # sums in a sketch: a prime, so that no regular pattern falls into one of them


class Reference:
    """Autograd's losses and gradients of a model that is whole in this process.

    Attributes:
        problem: The model and its loss.
        tolerated: Errors of a cross-check that end the check alone: not every model can be copied,
            runs in float64, or takes any number of samples.
        sharded: Whether every pass is one of several processes.
    """

    sharded = False
    tolerated: tuple[type[Exception], ...] = (ModelError, RefusedError)

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @property
    def precision(self) -> torch.dtype:
        """The dtype whose rounding is expected in losses and gradients."""
        return self.problem.precision

    def any(self, flag: bool) -> bool:
        """Whether it is so on any process that evaluates the model together with this one."""
        return flag

    def losses(self, batch: Batch) -> Tensor:
        """Return the losses (n,)."""
        return self.problem.losses(batch).detach()

    def gradients(
        self, batch: Batch, weights: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses (n,) and {name: ∇ Σ wᵢ Lᵢ}, each gradient `compressed`."""
        losses = self.problem.losses(batch)
        weights = None if weights is None else weights.to(losses)
        return losses.detach(), by_autograd(self.problem, losses, weights)

    def compressed(self, gradient: Tensor) -> Tensor:
        """Return a gradient as it is kept: a linear map of it, with the same norm."""
        return gradient

    def perturbed(self, trials: int, digits: torch.dtype | None = None) -> Iterator["Reference"]:
        """Yield the reference so many times with other last digits of the parameters."""
        return map(Reference, nearby(self.problem, trials, digits))

    def narrowest(self, batch: Batch) -> torch.dtype:
        """Return the narrowest dtype that the model rounds to; see `computed_in`."""
        try:
            return computed_in(self.problem, batch)
        except ModelError:  # not every model takes one sample of a batch
            return self.problem.precision

    def untimed(self) -> AbstractContextManager[None]:
        """Let the body take its time where processes can run out of time only together."""
        return nullcontext()


class ShardedReference(Reference):
    """Autograd's losses and gradients of a model that fully_shard has sharded over processes.

    No process has room for a gradient of the whole model: of each parameter's the sketch is kept,
    as it passes by in the backward pass.

    Attributes:
        narrow: The narrowest dtype that the first batch was rounded to.
    """

    sharded = True
    tolerated = ()  # an error ends the proof on all processes

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        assert problem.sharding is not None
        self.sharding, self.narrow = problem.sharding, problem.precision

    @property
    def precision(self) -> torch.dtype:
        """The least precise of the dtypes that the model and the device's products round to."""
        device = self.problem.device
        place = products(device) if self.narrow == torch.float32 else self.narrow
        return max(self.narrow, place, key=lambda dtype: torch.finfo(dtype).eps)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any process."""
        return self.sharding.any(flag)

    def gradients(
        self, batch: Batch, weights: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses (n,) and {name: sketch of ∇ Σ wᵢ Lᵢ}."""
        named = self.problem.parameters
        found: dict[str, Tensor] = {}

        def passes(name: str, gradient: Tensor) -> Tensor:
            found[name] = self.compressed(gradient.detach())
            return gradient.new_zeros(()).expand_as(gradient)  # the gradient is not kept

        with self.sharding.together():  # none waits in a backward pass for one that failed before
            losses = self.problem.losses(batch)
        handles = [p.register_hook(partial(passes, k)) for k, p in named.items()]  # type: ignore[no-untyped-call]
        try:
            total = summed(losses, None if weights is None else weights.to(losses))
            torch.autograd.grad(total, [*named.values()], allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        zero = torch.zeros((), device=losses.device, dtype=doubled(losses).dtype)
        return losses.detach(), {name: found.get(name, zero) for name in named}

    def compressed(self, gradient: Tensor) -> Tensor:
        """Return the sketch of a gradient."""
        return sketch(gradient)

    def perturbed(self, trials: int, digits: torch.dtype | None = None) -> Iterator[Reference]:
        """Yield the reference itself while its parameters have other last digits."""
        for _ in nearby(self.problem, trials, digits or self.precision):
            yield self

    def narrowest(self, batch: Batch) -> torch.dtype:
        """Return what was found on the first batch, with the precision of the device's products."""
        return self.precision

    def untimed(self) -> AbstractContextManager[None]:
        """Let the body take its time: processes can run out of time only together."""
        return within(math.inf, time.perf_counter)


def sketch(t: Tensor) -> Tensor:
    """Return sums of entries with random signs, always the same, (4093,): linear, of the same norm.

    The norm is right on average, to 2 % (Alon, Matias and Szegedy, 1999; in buckets: Charikar, Chen
    and Farach-Colton, 2002). Of fewer entries, the entries themselves are returned.
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
