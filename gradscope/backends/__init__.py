"""Floor 3: the ways to get every sample's gradient."""

from gradscope.backends import hooks, loop, vmap
from gradscope.backends.base import Backend, Evaluate, backends

__all__ = ["Backend", "Evaluate", "backends", "hooks", "loop", "vmap"]
