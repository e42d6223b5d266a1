"""Losses that need more than the outputs, and losses with weights and gaps."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gradscope.model.problem import model_loss
from tests.zoo.base import N, Net, Setup, case, smooth


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))


def _gradient(outputs: Tensor, inputs: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return gradient


@case()
def laplacian() -> Setup:
    @model_loss
    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        x = inputs.detach().requires_grad_(True)
        u = model(x)
        slope = _gradient(u, x)
        second = sum(_gradient(slope[:, k], x)[:, k] for k in range(x.shape[1]))
        return (second - targets).square() + u.squeeze(1).sin()

    return Setup(_mlp(), loss, torch.randn(N, 2), torch.randn(N))


@case()
def laplacian_of_the_input_itself() -> Setup:
    @model_loss
    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        x = inputs if inputs.requires_grad else inputs.detach().requires_grad_(True)
        slope = _gradient(model(x), x)
        second = sum(_gradient(slope[:, k], x)[:, k] for k in range(x.shape[1]))
        return (second - targets).square()

    return Setup(_mlp(), loss, torch.randn(N, 2), torch.randn(N))


@case()
def heat_equation_with_boundary() -> Setup:
    @model_loss
    def loss(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        x = inputs["interior"].detach().requires_grad_(True)
        slope = _gradient(model(x), x)
        second = _gradient(slope[:, 0], x)[:, 0]
        boundary = model(inputs["boundary"]).squeeze(1) - targets
        return (slope[:, 1] - 0.3 * second).square() + 2 * boundary.square()

    inputs = {"interior": torch.randn(N, 2), "boundary": torch.randn(N, 2)}
    return Setup(_mlp(), loss, inputs, torch.randn(N))


@case()
def gradient_penalty_at_points_in_between() -> Setup:
    @model_loss
    def loss(model: nn.Module, inputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        real, fake = inputs
        x = targets.unsqueeze(1) * real + (1 - targets.unsqueeze(1)) * fake
        x.requires_grad = True
        gradient = _gradient(model(x), x)
        return (model(fake) - model(real)).squeeze(1) + (gradient.norm(dim=1) - 1).square()

    return Setup(_mlp(), loss, (torch.randn(N, 2), torch.randn(N, 2)), torch.rand(N))


@case()
def laplacian_by_functional_transforms() -> Setup:
    @model_loss
    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        def second(x: Tensor) -> Tensor:
            return torch.func.hessian(lambda z: model(z).squeeze(-1))(x).trace()

        return (torch.func.vmap(second)(inputs) - targets).square()

    return Setup(_mlp(), loss, torch.randn(N, 2), torch.randn(N))


@case()
def decay_of_an_otherwise_unused_parameter() -> Setup:
    @model_loss
    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return smooth(model(inputs), targets) + model.extra.cos().sum() * targets[:, 0]

    model = Net(lambda net, x: net.a(x).tanh(), a=nn.Linear(4, 3), extra=nn.Linear(2, 3).weight)
    return Setup(model, loss, torch.randn(N, 4), torch.randn(N, 3))


@case()
def ignored_tokens() -> Setup:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs.mT, targets, reduction="none", ignore_index=-1)
        return losses.sum(1) / (targets != -1).sum(1).clamp_min(1)

    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    targets = torch.randint(0, 3, (N, 6))
    targets[torch.arange(6) >= torch.tensor([6, 3, 0, 5, 1]).unsqueeze(1)] = -1
    return Setup(model, loss, torch.randn(N, 6, 4), targets)


@case()
def losses_of_uneven_scale() -> Setup:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return smooth(outputs, targets["y"]) * targets["weight"]

    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    weight = torch.tensor([1e-6, 1.0, 0.0, 1e6, -2.0])
    return Setup(model, loss, torch.randn(N, 4), {"y": torch.randn(N, 3), "weight": weight})


@case()
def no_targets() -> Setup:
    def loss(outputs: Tensor, targets: None) -> Tensor:
        return outputs.sin().sum(1)

    return Setup(nn.Sequential(nn.Linear(4, 7), nn.Tanh()), loss, torch.randn(N, 4), None)
