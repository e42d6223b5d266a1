"""`expand`: every parameter gets a sample axis, and ordinary autograd does the rest.

The model runs once, on tensors that have the shapes of a batch of one and contain all samples
(`tensor.PerSample`). Below autograd, an interpreter applies each operator to all samples
(`mode.Interpreter`), forward and backward. So the gradient of the summed losses by a parameter has
one row per sample. The sample axis is never among the axes that the model sees, so it need not be
guessed. An operator without a rule runs sample by sample, which is exact. If Python code branches
on a value, samples with the same branch run together, or one at a time if they are few. This
backend uses neither torch.func nor the recorded graph.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.backends.base import (
    CHUNK_BYTES,
    OF_TEXT,
    ROWS,
    USE_AUTO,
    Evaluate,
    LossesAndRows,
    Request,
    backends,
    chunks,
    dense_evaluation,
    explaining,
    in_parts,
    refusing,
    require_unhooked,
)
from gradscope.backends.expand import axes, layers  # noqa: F401  (register rules)
from gradscope.backends.expand.facts import rules
from gradscope.backends.expand.mode import Interpreter, probe
from gradscope.backends.expand.tensor import (
    TEXT,
    PerSample,
    SamplesDiverge,
    SharedWrite,
    WriteScope,
)
from gradscope.blocks import Evaluation
from gradscope.core.batch import Batch, call, map_tensors
from gradscope.model.problem import Problem, is_model_loss, losses_of_model, model_loss, slopes
from gradscope.model.randomness import forked
from gradscope.model.releases import require

__all__ = ["expand", "rules"]

# samples with the same branch that run one at a time: together, an operator takes about as long
_FEW = 8

_REASONS = {
    TEXT: OF_TEXT,
    "data is not allocated": (
        "the model reads the memory of a tensor, which contains all samples",
        'Use torch.stack instead of torch.tensor for a list of tensors, or use backend="loop".',
    ),
}


@backends.register("expand")
@contextmanager
def expand(problem: Problem, chunk: int = CHUNK_BYTES) -> Iterator[Evaluate]:
    """Every parameter gets a sample axis, so that ordinary autograd returns per-sample gradients.

    Coupled samples get the gradient of a batch of one, as with `loop`.
    """
    own = WriteScope.NOTHING  # once a model has written to shared tensors, it will do so again

    def attempt(batch: Batch) -> LossesAndRows:
        nonlocal own
        while True:
            try:
                run = partial(_evaluated, problem, batch, own)
                return problem.with_randomness(batch, run, single=True)
            except SharedWrite as write:
                own = write.needed
            except SamplesDiverge as difference:
                groups: dict[str, list[int]] = {}
                for position, key in enumerate(difference.keys):
                    groups.setdefault(key, []).append(position)
                break
        return in_parts(problem, batch, [torch.tensor(group) for group in groups.values()], branch)

    def branch(batch: Batch) -> LossesAndRows:
        """Evaluate samples that have taken the same branch so far."""
        if len(batch) > _FEW:
            return attempt(batch)
        return _one_at_a_time(problem, batch)

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        require("the expand backend", probe)
        require_unhooked("expand", problem)
        with explaining("expand", _REASONS), refusing("expand", problem.model, USE_AUTO):
            parts = chunks(problem, batch, chunk)  # a backward pass takes about twice the memory
            return dense_evaluation(*in_parts(problem, batch, parts, attempt))

    yield evaluate


def _evaluated(problem: Problem, batch: Batch, own: WriteScope) -> LossesAndRows:
    """Run the model, the loss and one backward pass; `own` says which tensors are per sample.

    Raises:
        SharedWrite: The model writes to a tensor that samples share.
        SamplesDiverge: Samples take different branches in the model.
    """
    n = len(batch)
    params = {k: _leaf(p, n) for k, p in problem.parameters.items()}
    inputs, targets = map_tensors(_sample, (batch.inputs, batch.targets))
    found: list[Tensor] = []
    bound = replace(problem, loss=_differentiating(problem.loss, list(params.values()), found))
    with (
        problem.state.restoring(),
        forked(problem.device),
        torch.enable_grad(),
        Interpreter(n, own, problem.state.randomness) as mode,
    ):
        losses = bound.functional_losses(dict(params), Batch(inputs, targets, batch.index[:1]))
    if mode.refusal is not None:  # the model's code caught the exception
        raise mode.refusal
    gradients = {
        name: mode.samples.of(gradient).contiguous()
        for name, gradient in zip(params, found, strict=True)
    }
    return mode.samples.of(losses).detach().reshape(n).clone(), gradients


def _one_at_a_time(problem: Problem, batch: Batch) -> LossesAndRows:
    """Return losses (n,) and gradients (n, *shape) by ordinary autograd on batches of one."""
    losses, rows = [], []
    for i in range(len(batch)):
        own = problem.losses(batch.one(i))
        losses.append(own.detach()[0])
        rows.append(slopes(own, problem.parameters.values()))
    every = [
        torch.stack([g.detach().to_dense() for g in column]) for column in zip(*rows, strict=True)
    ]
    return torch.stack(losses), dict(zip(problem.parameters, every, strict=True))


def _differentiating(
    given: Callable[..., Any], params: list[Tensor], found: list[Tensor]
) -> Callable[..., Any]:
    """Return the loss `given`, extended to store the gradients of its sum in `found`.

    So the backward pass runs while `params` are in the model, as recomputed layers need.
    """

    @model_loss
    @wraps(given, updated=())
    def loss(model: nn.Module, inputs: Any, targets: Any) -> Any:
        if is_model_loss(given):
            losses = losses_of_model(given, model, inputs, targets)
        else:
            losses = given(call(model, inputs), targets)
        if isinstance(losses, Tensor) and losses.requires_grad:
            gradients = torch.autograd.grad(
                losses.sum(), params, allow_unused=True, materialize_grads=True
            )
        else:
            gradients = tuple(map(torch.zeros_like, params))
        found.extend(gradients)
        return losses

    loss.takes_whole = True
    return loss


def _leaf(parameter: Tensor, n: int) -> PerSample:
    """Return the parameter (*shape) as a leaf of the graph, with one value for n samples."""
    value = parameter.detach()
    if n == 1:  # for n > 1, the stride 0 over samples prevents writes to the parameter
        value = value.clone()
    return PerSample(value.unsqueeze(0).expand(n, *value.shape), requires_grad=True)


def _sample(t: Tensor) -> Tensor:
    """Wrap a tensor (n, ...) as (1, ...); a tensor without axes stays a constant."""
    return PerSample(t.detach().unsqueeze(1), t.requires_grad) if t.dim() else t
