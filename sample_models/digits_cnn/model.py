"""A small convolutional network: strided and grouped convolutions, GroupNorm, in-place ReLU."""

from torch import Tensor, nn


class DigitsCNN(nn.Module):
    """Three convolutions and a linear head."""

    def __init__(self, width: int) -> None:
        """Make the layers; `width` channels first, twice as many after the stride."""
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(inplace=True),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=4),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(inplace=True),
        )
        self.head = nn.Linear(2 * width * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Classify: images (n, 1, 8, 8) -> logits (n, 10)."""
        logits: Tensor = self.head(self.features(images).flatten(1))
        return logits


def build(width: int = 16) -> nn.Module:
    """Build the network: images (n, 1, 8, 8) -> logits (n, 10).

    Args:
        width: Channels of the first convolution, a multiple of 4.
    """
    return DigitsCNN(width)
