"""Node rules: fast exact ways for the operations in which parameters usually meet samples."""

from gradscope.backends.hooks.rules import (
    broadcast,
    convolution,
    embedding,
    linear,
    normalization,
    recurrent,
)
from gradscope.backends.hooks.rules.base import Rule, Site, masked, node_rules

__all__ = [
    "Rule",
    "Site",
    "broadcast",
    "convolution",
    "embedding",
    "linear",
    "masked",
    "node_rules",
    "normalization",
    "recurrent",
]
