"""Samples that depend on each other: "sample i's gradient" has no single meaning here."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.zoo.base import N, Net, Setup, case, program, regression


@case(coupled=True, train=True)
def coupled_batch_norm_in_train_mode() -> Setup:
    model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    return regression(model, torch.randn(N, 4))


@case(coupled=True, train=True)
def coupled_batch_norm_of_images() -> Setup:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh())
    return regression(model, torch.randn(N, 2, 4, 6))


@case(coupled=True)
def coupled_batch_norm_without_running_statistics() -> Setup:
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    return regression(nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.Tanh()), torch.randn(N, 2, 4, 6))


@case(coupled=True)
def coupled_contrastive_loss() -> Setup:
    def loss(outputs: tuple[Tensor, Tensor], targets: None) -> Tensor:
        a, b = (F.normalize(o, dim=1) for o in outputs)
        return F.cross_entropy(
            a @ b.T / 0.3, torch.arange(len(a), device=a.device), reduction="none"
        )

    model = Net(lambda net, x, z: (net.a(x), net.a(z)), a=nn.Linear(4, 7))
    return Setup(model, loss, (torch.randn(N, 4), torch.randn(N, 4)), None)


@program(lambda: ({"a": nn.Linear(4, 7), "b": nn.Linear(7, 3)}, torch.randn(N, 4)), coupled=True)
def coupled_by_the_detached_batch_mean(net, x):
    h = net.a(x)
    return net.b(h - h.mean(0).detach()).tanh()


@case(coupled=True)
def coupled_by_attention_over_the_batch() -> Setup:
    """A sequence-first layer that is given a batch-first input."""
    layer = nn.TransformerEncoderLayer(4, 2, 7, batch_first=False)
    return regression(layer, torch.randn(N, 6, 4))
