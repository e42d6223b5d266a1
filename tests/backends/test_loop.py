"""The loop against closed forms, and its errors."""

import numpy as np
import pytest
import torch
from torch import nn

from gradscope.backends import backends
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem
from gradscope.errors import ModelError, SpecError, UnsupportedError


def squared(outputs, targets):
    return (outputs - targets).square().sum(1)


def evaluate(model, loss, inputs, targets, parameters=None):
    with backends.get("loop")(Problem.of(model, loss, parameters)) as run:
        return run(Batch.of(inputs, targets))


def test_linear_regression_against_its_closed_form():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    result = evaluate(model, squared, x, y)
    w, b = (p.detach().numpy() for p in model.parameters())
    gap = x.numpy() @ w.T + b - y.numpy()
    np.testing.assert_allclose(result.losses, (gap**2).sum(1), rtol=1e-12)
    np.testing.assert_allclose(
        result.gradients["weight"].dense(), 2 * gap[:, :, None] * x.numpy()[:, None], rtol=1e-12
    )
    np.testing.assert_allclose(result.gradients["bias"].dense(), 2 * gap, rtol=1e-12)


def test_dtype_shapes_and_selection():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    result = evaluate(model, squared, torch.randn(6, 4), torch.randn(6, 2), "1.*")
    assert {k: g.shape for k, g in result.gradients.items()} == {"1.weight": (2, 3), "1.bias": (2,)}
    assert result.gradients.n == 6
    assert result.gradients["1.weight"].dtype == torch.float32
    assert not result.losses.requires_grad


def test_samples_may_come_in_any_order():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x, y, order = torch.randn(6, 4), torch.randn(6, 2), torch.tensor([3, 0, 5, 1, 1, 4])
    straight = evaluate(model, squared, x, y).gradients["0.weight"].dense()
    shuffled = evaluate(model, squared, x[order], y[order]).gradients["0.weight"].dense()
    assert torch.equal(shuffled, straight[order])


def test_what_the_loss_does_not_reach_gets_zeros():
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "unused": nn.Linear(3, 3)})
    model.forward = lambda x: model["used"](x)
    result = evaluate(model, squared, torch.randn(6, 4), torch.randn(6, 2))
    assert torch.equal(result.gradients["unused.weight"].dense(), torch.zeros(6, 3, 3))
    assert (result.gradients["used.weight"].squared_norms() > 0).all()


def test_a_failing_model_is_named_with_its_layer():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 2))
    with pytest.raises(ModelError, match=r"layer '1' \(Linear\)"):
        evaluate(model, squared, torch.randn(6, 4), torch.randn(6, 2))


def test_a_reduced_loss_is_refused_with_the_reason():
    with pytest.raises(SpecError, match=r"scales every gradient by 1/n"):
        evaluate(nn.Linear(4, 2), nn.MSELoss(), torch.randn(6, 4), torch.randn(6, 2))


def test_a_backward_pass_that_fails_is_refused():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no derivative here")

    model = nn.Linear(4, 2)

    def loss(outputs, targets):
        return squared(Broken.apply(outputs), targets)

    with pytest.raises(UnsupportedError, match=r"no derivative here"):
        evaluate(model, loss, torch.randn(6, 4), torch.randn(6, 2))
