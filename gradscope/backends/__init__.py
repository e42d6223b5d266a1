"""The ways to get every sample's gradient."""

from gradscope.backends import expand, hooks, loop, vmap
from gradscope.backends.base import Backend, Evaluate, backends

__all__ = ["Backend", "Evaluate", "backends", "expand", "hooks", "loop", "vmap"]
