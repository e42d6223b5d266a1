"""Derivatives inside losses: closed forms, and the same per-sample gradients in every backend."""

import pytest
import torch
from torch import Tensor, nn

from gradscope import derivatives, model_loss
from gradscope.backends.base import backends
from gradscope.core.batch import Batch
from gradscope.errors import SpecError
from gradscope.model.problem import Problem
from tests.oracle import per_sample_gradients

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


def test_gradient_of_a_known_function() -> None:
    u, slope = derivatives.gradient(lambda x: x.pow(3).sum(1), X)
    torch.testing.assert_close(u, X.pow(3).sum(1))
    torch.testing.assert_close(slope, 3 * X**2)


def test_laplacian_of_known_functions() -> None:
    _, cubic = derivatives.laplacian(lambda x: x.pow(3).sum(1, keepdim=True), X)
    torch.testing.assert_close(cubic, 6 * X.sum(1))
    _, harmonic = derivatives.laplacian(lambda x: x[:, 0] ** 2 - x[:, 1] ** 2, X)
    torch.testing.assert_close(harmonic, torch.zeros(4, dtype=torch.float64))
    _, linear = derivatives.laplacian(lambda x: x.sum(1), X)
    assert not linear.any()


def test_divergence_of_a_known_field() -> None:
    turned = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    _, found = derivatives.divergence(lambda x: x**2 * turned, X)
    torch.testing.assert_close(found, 2 * X @ turned)


def test_the_callers_tensor_is_left_alone() -> None:
    derivatives.laplacian(lambda x: x.pow(2).sum(1), X)
    assert not X.requires_grad


@pytest.mark.parametrize("name", ["gradient", "laplacian", "divergence"])
def test_a_wrong_shape_is_refused(name: str) -> None:
    with pytest.raises(SpecError):
        getattr(derivatives, name)(lambda x: x[:, :2], X)


@model_loss
def penalty(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    u, slope = derivatives.gradient(model, inputs)
    return (u - targets).square() + (slope.norm(dim=1) - 1).square()


@model_loss
def poisson(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    u, curvature = derivatives.laplacian(model, inputs)
    return (curvature + targets).square() + 0.1 * u


@model_loss
def incompressible(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    field, flow = derivatives.divergence(lambda x: model[0](x).tanh() * x.sum(1, True), inputs)
    return (flow - targets).square() + field.square().sum(1)


@pytest.mark.parametrize("backend", backends.names())
@pytest.mark.parametrize("loss", [penalty, poisson, incompressible], ids=lambda f: f.__name__)
def test_every_backend_is_exact(backend: str, loss) -> None:
    torch.manual_seed(2)
    width = 3 if loss is incompressible else 5
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()
    targets = torch.rand(4, dtype=torch.float64)
    _, wanted = per_sample_gradients(model, loss, X, targets)
    with backends.get(backend)(Problem.of(model, loss)) as evaluate:
        found = evaluate(Batch.of(X, targets)).gradients.dense()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)
