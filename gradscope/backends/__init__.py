"""Floor 3: the ways to get every sample's gradient."""

from gradscope.backends import loop
from gradscope.backends.base import Backend, Evaluate, backends

__all__ = ["Backend", "Evaluate", "backends", "loop"]
