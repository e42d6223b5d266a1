"""Other libraries held against the loop: Opacus itself, and BackPACK's interface by a stand-in."""

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import nn

from gradscope.comparison import PEERS, compare, peer, peer_version
from gradscope.errors import SpecError

N = 5


class Recurrent(nn.Module):
    """A recurrent layer that Opacus refuses, by the name `cell`."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, inputs):
        return self.head(self.cell(inputs.unflatten(1, (4, 3)))[0][:, -1])


class Scaled(Recurrent):
    """The model has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, inputs):
        return super().forward(inputs) * self.scale


class Attention(nn.Module):
    """A layer with parameters that draws random numbers in train mode."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.MultiheadAttention(4, 2, 0.5, batch_first=True), nn.Linear(12, 2)

    def forward(self, inputs):
        parts = inputs.unflatten(1, (3, 4))
        return self.head(self.mix(parts, parts, parts, need_weights=False)[0].flatten(1))


class Gain(nn.Module):
    """A parameter for which BackPACK has no rule."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, inputs):
        return inputs * self.gain


def plain():
    return nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2))


def circular():
    convolution = nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")
    return nn.Sequential(nn.Unflatten(1, (1, 3, 4)), convolution, nn.Flatten(), nn.Linear(24, 2))


def held(name, build, mode=False, frozen=()):
    torch.manual_seed(0)
    model = build().train(mode)
    for each in frozen:
        model.get_parameter(each).requires_grad_(False)
    inputs, targets = torch.randn(N, 12), torch.randint(2, (N,))
    done = compare(model, "cross_entropy", inputs, targets, ["loop"], against={name: peer(name)})
    return done.rows[1]


@pytest.mark.parametrize("frozen", [(), ("0.weight",)])
def test_opacus_agrees_where_it_is_right(frozen):
    """In eval mode, too, where its own hooks see nothing; and each call has its own rows."""
    row = held("opacus", plain, frozen=frozen)
    assert (row.status, row.reason) == ("agrees", None)
    assert row.worst.relative < 1e-12 and row.seconds > 0
    assert len(row.parameters) == 4 - len(frozen)


@pytest.mark.parametrize(
    ("build", "status", "words"),
    [
        (circular, "disagrees", "1.weight: "),
        (Recurrent, "refused", "cell: We do not support nn.LSTM"),
        (Scaled, "refused", "cell: We do not support nn.LSTM"),
        (Attention, "refused", "mix: We do not support nn.MultiheadAttention"),
        (lambda: nn.Sequential(plain(), nn.BatchNorm1d(2)), "refused", "1: BatchNorm cannot"),
        (lambda: nn.Sequential(plain(), nn.ReLU(inplace=True)), "failed", "layer '1' (ReLU)"),
    ],
)
def test_what_opacus_gets_wrong_or_refuses_is_named(build, status, words):
    row = held("opacus", build)
    assert (row.status, words in (row.reason or "")) == (status, True), row.reason
    assert not (row.reason or "").startswith(",")  # the model around the layer is not named


def test_a_layer_of_its_own_kind_that_is_random_in_train_mode_is_refused():
    class Noisy(nn.Linear):
        def forward(self, inputs):
            return super().forward(nn.functional.dropout(inputs, 0.5, self.training))

    row = held("opacus", lambda: Noisy(12, 2))
    assert (row.status, "train mode only" in row.reason) == ("refused", True)


@pytest.fixture
def backpack(monkeypatch):
    """The documented interface of BackPACK, for linear layers; others have no rule or refuse."""
    library, extensions = ModuleType("backpack"), ModuleType("backpack.extensions")
    active = []

    class BatchGrad:
        savefield = "grad_batch"

    @contextmanager
    def using(*given):
        active.extend(given)
        yield
        active.clear()

    def extend(module):
        for layer in module.modules():
            if isinstance(layer, nn.LayerNorm):
                raise NotImplementedError("no extension for LayerNorm")  # as BackPACK itself does
            if isinstance(layer, nn.Linear) and not hasattr(layer, "extended"):
                layer.extended = True
                layer.register_forward_hook(lambda m, given, out: setattr(m, "seen", given[0]))
                layer.register_full_backward_hook(rule)
        return module

    def rule(layer, _, outputs):
        if active:
            assert not hasattr(layer.bias, "grad_batch") or layer.bias.grad_batch is None
            layer.weight.grad_batch = torch.einsum("no,ni->noi", outputs[0], layer.seen)
            layer.bias.grad_batch = outputs[0].clone()

    library.backpack, library.extend, extensions.BatchGrad = using, extend, BatchGrad
    monkeypatch.setitem(sys.modules, "backpack", library)
    monkeypatch.setitem(sys.modules, "backpack.extensions", extensions)
    monkeypatch.setattr("gradscope.comparison.peers.find_spec", lambda module: module)


@pytest.mark.parametrize(
    ("layer", "status", "words"),
    [
        (nn.Tanh, "agrees", None),
        (Gain, "disagrees", "1.gain: there is no gradient for this parameter"),
        (lambda: nn.LayerNorm(2), "refused", "no extension for LayerNorm"),
    ],
)
def test_backpack_is_judged_by_what_it_leaves_on_the_parameters(backpack, layer, status, words):
    row = held("backpack", lambda: nn.Sequential(plain(), layer()))
    assert (row.status, row.reason) == (status, words)


@pytest.mark.parametrize("name", PEERS)
def test_a_library_that_is_not_installed_says_how(name, monkeypatch):
    monkeypatch.setattr("gradscope.comparison.peers.find_spec", lambda module: None)
    with pytest.raises(SpecError, match=f"pip install {PEERS[name].package}"):
        peer(name)


def test_the_version_is_the_distributions():
    assert peer_version("opacus").count(".") == 2
