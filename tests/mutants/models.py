"""The models that defects show in: a few hundred numbers each, in float64 but for the LSTM."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradscope.stages.losses import cross_entropy
from tests.cases import CASES
from tests.zoo.base import Net, param, seeded, smooth


class Course(NamedTuple):
    """A model, its loss, and batches that come one after the other."""

    model: nn.Module
    loss: Callable[..., Tensor]
    batches: list[tuple[Any, Any]]  # (inputs, targets) of each
    coupling: str = "refuse"  # as a `Scope` takes it


@cache
def course(name: str) -> Course:
    """Return the model of that name, here or in the zoo, with the same numbers every time."""
    with seeded(name, torch.float32 if name == "lstm" else torch.float64):
        return MODELS[name]() if name in MODELS else _case(name)


def _fitted(net: nn.Module, batches: list[Any]) -> Course:
    """Give each batch random targets of its outputs' shape."""
    net.eval()
    pairs = []
    for inputs in batches:
        with torch.no_grad():
            outputs = net(*inputs) if isinstance(inputs, tuple) else net(inputs)
        pairs.append((inputs, torch.randn(outputs.shape)))
    return Course(net, smooth, pairs)


def _randoms(*sizes: int, shape: tuple[int, ...] = (4,)) -> list[Tensor]:
    return [torch.randn(n, *shape) for n in sizes]


def _layers(*sizes: int, shape: tuple[int, ...] = (4,), inner: int = 7, out: int = 3) -> Course:
    net = nn.Sequential(nn.Linear(4, inner), nn.Tanh(), nn.Linear(inner, out))
    return _fitted(net, _randoms(*sizes, shape=shape))


def _net(
    forward: Callable[..., Tensor], *sizes: int, shape: tuple[int, ...] = (4,), **members: Any
) -> Course:
    """Return a model by `forward(net, x)`, which has two linear layers a and b if nothing else."""
    members = members or {"a": nn.Linear(4, 7), "b": nn.Linear(7, 3)}
    return _fitted(Net(forward, **members), _randoms(*sizes, shape=shape))


def _classifier() -> Course:
    model, _, batches, _ = _layers(6, 5)
    return Course(model, cross_entropy, [(x, torch.randint(3, (len(x),))) for x, _ in batches])


def _cnn() -> Course:
    first = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2)
    net = nn.Sequential(first, nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 3))
    return _fitted(net, _randoms(5, 4, shape=(4, 7, 7)))


def _normalised() -> Course:
    net = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        net[1].running_mean.copy_(torch.randn(7))
        net[1].running_var.copy_(torch.rand(7) + 0.1)
    return _fitted(net, _randoms(6, 5))


def _tokens() -> Course:
    net = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.LayerNorm(4), nn.Linear(4, 3))
    ids = [torch.randint(1, 5, (n, 8)) for n in (5, 3)]  # eight of four: some come again
    for batch in ids:
        batch[:, 3] = 0
    with torch.no_grad():
        net[1].weight.add_(torch.randn(4))
    return _fitted(net, ids)


def _by_length() -> Course:
    """Sorted, and back: in order in the first batch."""

    def forward(net: Any, x: Tensor, key: Tensor) -> Tensor:
        order = key.argsort(descending=True, stable=True)
        found: Tensor = net.b(net.a(x[order]).tanh())
        return found[order.argsort()]

    keys = [torch.tensor([4, 3, 2, 1, 0]), torch.tensor([0, 4, 1, 3, 2])]
    net = Net(forward, a=nn.Linear(4, 7), b=nn.Linear(7, 3))
    return _fitted(net, list(zip(_randoms(5, 5), keys, strict=True)))


def _recurrent(kind: type[nn.RNNBase], *sizes: int) -> Course:
    layers = {"layer": kind(3, 4, batch_first=True), "head": nn.Linear(4, 2)}
    return _net(lambda net, x: net.head(net.layer(x)[0]), *sizes, shape=(3, 3), **layers)


def _case(name: str, **more: Any) -> Course:
    """Return a case of the zoo, in one batch of five samples and one of three."""
    model, loss, inputs, targets = CASES[name].build()
    return Course(model, loss, [(inputs, targets), (inputs[:3], targets[:3])], **more)


MODELS: dict[str, Callable[[], Course]] = {
    "mlp": lambda: _layers(6, 5),
    "classifier": _classifier,
    "single_samples": lambda: _layers(6, 1),
    "same_size": lambda: _fitted(nn.Linear(4, 3), _randoms(5, 5)),
    "four": lambda: _layers(4, 4, inner=4, out=4),  # of everything, samples included
    "positions": lambda: _layers(5, 3, shape=(6, 4)),
    "long": lambda: _fitted(nn.Linear(3, 2), _randoms(4, 3, shape=(140, 3))),
    "elementwise": lambda: _net(
        lambda net, x: torch.sub(x * net.scale, net.shift, alpha=0.7) / (net.width + 2),
        *(6, 5),
        **{name: param(4) for name in ("scale", "shift", "width")},
    ),
    "cnn": _cnn,
    "running": _normalised,
    "tokens": _tokens,
    "flipped": lambda: _net(lambda net, x: net.b(net.a(x.flip(0)).tanh()).flip(0), 6, 5),
    "by_length": _by_length,
    "lstm": lambda: _recurrent(nn.LSTM, 5, 3),
    "coupled": lambda: _case("coupled_batch_norm_in_train_mode", coupling="own-loss"),
    "gru": lambda: _recurrent(nn.GRU, 4, 3),
}
