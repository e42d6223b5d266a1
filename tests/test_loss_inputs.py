"""A loss that gets probabilities instead of logits, or the other way round, is noticed once."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradscope
from gradscope.scope import LossInputWarning

N = 12
X = torch.randn(N, 4)
CLASSES, PIXELS = torch.randint(3, (N,)), torch.randint(3, (N, 5))
BITS, SHARES = torch.randint(2, (N, 1)).float(), torch.rand(N, 3).softmax(1)
COUNTS = torch.randint(4, (N, 1)).float()


class Head(nn.Module):
    """A linear layer and a function of what it returns."""

    def __init__(self, width, function=lambda h: h):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(4, width), function

    def forward(self, x):
        return self.function(self.layer(x))


def softmax(h):
    return h.softmax(1)


def log_softmax(h):
    return h.log_softmax(1)


def quotient(h):  # a softmax by hand
    return h.exp() / h.exp().sum(1, keepdim=True)


def clamped(h):
    return h.sigmoid().clamp(1e-6, 1 - 1e-6)


def pixels(h):
    return h.reshape(-1, 3, 5)


def normal(h):
    return h[:, :1], functional.softplus(h[:, 1:])


def log_normal(h):
    return h[:, :1], h[:, 1:]


def own(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")  # here


@gradscope.model_loss
def penalised(model, inputs, targets):
    losses = functional.binary_cross_entropy_with_logits(model(inputs), targets, reduction="none")
    return losses[:, 0] + model.layer.weight.square().sum()


RIGHT = [
    (Head(3), "cross_entropy", CLASSES),
    (Head(3, log_softmax), "cross_entropy", CLASSES),  # the same losses
    (Head(3, nn.ReLU()), "cross_entropy", CLASSES),
    (Head(3, lambda h: h * 1e-3 + 0.5), "cross_entropy", CLASSES),  # between 0 and 1
    (Head(15, pixels), "cross_entropy", PIXELS),
    (Head(1), "bce_with_logits", BITS),
    (Head(1, lambda h: h * 1e-3 + 0.5), "bce_with_logits", BITS),
    (Head(1, torch.sigmoid), "bce", BITS),
    (Head(3, log_softmax), "nll", CLASSES),
    (Head(15, lambda h: pixels(h).log_softmax(1)), "nll", PIXELS),
    (Head(3, log_softmax), "kl", SHARES),
    (Head(3, lambda h: h.log_softmax(1)), nn.NLLLoss(reduction="none"), CLASSES),
    (Head(1), "poisson_nll", COUNTS),
    (Head(1, nn.Softplus()), "poisson_nll:log_input=false", COUNTS),
    (Head(2, normal), "gaussian_nll", BITS),
    (Head(2, log_normal), "gaussian_nll:log_variance=true", BITS),
    (Head(1, torch.sigmoid), "mse", BITS),
    (Head(1), penalised, BITS),
]
WRONG = [
    (Head(3, softmax), "cross_entropy", CLASSES, "cross_entropy expects logits but gets prob"),
    (Head(3, quotient), "cross_entropy", CLASSES, "cross_entropy expects logits"),
    (Head(3, torch.sigmoid), "cross_entropy", CLASSES, "Remove the softmax or sigmoid"),
    (Head(15, lambda h: pixels(h).softmax(1)), "cross_entropy", PIXELS, "all 180 values"),
    (Head(3, softmax), nn.CrossEntropyLoss(reduction="none"), CLASSES, "cross_entropy expects"),
    (Head(1, torch.sigmoid), "bce_with_logits", BITS, "from sigmoid: .* use the loss bce"),
    (Head(1, clamped), "bce_with_logits", BITS, "bce_with_logits expects logits"),
    (Head(1, torch.sigmoid), penalised, BITS, "expects logits but gets probabilities"),
    (Head(3), "nll", CLASSES, "nll expects log-probabilities but gets logits: exp of the first"),
    (Head(15, pixels), "nll", PIXELS, "gets logits"),
    (Head(3, softmax), "nll", CLASSES, r"gets probabilities: .* Add \.log\(\)"),
    (Head(3), nn.NLLLoss(reduction="none"), CLASSES, "nll expects log-probabilities"),
    (Head(3), "kl", SHARES, "kl expects log-probabilities but gets values up to"),
    (Head(3, softmax), "kl", SHARES, r"kl .* gets probabilities: .* Add \.log\(\)"),
    (Head(1, nn.Softplus()), "poisson_nll", COUNTS, "rates from softplus. Set log_input=false"),
    (Head(2, normal), "gaussian_nll:log_variance=true", BITS, "variances from softplus"),
]


@pytest.mark.parametrize(("model", "loss", "targets"), RIGHT)
def test_nothing_is_said_of_the_right_numbers(model, loss, targets):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradscope.norms(model, loss, X, targets).shape == (N,)


@pytest.mark.parametrize(("model", "loss", "targets", "what"), WRONG)
def test_the_wrong_numbers_are_noticed(model, loss, targets, what):
    with gradscope.Scope(model, loss) as scope:
        with pytest.warns(LossInputWarning, match=what) as caught:
            found = scope.norms(X, targets)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():  # once
            warnings.simplefilter("error")
            torch.testing.assert_close(scope.norms(X, targets), found)
    assert len(scope.session.warnings) == 1
    assert scope.session.warnings[0] in scope.notes


def test_the_line_of_a_loss_of_the_users_own_is_named():
    with pytest.warns(LossInputWarning, match=rf"cross_entropy \({__file__}, line \d+\) expects"):
        gradscope.norms(Head(3, softmax), own, X, CLASSES)


def test_nothing_is_watched_without_a_proof():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradscope.norms(Head(3, softmax), "cross_entropy", X, CLASSES, verify="never")
