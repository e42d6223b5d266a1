"""The ways to get every sample's gradient."""

from gradscope.backends import expand, hooks, loop, vmap
from gradscope.backends.base import (
    AUTO,
    PROVED,
    ROWS,
    Backend,
    Evaluate,
    Request,
    backend_of,
    backends,
    candidates,
    own_loss_backends,
)

__all__ = [
    "AUTO",
    "PROVED",
    "ROWS",
    "Backend",
    "Evaluate",
    "Request",
    "backend_of",
    "backends",
    "candidates",
    "expand",
    "hooks",
    "loop",
    "own_loss_backends",
    "vmap",
]
