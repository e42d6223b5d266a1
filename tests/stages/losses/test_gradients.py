"""Named losses through the backends, against a batch of one in float64."""

import pytest
import torch
from torch import nn

import gradscope
from gradscope.config import parse_loss
from gradscope.core.problem import model_loss
from gradscope.errors import SpecError
from gradscope.stages.losses import bound, options, resolve
from tests.oracle import per_sample_gradients

N, T, V = 5, 4, 6


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(V, 3), nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, V)).double()


def tokens():
    found = torch.randint(V, (N, T), generator=torch.Generator().manual_seed(1))
    wanted = found.clone()
    wanted[1, 2:] = -100
    wanted[2] = -100
    return found, wanted


WEIGHT = 'weight="1,2,0.5,1,3,1"'


@pytest.mark.parametrize("backend", ["loop", "hooks", "vmap", "expand"])
@pytest.mark.parametrize(
    "name", ["causal_lm", "causal_lm:per_sample=sum", f"causal_lm:label_smoothing=0.1,{WEIGHT}"]
)
def test_a_language_model(backend, name):
    model = net()
    inputs, targets = tokens()
    _, right = per_sample_gradients(model, resolve(name), inputs, targets)
    scope = gradscope.Scope(model, name, backend=backend, verify="always")
    found = scope.per_sample_gradients(inputs, targets)
    for key, value in right.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-14)
        assert not found[key][2].any()  # every token is ignored


@pytest.mark.parametrize("backend", ["loop", "hooks", "auto"])
@pytest.mark.parametrize("per_sample", ["sum", "mean"])
def test_ctc(backend, per_sample):
    model, name = net(), f"ctc:per_sample={per_sample}"
    inputs = tokens()[0]
    targets = torch.tensor([[1, 2], [3, -1], [4, 5], [1, 1], [2, -1]])
    _, right = per_sample_gradients(model, resolve(name), inputs, targets)
    found = gradscope.per_sample_gradients(model, name, inputs, targets, backend=backend)
    for key, value in right.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("backend", ["loop", "hooks", "vmap", "expand"])
@pytest.mark.parametrize(
    "name",
    [
        f"cross_entropy:label_smoothing=0.2,{WEIGHT}",
        "cross_entropy:per_sample=sum",
        f"nll:{WEIGHT},ignore_index=0",
    ],
)
def test_classes_at_positions(backend, name):
    model = nn.Sequential(net(), nn.LogSoftmax(-1), nn.Flatten(1), nn.Unflatten(1, (T, V)))

    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x).transpose(1, 2)

    inputs, targets = tokens()
    moved = Moved()
    targets = targets.clamp(min=0)
    _, right = per_sample_gradients(moved, resolve(name), inputs, targets)
    found = gradscope.per_sample_gradients(moved, name, inputs, targets, backend=backend)
    for key, value in right.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-14)


def tempered(outputs, targets, *, tau: float = 1.0):
    """A user's own loss with an option."""
    return nn.functional.cross_entropy(outputs / tau, targets, reduction="none")


def test_options_of_a_users_loss():
    loss = bound(tempered, parse_loss("mine.py:tempered", {"tau": 2}))
    outputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 3])
    assert torch.equal(loss(outputs, targets), tempered(outputs, targets, tau=2.0))
    assert options(loss) == {"tau": 2.0} and loss.__name__ == "tempered"
    with pytest.raises(SpecError, match="tau"):
        bound(tempered, parse_loss("mine.py:tempered:temperature=2"))


def test_a_model_loss_keeps_its_mark():
    @model_loss
    def decayed(model, inputs, targets, *, decay: float):
        penalty = sum(p.square().sum() for p in model.parameters())
        return (model(inputs) - targets).square().sum(1) + decay * penalty

    model = nn.Linear(3, 2).double()
    inputs, targets = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    loss = bound(decayed, parse_loss("mine.py:decayed:decay=0.5"))
    found = gradscope.per_sample_gradients(model, loss, inputs, targets)
    plain = gradscope.per_sample_gradients(model, "mse:per_sample=sum", inputs, targets)
    torch.testing.assert_close(found["weight"], plain["weight"] + model.weight.detach())
