"""One evaluation: the model, the loss and one backward pass, on tensors that hold all samples."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.backends.expand.mode import Interpreter
from gradscope.backends.expand.tensor import Own, PerSample
from gradscope.core.batch import Batch, call, map_tensors
from gradscope.core.problem import Problem, is_model_loss, model_loss


def evaluated(problem: Problem, batch: Batch, own: Own) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses (n,) and {name: gradients (n, *shape)}; `own` is each sample's own.

    Raises:
        SharedWrite: The model writes to a tensor that samples share.
        Differ: Samples take different ways through the model.
    """
    n = len(batch)
    params = {k: _leaf(p, n) for k, p in problem.parameters.items()}
    sample = Batch(_sample(batch.inputs), _sample(batch.targets), batch.index[:1])
    found: list[Tensor] = []
    bound = replace(problem, loss=_differentiating(problem.loss, list(params.values()), found))
    devices = [problem.device] if problem.device.type == "cuda" else []
    with (
        problem.state.kept(),
        torch.random.fork_rng(devices=devices),
        torch.enable_grad(),
        Interpreter(n, own) as mode,
    ):
        losses = bound.functional_losses(dict(params), sample)
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
            losses = given(model, inputs, targets)
        else:
            losses = given(call(model, inputs), targets)
        if isinstance(losses, Tensor) and losses.requires_grad:
            gradients = torch.autograd.grad(
                losses.sum(), params, allow_unused=True, materialize_grads=True
            )
            found.extend(gradients)
        else:
            found.extend(torch.zeros_like(p) for p in params)
        return losses

    return loss


def _leaf(parameter: Tensor, n: int) -> PerSample:
    """Return the parameter (*shape) as a leaf of the graph, one value for n samples."""
    value = parameter.detach()
    if n == 1:  # otherwise its stride 0 over samples keeps the model from writing to it
        value = value.clone()
    return PerSample(value.unsqueeze(0).expand(n, *value.shape), requires_grad=True)


def _sample(tree: Any) -> Any:
    """Wrap tensors (n, ...) as (1, ...); one without axes is a constant."""

    def wrapped(t: Tensor) -> Tensor:
        return PerSample(t.detach().unsqueeze(1), t.requires_grad) if t.dim() else t

    return map_tensors(wrapped, tree)
