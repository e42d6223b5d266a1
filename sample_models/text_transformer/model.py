"""A character-level transformer with tied input and output embeddings."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the layers for `width` features, split over `heads` heads."""
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attend(self, hidden: Tensor) -> Tensor:
        """Mix earlier positions into later ones: (n, t, d) -> (n, t, d)."""
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (n, heads, t, d / heads)
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        merged: Tensor = self.merge(mixed.transpose(1, 2).flatten(2))
        return merged

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the block: (n, t, d) -> (n, t, d)."""
        hidden = hidden + self.attend(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


class Transformer(nn.Module):
    """Token and position embeddings, blocks, and the token embedding again as the output layer."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        """Make `depth` blocks for sequences of at most `length` characters."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.05)
        nn.init.normal_(self.positions.weight, std=0.05)

    def forward(self, characters: Tensor) -> Tensor:
        """Predict each next character: characters (n, t), int64 -> logits (n, t, v)."""
        positions = torch.arange(characters.shape[1], device=characters.device)  # (t,)
        hidden = self.blocks(self.tokens(characters) + self.positions(positions))
        logits: Tensor = functional.linear(self.norm(hidden), self.tokens.weight)
        return logits


def build(
    vocabulary: int = 96, length: int = 64, width: int = 64, heads: int = 4, depth: int = 2
) -> nn.Module:
    """Build the network: characters (n, t), int64 -> logits (n, t, v).

    Args:
        vocabulary: Number of characters v.
        length: Longest sequence t.
        width: Features d of a position.
        heads: Attention heads, a divisor of `width`.
        depth: Number of blocks.
    """
    return Transformer(vocabulary, length, width, heads, depth)
