"""The reference: a loop over batches of one in float64, and a test for independent samples."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.zoo.loss import Uneven
from benchmarks.zoo.subject import (
    SAMPLES,
    Inputs,
    Subject,
    as_dtype,
    as_model,
    one,
    outputs_of,
    seeded,
)

# The relative difference of a loss or gradient that rounding does not explain.
COUPLED = {torch.float64: 1e-9, torch.float32: 1e-3}
_ZERO = 1e-30

Rows = dict[str, Tensor]


@dataclass(frozen=True)
class Truth:
    """The reference of one batch.

    Attributes:
        losses: (n,), of batches of one.
        rows: {name: (n, *shape)}, likewise.
        nature: "independent", "coupled" or "random" samples; of the last two, a tool that refuses
            is right.
        company: The larger of two relative differences: between losses in the batch and losses of
            batches of one, and between the gradient of the batch and the sum of the rows.
    """

    losses: Tensor
    rows: Rows
    nature: str
    company: float

    @property
    def norms(self) -> Tensor:
        """Norms (n,) over all parameters."""
        squares = [row.abs().square().reshape(len(row), -1).sum(1) for row in self.rows.values()]
        return torch.stack(squares).sum(0).sqrt()


class PlainNorms(TorchFunctionMode):
    """Batch normalisation with running statistics, by its formula.

    torch's kernel for CPUs has a wrong gradient for some layouts of a batch.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute the formula instead of `F.batch_norm`."""
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        given = dict(zip(_NORM, args, strict=False)) | (kwargs or {})
        if given.get("training") or given["running_mean"] is None:
            return func(*args, **(kwargs or {}))
        x = given["input"]
        size = (1, -1, *(1 for _ in range(x.dim() - 2)))
        mean, variance = given["running_mean"].view(size), given["running_var"].view(size)
        out = (x - mean) * (variance + given.get("eps", 1e-5)).rsqrt()
        if given.get("weight") is not None:
            out = out * given["weight"].view(size)
        return out if given.get("bias") is None else out + given["bias"].view(size)


_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def truth(subject: Subject, loss: Uneven, inputs: Inputs) -> Truth:
    """Return the reference of a batch: in float64, or in float32 if the model cannot run in it."""
    try:
        return _truth(subject, loss, inputs, torch.float64)
    except RuntimeError as error:
        if "dtype" not in str(error) or subject.dtype == torch.float64:
            raise
        return _truth(subject, loss, inputs, torch.float32)


def _truth(subject: Subject, loss: Uneven, inputs: Inputs, dtype: torch.dtype) -> Truth:
    model = as_model(copy.deepcopy(subject.model), dtype)
    wide = as_dtype(inputs, dtype)
    exactly = subject.exactly(model) if dtype == torch.float64 else nullcontext()
    with exactly, PlainNorms():
        losses, rows = alone(model, loss, wide)
        batch, gradient = gradients(copy.deepcopy(model), loss, wide)
        draws = [
            seeded(seed, lambda: loss(outputs_of(copy.deepcopy(model), wide)).detach())
            for seed in (1, 2)
        ]
    if not torch.equal(*draws):
        return Truth(losses, rows, "random", 0.0)
    scale = losses.abs().max().clamp(min=_ZERO)
    company = float(((batch - losses).abs() / scale).max())
    whole = torch.stack([row.norm() for row in rows.values()]).norm()
    for name, row in rows.items():
        by = torch.maximum(row.norm(), 1e-6 * whole).clamp(min=_ZERO)
        company = max(company, float((gradient[name] - row.sum(0)).norm() / by))
    return Truth(losses, rows, "coupled" if company > COUPLED[dtype] else "independent", company)


def alone(model: nn.Module, loss: Uneven, inputs: Inputs) -> tuple[Tensor, Rows]:
    """Return losses (n,) and rows {name: (n, *shape)} of batches of one, each by a fresh copy."""
    found = [
        seeded(0, lambda i=i: gradients(copy.deepcopy(model), loss, one(inputs, i)))
        for i in range(SAMPLES)
    ]
    losses = torch.cat([value for value, _ in found])
    return losses, {k: torch.stack([g[k] for _, g in found]) for k in found[0][1]}


def gradients(model: nn.Module, loss: Uneven, inputs: Inputs) -> tuple[Tensor, Rows]:
    """Return the losses (n,), and the gradient {name: (*shape)} of their sum."""
    named = {k: p for k, p in model.named_parameters() if p.requires_grad}
    losses = loss(outputs_of(model, inputs))
    found = torch.autograd.grad(losses.sum(), list(named.values()), allow_unused=True)
    return losses.detach(), {
        k: torch.zeros_like(p) if g is None else g.to_dense()
        for (k, p), g in zip(named.items(), found, strict=True)
    }
