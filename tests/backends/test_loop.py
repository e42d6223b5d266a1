"""The loop against closed forms, and its errors."""

import numpy as np
import pytest
import torch
from torch import nn

from gradscope.backends.base import backends
from gradscope.core.batch import Batch
from gradscope.errors import UnsupportedError
from gradscope.model.problem import Problem


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


def test_samples_may_come_in_any_order():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x, y, order = torch.randn(6, 4), torch.randn(6, 2), torch.tensor([3, 0, 5, 1, 1, 4])
    straight = evaluate(model, squared, x, y).gradients["0.weight"].dense()
    shuffled = evaluate(model, squared, x[order], y[order]).gradients["0.weight"].dense()
    assert torch.equal(shuffled, straight[order])


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

    with pytest.raises(UnsupportedError, match=r"no derivative here.*\n.*ordinary training too"):
        evaluate(model, loss, torch.randn(6, 4), torch.randn(6, 2))


def test_a_backward_pass_that_fails_in_mode_eval_alone_is_told_so():
    """A recurrent model keeps in place what it generates from, and only in mode eval."""

    class Keeping(nn.Linear):
        def forward(self, x):
            kept = super().forward(x).exp()
            if not self.training:
                kept += 1
            return kept

    model, x, y = Keeping(4, 2), torch.randn(6, 4), torch.randn(6, 2)
    evaluate(model, squared, x, y)
    with pytest.raises(UnsupportedError, match=r"inplace operation.*\n.*in eval mode.*use_cache"):
        evaluate(model.eval(), squared, x, y)
