"""`expand`: every parameter gets a sample axis, and ordinary autograd does the rest.

The model is run once, on tensors that look like a batch of one and hold all samples
(`tensor.PerSample`). Below autograd, an interpreter gives each operator its meaning for all
samples at once (`mode.Interpreter`), forward and backward; so the gradient of the summed losses
with respect to a parameter is one gradient a sample. There is no guess about which axis is the
sample axis: it is never among those that the model sees. An operator without a rule runs sample by
sample, and is exact all the same; where Python code decides by a value, samples that decide
alike run together. Nothing here uses torch.func's transforms or reads the graph.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.backends.base import (
    ANOTHER,
    CHUNK_BYTES,
    OF_TEXT,
    ROWS,
    Evaluate,
    LossesAndRows,
    Request,
    backends,
    chunks,
    dense_evaluation,
    explained,
    in_parts,
    refusing,
    require_unhooked,
)
from gradscope.backends.expand import axes, layers  # noqa: F401  (file rules)
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
from gradscope.model.problem import Problem, is_model_loss, losses_of_model, model_loss
from gradscope.model.randomness import forked
from gradscope.model.releases import require

__all__ = ["expand", "rules"]

_REASONS = {
    TEXT: OF_TEXT,
    "data is not allocated": (
        "torch reads the memory of a tensor, which holds all samples",
        'Use torch.stack instead of torch.tensor on a list of tensors, or backend="loop".',
    ),
}


@backends.register("expand")
@contextmanager
def expand(problem: Problem, chunk: int = CHUNK_BYTES) -> Iterator[Evaluate]:
    """Every parameter gets a sample axis, so that ordinary autograd returns per-sample gradients.

    Coupled samples get what a batch of one gives, as with `loop`.
    """
    own = WriteScope.NOTHING  # a model that has written to shared tensors once will do so again

    def attempt(batch: Batch) -> LossesAndRows:
        nonlocal own
        while True:
            try:
                run = partial(_evaluated, problem, batch, own)
                return problem.drawn(batch, run, single=True)
            except SharedWrite as write:
                own = write.needed
            except SamplesDiverge as difference:
                groups: dict[str, list[int]] = {}
                for position, key in enumerate(difference.keys):
                    groups.setdefault(key, []).append(position)
                break
        return in_parts(problem, batch, [torch.tensor(group) for group in groups.values()], attempt)

    def evaluate(batch: Batch, request: Request = ROWS, /) -> Evaluation:
        require("the expand backend", probe)
        require_unhooked("expand", problem)
        with explained("expand", _REASONS), refusing("expand", problem.model, ANOTHER):
            parts = chunks(problem, batch, chunk)  # a backward pass holds about twice as much
            return dense_evaluation(*in_parts(problem, batch, parts, attempt))

    yield evaluate


def _evaluated(problem: Problem, batch: Batch, own: WriteScope) -> LossesAndRows:
    """Run the model, the loss and one backward pass; `own` is each sample's own.

    Raises:
        SharedWrite: The model writes to a tensor that samples share.
        SamplesDiverge: Samples take different ways through the model.
    """
    n = len(batch)
    params = {k: _leaf(p, n) for k, p in problem.parameters.items()}
    inputs, targets = map_tensors(_sample, (batch.inputs, batch.targets))
    found: list[Tensor] = []
    bound = replace(problem, loss=_differentiating(problem.loss, list(params.values()), found))
    with (
        problem.state.kept(),
        forked(problem.device),
        torch.enable_grad(),
        Interpreter(n, own, problem.state.fixed) as mode,
    ):
        losses = bound.functional_losses(dict(params), Batch(inputs, targets, batch.index[:1]))
    if mode.refusal is not None:  # the model's code caught it
        raise mode.refusal
    gradients = {
        name: mode.samples.of(gradient).contiguous()
        for name, gradient in zip(params, found, strict=True)
    }
    return mode.samples.of(losses).detach().reshape(n).clone(), gradients


def _differentiating(
    given: Callable[..., Any], params: list[Tensor], found: list[Tensor]
) -> Callable[..., Any]:
    """Return the loss `given`, which now also leaves the gradients of its sum in `found`.

    The backward pass so runs while `params` are in the model, for the layers that it recomputes.
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
    """Return the parameter (*shape) as a leaf of the graph, one value for n samples."""
    value = parameter.detach()
    if n == 1:  # otherwise its stride 0 over samples keeps the model from writing to it
        value = value.clone()
    return PerSample(value.unsqueeze(0).expand(n, *value.shape), requires_grad=True)


def _sample(t: Tensor) -> Tensor:
    """Wrap a tensor (n, ...) as (1, ...); one without axes is a constant."""
    return PerSample(t.detach().unsqueeze(1), t.requires_grad) if t.dim() else t
