"""Derivatives of a model's output with respect to its input, for losses that contain them.

Gradient penalties, physics-informed losses and score matching need ∂u/∂x inside the loss. These
functions use ordinary autograd and work in every backend:

    @gradscope.model_loss
    def loss(model, inputs, targets):
        u, laplacian = derivatives.laplacian(model, inputs)
        return (laplacian + targets).square()

The samples must not depend on each other. Then the gradient of the sum over samples contains each
sample's own gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gradscope.errors import SpecError

Function = Callable[[Tensor], Tensor]


def gradient(model: Function, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and its gradient with respect to the input.

    Args:
        model: Maps (n, i...) to (n,) or (n, 1).
        inputs: (n, i...), floating point.

    Returns:
        u (n,) and ∇u (n, i...), both with their graph.

    Raises:
        SpecError: The output does not have one number per sample.
    """
    x = _differentiable(inputs)
    u = _scalar(model(x), x)
    return u, _by(u, x)


def laplacian(model: Function, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and its Laplacian, Σₖ ∂²u/∂xₖ².

    This costs one backward pass for each of the i entries of a sample's input.

    Args:
        model: Maps (n, i...) to (n,) or (n, 1).
        inputs: (n, i...), floating point.

    Returns:
        u (n,) and Δu (n,), both with their graph.

    Raises:
        SpecError: The output does not have one number per sample.
    """
    x = _differentiable(inputs)
    u = _scalar(model(x), x)
    slopes = _by(u, x).flatten(1)
    return u, _diagonal(slopes, x)


def divergence(model: Function, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return a vector field and its divergence, Σₖ ∂vₖ/∂xₖ.

    Args:
        model: Maps (n, i...) to the same shape.
        inputs: (n, i...), floating point.

    Returns:
        v (n, i...) and div v (n,), both with their graph.

    Raises:
        SpecError: The output and the input have different shapes.
    """
    x = _differentiable(inputs)
    field = model(x)
    if field.shape != x.shape:
        raise SpecError(
            f"the model returned shape {tuple(field.shape)} for an input of {tuple(x.shape)}",
            where="derivatives.divergence",
            remedy="Return a vector field: a tensor of the input's shape.",
        )
    return field, _diagonal(field.flatten(1), x)


def _differentiable(inputs: Tensor) -> Tensor:
    """Return the inputs if they require a gradient, else a copy that requires a gradient."""
    return inputs if inputs.requires_grad else inputs.detach().clone().requires_grad_(True)


def _scalar(outputs: Tensor, inputs: Tensor) -> Tensor:
    n = inputs.shape[0]
    if outputs.shape not in ((n,), (n, 1)):
        raise SpecError(
            f"the model returned shape {tuple(outputs.shape)}, but must return one number per "
            f"sample: ({n},) or ({n}, 1)",
            where="derivatives",
            remedy="Select one component of the output, or use divergence for a vector field.",
        )
    return outputs.reshape(n)


def _by(values: Tensor, inputs: Tensor) -> Tensor:
    """Return ∂(Σ values)/∂inputs; zeros where the values do not depend on the inputs."""
    if not values.requires_grad:
        return torch.zeros_like(inputs)
    (slope,) = torch.autograd.grad(values.sum(), [inputs], create_graph=True, allow_unused=True)
    return torch.zeros_like(inputs) if slope is None else slope


def _diagonal(values: Tensor, inputs: Tensor) -> Tensor:
    """Return Σₖ ∂values[:, k]/∂inputs[:, k], (n,)."""
    terms = [_by(values[:, k], inputs).flatten(1)[:, k] for k in range(values.shape[1])]
    return torch.stack(terms).sum(0)
