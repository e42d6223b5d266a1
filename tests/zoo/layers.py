"""Convolutions, normalisation layers and other standard layers."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.zoo.base import N, Setup, case, program, regression


@case()
def conv2d_groups() -> Setup:
    model = nn.Sequential(
        nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 1), groups=2),
        nn.Tanh(),
        nn.Conv2d(6, 6, 3, dilation=(1, 2), groups=6, padding=1),
        nn.Flatten(),
    )
    return regression(model, torch.randn(N, 4, 7, 8))


@case()
def conv2d_reflect_pool_classify() -> Setup:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 3, 2, padding="valid"),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(2),
    )
    return regression(model, torch.randn(N, 1, 8, 7))


@case()
def conv_transpose2d() -> Setup:
    model = nn.Sequential(
        nn.ConvTranspose2d(3, 4, (3, 2), stride=(2, 1), dilation=(1, 2)), nn.Tanh()
    )
    return regression(model, torch.randn(N, 3, 4, 6))


@program(lambda: ({"a": nn.Conv2d(2, 3, 3)}, torch.randn(N, 2, 8, 7)))
def conv_shared_over_scales(net, x):
    fine = net.a(x).tanh()
    coarse = net.a(F.avg_pool2d(x, 2)).tanh()
    return torch.cat([fine.flatten(1), coarse.flatten(1)], 1)


@program(lambda: ({"a": nn.Conv2d(2, 3, 3)}, torch.randn(N, 3, 2, 4, 6)))
def conv_samples_and_frames_merged(net, x):
    n, t = x.shape[:2]
    return net.a(x.flatten(0, 1)).tanh().unflatten(0, (n, t)).mean(1)


@program(lambda: ({"a": nn.Linear(18, 4)}, torch.randn(N, 2, 4, 6)))
def unfold_and_linear(net, x):
    return net.a(F.unfold(x, 3).transpose(1, 2)).tanh()


@case()
def group_norm() -> Setup:
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.Tanh(), nn.GroupNorm(1, 6))
    return regression(model, torch.randn(N, 2, 4, 6))


@case(train=True)
def instance_norm_in_train_mode() -> Setup:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.Tanh())
    return regression(model, torch.randn(N, 2, 4, 6))


@case()
def activations() -> Setup:
    names = ["ELU", "SiLU", "Softplus", "Mish", "GELU", "LeakyReLU", "Hardswish", "SELU"]
    layers = [layer for name in names for layer in (nn.Linear(4, 4), getattr(nn, name)())]
    return regression(nn.Sequential(*layers, nn.Linear(4, 3), nn.LogSoftmax(1)), torch.randn(N, 4))


@case()
def gated_and_upsampled() -> Setup:
    model = nn.Sequential(
        nn.Conv1d(3, 8, 3),
        nn.GLU(dim=1),
        nn.Upsample(scale_factor=2, mode="linear"),
        nn.ConstantPad1d((1, 2), 0.5),
        nn.Conv1d(4, 2, 3),
    )
    return regression(model, torch.randn(N, 3, 7))


@program(
    lambda: (
        {
            "conv1": nn.Conv2d(2, 4, 3, padding=1, bias=False),
            "norm1": nn.BatchNorm2d(4),
            "conv2": nn.Conv2d(4, 6, 3, padding=1, bias=False),
            "norm2": nn.BatchNorm2d(6),
            "skip": nn.Conv2d(2, 6, 1),
            "head": nn.Linear(6, 3),
        },
        torch.randn(N, 2, 7, 8),
    )
)
def residual_network(net, x):
    h = F.relu(net.norm1(net.conv1(x)))
    h = F.relu(net.norm2(net.conv2(h)) + net.skip(x))
    return net.head(F.adaptive_avg_pool2d(h, 1).flatten(1))
