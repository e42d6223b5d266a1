"""Coupled samples, when asked for: each sample's own loss in its batch, or frozen statistics."""

import copy

import pytest
import torch
from torch import nn

import gradscope
from gradscope.errors import CoupledSamplesError, SpecError
from gradscope.model.problem import is_model_loss
from tests.cases import COUPLED, INDEPENDENT
from tests.oracle import per_sample_gradients


def own_losses(setup) -> dict[str, torch.Tensor]:
    """One backward pass of each loss through the joint forward pass, in plain torch."""
    model = copy.deepcopy(setup.model)
    if is_model_loss(setup.loss):
        losses = setup.loss(model, setup.inputs, setup.targets)
    else:
        inputs = setup.inputs if isinstance(setup.inputs, tuple) else (setup.inputs,)
        losses = setup.loss(model(*inputs), setup.targets)
    named = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(
            loss, list(named.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for loss in losses
    ]
    return dict(zip(named, map(torch.stack, zip(*rows, strict=True)), strict=True))


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("case", COUPLED, ids=lambda c: c.name)
def test_own_losses_of_coupled_samples(case, backend: str) -> None:
    setup = case.build()
    wanted = own_losses(setup)
    before = copy.deepcopy(setup.model.state_dict())
    scope = gradscope.Scope(setup.model, setup.loss, backend=backend, coupling="own-loss")
    found = scope.per_sample_gradients(setup.inputs, setup.targets)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)
    assert scope.certificate is not None
    assert all(torch.equal(v, before[k]) for k, v in setup.model.state_dict().items())


# in a batch, one layer scales gradients by the whole batch; one loss has none
OTHERS = ("embedding_scaled_by_frequency", "loss_reaches_no_parameter")
ALIKE = [c for c in INDEPENDENT if c.name not in OTHERS]


@pytest.mark.parametrize("case", ALIKE[::6], ids=lambda c: c.name)
def test_own_losses_of_independent_samples_are_the_per_sample_gradients(case) -> None:
    setup = case.build()
    _, wanted = per_sample_gradients(*setup)
    scope = gradscope.Scope(setup.model, setup.loss, backend="loop", coupling="own-loss")
    found = scope.per_sample_gradients(setup.inputs, setup.targets)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("backend", ["hooks", "expand"])
def test_backends_without_own_losses_say_so(backend: str) -> None:
    with pytest.raises(SpecError, match="own-loss backend"):
        gradscope.Scope(nn.Linear(2, 1), "mse", backend=backend, coupling="own-loss")


@pytest.fixture
def normalised() -> nn.Module:
    torch.manual_seed(5)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)]
    model = nn.Sequential(*layers).double().train()
    model(torch.randn(6, 2, 5, 5, dtype=torch.float64))
    return model


@pytest.mark.parametrize("backend", ["auto", "loop", "hooks", "vmap", "expand"])
def test_frozen_statistics_equal_eval_mode(normalised: nn.Module, backend: str) -> None:
    inputs, targets = torch.randn(7, 2, 5, 5, dtype=torch.float64), torch.randint(0, 3, (7,))
    frozen = gradscope.per_sample_gradients(
        normalised, "cross_entropy", inputs, targets, backend=backend, coupling="frozen"
    )
    assert all(m.training for m in normalised.modules())
    wanted = gradscope.per_sample_gradients(
        copy.deepcopy(normalised).eval(), "cross_entropy", inputs, targets, backend="loop"
    )
    for name, gradient in wanted.items():
        torch.testing.assert_close(frozen[name], gradient, rtol=1e-9, atol=1e-12)


def test_frozen_statistics_need_running_ones() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(CoupledSamplesError):
        gradscope.norms(model, "mse", torch.randn(5, 3), torch.randn(5, 4), coupling="frozen")
