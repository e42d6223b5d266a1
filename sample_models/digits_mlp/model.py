"""A multilayer perceptron for 8x8 digits."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def build(hidden: Sequence[int] = (64, 32)) -> nn.Module:
    """Build the network: images (n, 64) -> logits (n, 10).

    Args:
        hidden: Widths of the hidden layers, each followed by tanh.
    """
    widths = [64, *hidden]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))
