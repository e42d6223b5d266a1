"""The oracle: per-sample gradients in float64, one sample at a time, in plain torch."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.model.problem import is_model_loss


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (n,) of logits (n, c) and classes (n,)."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def per_sample_gradients(
    model: nn.Module, loss: Callable[..., Tensor], inputs: Any, targets: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses (n,) and {name: (n, *shape)} of every trainable parameter."""
    rows = []
    for i in range(_samples((inputs, targets))):
        fresh = copy.deepcopy(model)._apply(_wide)  # buffers start from the same state
        rows.append(_one(fresh, loss, _row(inputs, i), _row(targets, i)))
    losses = torch.stack([value for value, _ in rows])
    return losses, {name: torch.stack([g[name] for _, g in rows]) for name in rows[0][1]}


def _one(
    model: nn.Module, loss: Callable[..., Tensor], inputs: Any, targets: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    if is_model_loss(loss):
        value = loss(model, inputs, targets)
    elif isinstance(inputs, dict):
        value = loss(model(**inputs), targets)
    else:
        value = loss(model(*inputs) if isinstance(inputs, tuple) else model(inputs), targets)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if value.requires_grad:
        value.squeeze(0).backward()
    zeros = {name: torch.zeros_like(p) for name, p in named.items()}
    found = {n: zeros[n] if p.grad is None else p.grad for n, p in named.items()}
    return value.detach()[0], {n: g.to_dense() for n, g in found.items()}


def _wide(t: Tensor) -> Tensor:
    if t.is_complex():
        return t.to(torch.complex128)
    return t.double() if t.is_floating_point() else t


def _row(tree: Any, i: int) -> Any:
    """Sample i as a batch of one; constants without axes are left alone."""
    if isinstance(tree, Tensor):
        return _wide(tree[i : i + 1] if tree.dim() else tree).clone()  # it may be written into
    if isinstance(tree, dict):
        return {key: _row(value, i) for key, value in tree.items()}
    return type(tree)(_row(value, i) for value in tree) if isinstance(tree, tuple) else tree


def _samples(tree: Any) -> int:
    """The length of the first tensor with an axis."""
    if isinstance(tree, Tensor):
        return len(tree) if tree.dim() else 0
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple) else ()
    return next((n for n in map(_samples, values) if n), 0)
