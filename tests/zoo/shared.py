"""Weights used more than once, computed from others, frozen or not used at all."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import parametrizations

from tests.zoo.base import N, Net, Setup, case, param, program, regression, smooth


@case()
def tied_embedding_and_output() -> Setup:
    def forward(net: nn.Module, ids):
        return net.out(net.inner(net.table(ids)).tanh())

    model = Net(
        forward, table=nn.Embedding(9, 4), inner=nn.Linear(4, 4), out=nn.Linear(4, 9, bias=False)
    )
    model.out.weight = model.table.weight
    ids = torch.randint(0, 9, (N, 6))
    return Setup(model, smooth, ids, torch.randn(N, 6, 9))


@program(lambda: ({"a": nn.Linear(4, 7), "bias": param(4)}, torch.randn(N, 4)))
def tied_transposed_autoencoder(net, x):
    return F.linear(net.a(x).tanh(), net.a.weight.T, net.bias)


@program(
    lambda: ({"a": nn.Linear(4, 7), "b": nn.Linear(7, 3)}, (torch.randn(N, 4), torch.randn(N, 4)))
)
def siamese_stacked_along_the_batch(net, x, z):
    both = net.b(net.a(torch.cat([x, z])).tanh())
    first, second = both.chunk(2)
    return first * second.sigmoid()


@program(lambda: ({"a": nn.Linear(4, 7), "mix": param(4, 7)}, torch.randn(N, 6, 4)))
def weights_used_functionally_and_called(net, x):
    return net.a(x).tanh() + F.linear(x.sin(), net.a.weight.square()) @ net.a.weight @ net.mix


@case()
def one_module_under_two_names() -> Setup:
    layer = nn.Linear(4, 4)
    return regression(nn.Sequential(layer, nn.Tanh(), layer, nn.Sigmoid()), torch.randn(N, 4))


@case()
def weight_norm_by_parametrization() -> Setup:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 7)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Linear(7, 3), dim=None),
    )
    return regression(model, torch.randn(N, 6, 4))


@case()
def weight_norm_by_hook() -> Setup:
    class Normed(nn.Linear):
        """What torch.nn.utils.weight_norm does: the weight is recomputed before each call."""

        def __init__(self) -> None:
            super().__init__(4, 7)
            weight = self.weight.detach()
            del self.weight
            self.weight_g = nn.Parameter(weight.norm(dim=1, keepdim=True))
            self.weight_v = nn.Parameter(weight.clone())
            self.register_forward_pre_hook(Normed.compute)

        @staticmethod
        def compute(module: nn.Module, _: object) -> None:
            module.weight = torch._weight_norm(module.weight_v, module.weight_g, 0)

        def __getstate__(self) -> dict[str, object]:  # what was computed is not copied
            return {k: v for k, v in self.__dict__.items() if k != "weight"}

    return regression(nn.Sequential(Normed(), nn.Tanh(), nn.Linear(7, 3)), torch.randn(N, 6, 4))


@case()
def spectral_norm_in_eval_mode() -> Setup:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 7)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(7, 3)),
    )
    return regression(model, torch.randn(N, 4))


@case()
def orthogonal() -> Setup:
    model = nn.Sequential(
        parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(4, 3), orthogonal_map="matrix_exp"),
    )
    return regression(model, torch.randn(N, 4))


@program(
    lambda: (
        {"base": torch.randn(7, 4), "up": param(7, 2), "down": param(2, 4)},
        torch.randn(N, 6, 4),
    )
)
def low_rank_adapter_merged(net, x):
    return F.linear(x, net.base + net.up @ net.down).tanh()


@case()
def frozen_layers() -> Setup:
    model = nn.Sequential(
        nn.Linear(4, 7).requires_grad_(False),
        nn.Tanh(),
        nn.Linear(7, 6),
        nn.Tanh(),
        nn.Linear(6, 3).requires_grad_(False),
    )
    model[4].bias.requires_grad_(True)
    return regression(model, torch.randn(N, 4))


@program(
    lambda: ({"a": nn.Linear(4, 7), "never": nn.Linear(3, 2), "dead": param(7)}, torch.randn(N, 4))
)
def unused_parameters(net, x):
    return net.a(x).tanh() + net.dead.detach()


@program(lambda: ({"a": nn.Linear(4, 7)}, torch.randn(N, 4)))
def loss_reaches_no_parameter(net, x):
    return net.a(x).detach() * x[:, :1]


@program(lambda: ({"a": nn.Linear(4, 7)}, torch.randn(N, 4)))
def samples_that_reach_no_parameter(net, x):
    return net.a(x).tanh() * (x[:, :1] > 0)


@program(lambda: ({"maker": nn.Linear(2, 12)}, (torch.randn(N, 6, 4), torch.randn(N, 2))))
def hypernetwork(net, x, code):
    w = net.maker(code).reshape(-1, 4, 3)  # a weight of its own for every sample
    return torch.bmm(x, w.tanh())
