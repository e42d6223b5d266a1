"""Linear layers and what surrounds them: extra axes, merged axes, layouts."""

import torch
from torch import nn

from tests.zoo.base import N, Setup, case, param, program, regression


def _linear(*axes: int, n: int = N) -> Setup:
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    return regression(model, torch.randn(n, *axes, 4))


@case()
def linear() -> Setup:
    return _linear()


@case()
def linear_four_extra_axes() -> Setup:
    return _linear(2, 3, 2, 6)


@case()
def linear_single_sample() -> Setup:
    return _linear(6, n=1)


@case()
def linear_all_axes_equal_samples() -> Setup:
    model = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N))
    return regression(model, torch.randn(N, N, N))


@program(lambda: ({"a": nn.Linear(4, 7), "b": nn.Linear(7, 3)}, torch.randn(N, N, 4)))
def linear_sequence_first_positions_equal_samples(net, x):
    return net.b(net.a(x.transpose(0, 1)).tanh()).mean(0)


@program(lambda: ({"a": nn.Linear(4, 7), "b": nn.Linear(7, 3)}, torch.randn(N, 6, 4)))
def linear_samples_merged_first(net, x):
    n, t, d = x.shape
    return net.b(net.a(x.reshape(n * t, d)).tanh()).reshape(n, t, -1)


@program(lambda: ({"a": nn.Linear(4, 7), "b": nn.Linear(7, 3)}, torch.randn(N, N, 4)))
def linear_samples_merged_last_positions_equal_samples(net, x):
    n, t, d = x.shape
    h = net.a(x.transpose(0, 1).reshape(t * n, d)).tanh()
    return net.b(h.reshape(t, n, -1).transpose(0, 1))


@program(lambda: ({"a": nn.Linear(4, 7), "b": nn.Linear(6, 3)}, torch.randn(N, 6, 4)))
def linear_features_before_positions(net, x):
    return net.b(net.a(x).tanh().transpose(1, 2))  # mixes positions, as a mixer does


@program(lambda: ({"w": param(7, 4), "v": param(6)}, torch.randn(N, 4, 6)))
def matmul_parameter_on_the_left(net, x):
    return (net.w @ x).tanh() @ net.v


@program(lambda: ({"w": param(7, 4), "v": param(3, 7)}, torch.randn(N, 4)))
def matrix_times_transposed_batch(net, x):
    return (net.v @ (net.w @ x.T).tanh()).T


@program(
    lambda: ({"w": param(4, 7), "c": param(7), "v": param(7, 3), "d": param(3)}, torch.randn(N, 4))
)
def addmm_and_baddbmm(net, x):
    h = torch.addmm(net.c, x, net.w, beta=0.5, alpha=1.5).tanh()
    w = net.v.unsqueeze(0).expand(len(x), -1, -1)
    return torch.baddbmm(net.d.expand(len(x), 1, 3), h.unsqueeze(1), w)
