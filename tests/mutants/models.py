"""The models that defects show in: a few hundred numbers each, in float64 but for the LSTM."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from gradscope.stages.losses import cross_entropy
from tests.zoo.base import Net, param, smooth


class Course(NamedTuple):
    """A model, its loss, and batches that come one after the other."""

    model: nn.Module  # the model
    loss: Callable[..., Tensor]  # the loss
    batches: list[tuple[Any, Any]]  # (inputs, targets) of each
    coupling: str = "refuse"  # as a `Scope` takes it


def _built(make: Callable[[], Course], dtype: torch.dtype) -> Course:
    standard = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(crc32(make.__name__.encode()))
            return make()
    finally:
        torch.set_default_dtype(standard)


MODELS: dict[str, Callable[[], Course]] = {}


def model(
    dtype: torch.dtype = torch.float64,
) -> Callable[[Callable[[], Course]], Callable[[], Course]]:
    """File a builder under its name; it is called once."""

    def add(make: Callable[[], Course]) -> Callable[[], Course]:
        MODELS[make.__name__] = cache(lambda: _built(make, dtype))
        return make

    return add


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


@model()
def mlp() -> Course:
    net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    return _fitted(net, _randoms(6, 5))


@model()
def classifier() -> Course:
    net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    batches = [(x, torch.randint(3, (len(x),))) for x in _randoms(6, 5)]
    return Course(net.eval(), cross_entropy, batches)


@model()
def single_samples() -> Course:
    return _fitted(nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)), _randoms(6, 1))


@model()
def same_size() -> Course:
    return _fitted(nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)), _randoms(5, 5))


@model()
def square() -> Course:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return _fitted(net, _randoms(6, 5))


@model()
def positions() -> Course:
    net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    return _fitted(net, _randoms(5, 3, shape=(6, 4)))


@model()
def long() -> Course:
    return _fitted(nn.Linear(3, 2), _randoms(4, 3, shape=(140, 3)))


@model()
def scaled_product() -> Course:
    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.addmm(net.b, x, net.w, beta=0.5, alpha=3.0).tanh()

    return _fitted(Net(forward, b=param(7), w=param(4, 7)), _randoms(6, 5))


@model()
def experts() -> Course:
    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), net.w).tanh().transpose(0, 1)

    return _fitted(Net(forward, w=param(3, 4, 2)), _randoms(6, 5, shape=(3, 4)))


@model()
def elementwise() -> Course:
    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.sub(x * net.scale, net.shift, alpha=0.7) / (net.width + 2)

    return _fitted(Net(forward, scale=param(4), shift=param(4), width=param(4)), _randoms(6, 5))


@model()
def powers() -> Course:
    net = Net(lambda net, x: (0.1 + x.abs()) ** net.exponent, exponent=param(4))
    return _fitted(net, _randoms(6, 5))


@model()
def cnn() -> Course:
    net = nn.Sequential(
        nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 3, 3),
    )
    return _fitted(net, _randoms(5, 4, shape=(4, 7, 7)))


@model()
def running() -> Course:
    net = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        net[1].running_mean.copy_(torch.randn(7))
        net[1].running_var.copy_(torch.rand(7) + 0.1)
    return _fitted(net, _randoms(6, 5))


@model()
def tokens() -> Course:
    net = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.LayerNorm(4), nn.Linear(4, 3))
    ids = [torch.randint(1, 5, (n, 8)) for n in (5, 3)]  # eight of four: some come again
    for batch in ids:
        batch[:, 3] = 0
    with torch.no_grad():
        net[1].weight.add_(torch.randn(4))
    return _fitted(net, ids)


@model()
def tied() -> Course:
    def forward(net: Any, ids: Tensor) -> Tensor:
        return nn.functional.linear(net.table(ids).tanh(), net.table.weight)

    ids = [torch.randint(9, (n, 6)) for n in (5, 3)]
    return _fitted(Net(forward, table=nn.Embedding(9, 4)), ids)


@model()
def time_major() -> Course:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(net.a(x.transpose(0, 1)).tanh()).transpose(0, 1)

    net = Net(forward, a=nn.Linear(4, 7), b=nn.Linear(7, 3))
    return _fitted(net, _randoms(5, 3, shape=(6, 4)))


@model()
def flipped() -> Course:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(net.a(x.flip(0)).tanh()).flip(0)

    return _fitted(Net(forward, a=nn.Linear(4, 7), b=nn.Linear(7, 3)), _randoms(6, 5))


@model()
def by_length() -> Course:
    """Sorted, and back: in order in the first batch."""

    def forward(net: Any, x: Tensor, key: Tensor) -> Tensor:
        order = key.argsort(descending=True, stable=True)
        return net.b(net.a(x[order]).tanh())[order.argsort()]

    keys = [torch.tensor([4, 3, 2, 1, 0]), torch.tensor([0, 4, 1, 3, 2])]
    net = Net(forward, a=nn.Linear(4, 7), b=nn.Linear(7, 3))
    return _fitted(net, list(zip(_randoms(5, 5), keys, strict=True)))


@model()
def mixture() -> Course:
    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.einsum("t,ntd->nd", net.mix.softmax(0), x.tanh())

    return _fitted(Net(forward, mix=param(6)), _randoms(5, 3, shape=(6, 4)))


@model(torch.float32)
def lstm() -> Course:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(net.lstm(x)[0])

    net = Net(forward, lstm=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 2))
    return _fitted(net, _randoms(5, 3, shape=(6, 3)))


@model()
def coupled() -> Course:
    net = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    found = _fitted(net, _randoms(6, 5))
    net.train()
    return found._replace(coupling="own-loss")


@model()
def four() -> Course:
    """As many samples as every layer has inputs and outputs."""
    return _fitted(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), _randoms(4, 4))


@model()
def gru() -> Course:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(net.gru(x)[0])

    net = Net(forward, gru=nn.GRU(3, 4, batch_first=True), head=nn.Linear(4, 2))
    return _fitted(net, _randoms(4, 3, shape=(5, 3)))
