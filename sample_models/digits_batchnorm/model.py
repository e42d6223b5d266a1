"""A small residual network with BatchNorm2d: meant to be read in eval mode."""

import torch
from torch import Tensor, nn


class DigitsResNet(nn.Module):
    """A stem, one residual block, a strided convolution and a linear head."""

    def __init__(self, width: int) -> None:
        """Make the layers; `width` channels first, twice as many after the stride."""
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        )
        self.down = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Classify: images (n, 1, 8, 8) -> logits (n, 10)."""
        features = self.stem(images)
        features = torch.relu(features + self.block(features))
        logits: Tensor = self.head(self.down(features).mean((2, 3)))
        return logits


def build(width: int = 16) -> nn.Module:
    """Build the network: images (n, 1, 8, 8) -> logits (n, 10).

    Args:
        width: Channels of the first convolution.
    """
    return DigitsResNet(width)
