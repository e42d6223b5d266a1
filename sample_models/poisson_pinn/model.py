"""A smooth network u(x, y) on the unit square."""

from torch import nn


def build(width: int = 32, depth: int = 3) -> nn.Module:
    """Build the network: points (n, 2) -> values u (n, 1).

    Args:
        width: Units of a hidden layer.
        depth: Number of hidden layers, each followed by tanh.
    """
    layers: list[nn.Module] = [nn.Linear(2, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1))
