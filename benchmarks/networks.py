"""The models of the benchmark, in plain torch."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, out)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.GroupNorm(groups, out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, channels, height, width) to (n, out, height / stride, width / stride)."""
        inner = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out: Tensor = self.relu(inner + self.shortcut(x))
        return out


class ResNet(nn.Module):
    """A residual network with four stages, ResNet-18 with two blocks a stage."""

    def __init__(self, width: int, blocks: int, groups: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(groups, width)
        self.relu = nn.ReLU()
        stages: list[nn.Module] = []
        channels = width
        for stage in range(4):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                stages.append(ResidualBlock(channels, width * 2**stage, stride, groups))
                channels = width * 2**stage
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (n, 3, height, width) to logits (n, classes)."""
        features: Tensor = self.stages(self.relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, t, width) to (n, t, width)."""
        n, t, width = x.shape
        parts = self.qkv(x).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return out


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, t, width) to (n, t, width)."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A decoder-only transformer.

    Positions are repeated for each sample: Opacus is wrong on those without a sample axis.
    """

    def __init__(self, depth: int, width: int, length: int, vocabulary: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (n, t) to logits (n, vocabulary, t)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        x = self.blocks(self.tokens(tokens) + self.positions(positions))
        logits: Tensor = self.head(self.norm(x))
        return logits.transpose(1, 2)


class Recurrent(nn.Module):
    """An LSTM and a linear layer on its last state."""

    def __init__(self, inputs: int, hidden: int, classes: int = 10) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, t, inputs) to logits (n, classes)."""
        logits: Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


class RawAndTied(nn.Module):
    """Parameters without a layer, an embedding that is the output matrix too, a reused matrix."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)  # logits of size 1: else denormals
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        self.mix = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.gain = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (n, t) to logits (n, vocabulary, t)."""
        x = self.tokens(tokens) + self.positions
        x = x + self.gain * torch.tanh(x @ self.mix)
        x = x + self.gain * torch.tanh(x @ self.mix)
        return F.linear(x, self.tokens.weight, self.bias).transpose(1, 2)
