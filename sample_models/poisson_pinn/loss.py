"""The loss of the physics-informed network: Poisson's equation and its boundary values."""

import torch
from torch import Tensor, nn

from gradscope import model_loss

BOUNDARY_WEIGHT = 100.0


def laplacian(values: Tensor, points: Tensor) -> Tensor:
    """Sum of the second derivatives of values (n,) at points (n, 2), differentiable: (n,)."""
    (slopes,) = torch.autograd.grad(values.sum(), points, create_graph=True)  # (n, 2)
    total = torch.zeros_like(values)
    for axis in range(2):
        (bends,) = torch.autograd.grad(slopes[:, axis].sum(), points, create_graph=True)
        total = total + bends[:, axis]
    return total


@model_loss
def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error of each point: of the equation inside, of the value on the boundary.

    Inside, (Δu + f)²; on the boundary, 100 (u - g)².

    Args:
        model: The network, points (n, 2) -> values (n, 1).
        inputs: Points (n, 2).
        targets: (n, 2): f inside or g on the boundary, then 0 inside or 1 on the boundary.

    Returns:
        (n,).
    """
    with torch.enable_grad():
        points = inputs if inputs.requires_grad else inputs.detach().clone().requires_grad_(True)
        values: Tensor = model(points).squeeze(1)
        known, on_boundary = targets.unbind(1)
        equation = (laplacian(values, points) + known) ** 2
        boundary = BOUNDARY_WEIGHT * (values - known) ** 2
        return (1 - on_boundary) * equation + on_boundary * boundary
