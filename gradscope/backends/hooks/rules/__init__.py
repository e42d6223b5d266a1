"""Node rules: fast exact ways for the operations in which parameters usually meet samples."""

from gradscope.backends.hooks.rules import layers, recurrent
from gradscope.backends.hooks.rules.base import Rule, Site, masked, node_rules

__all__ = ["Rule", "Site", "layers", "masked", "node_rules", "recurrent"]
