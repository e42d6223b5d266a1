"""A subject: a small model with random weights, and a function that makes its batches."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.core.batch import call, map_tensors

SAMPLES = 3  # samples in a batch
MOST = 26_000_000  # parameters of a model

Inputs = Any  # a tensor, a tuple or a dict of tensors (n, ...)
Place = tuple[Any, ...]  # where a tensor is among the outputs


class NotBuiltError(Exception):
    """No small instance of an architecture could be built, or none that runs."""


@dataclass(frozen=True)
class Subject:
    """One architecture, operator or module.

    Attributes:
        model: In eval mode, with random weights.
        inputs: Takes a seed and a number of samples to inputs (n, ...).
        dtype: What gradscope and the other tools compute in.
        exactly: Takes a float64 copy of the model; returns a context without casts to float32.
    """

    model: nn.Module
    inputs: Callable[[int, int], Inputs]
    dtype: torch.dtype = torch.float32
    exactly: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext


def seeded(seed: int, make: Callable[[], Any]) -> Any:
    """Return what `make` makes of random numbers by a seed; the global generator stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def shaken(model: nn.Module, by: float = 0.05) -> nn.Module:
    """Return the model with no parameter at a constant start, so that no gradient is zero by it.

    Running statistics of normalisation layers are random, too.
    """
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() or p.is_complex():
                p.add_(by * torch.randn_like(p))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.1 * torch.randn_like(buffer))
            if name.endswith("running_var"):
                buffer.mul_(0.5 + torch.rand_like(buffer))
    return model.eval()


def parts(outputs: Any, place: Place = ()) -> dict[Place, Tensor]:
    """Return the tensors in a model's outputs by their place: tuples, dicts, and fields."""
    if isinstance(outputs, Tensor):
        return {place: outputs}
    if isinstance(outputs, dict):
        items = list(outputs.items())
    elif isinstance(outputs, tuple | list):
        items = list(enumerate(outputs))
    elif hasattr(outputs, "__dataclass_fields__"):
        items = [(name, getattr(outputs, name)) for name in outputs.__dataclass_fields__]
    else:
        items = []
    return {k: v for name, value in items for k, v in parts(value, (*place, name)).items()}


def as_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """Return inputs whose floating-point tensors have a dtype (complex ones that precision)."""
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t.to(wide) if t.is_complex() else t

    return map_tensors(cast, tree)


def as_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model with parameters and buffers of a dtype (complex ones of that precision)."""
    return model._apply(lambda t: as_dtype(t, dtype))


def one(tree: Any, i: int) -> Any:
    """Return sample i as a batch of one."""
    return map_tensors(lambda t: t[i : i + 1].clone() if t.dim() else t.clone(), tree)


def outputs_of(model: nn.Module, inputs: Inputs) -> Any:
    """Return the outputs; inputs are copied, as some models write into them."""
    return call(model, map_tensors(Tensor.clone, inputs))
