"""`auto`: which backends to try, in which order.

The graph-reading backend keeps structure and needs one backward pass; the others are there for what
it refuses. Whoever binds them proves the first answer (the certificate) and goes on to the next
candidate when a backend refuses or a proof fails.
"""

from gradscope.backends.base import backends
from gradscope.backends.joint import own_loss_backends
from gradscope.core.registry import suggestion
from gradscope.errors import SpecError

AUTO = "auto"

_ORDER = ("hooks", "vmap", "expand", "loop")


def candidates(name: str, *, own_loss: bool = False) -> tuple[str, ...]:
    """Return the backends to try for a chosen name: for `auto`, fastest first.

    Args:
        name: A backend's name, or `auto`.
        own_loss: Coupled samples are to get the gradients of their own losses.

    Raises:
        SpecError: No backend (that can do this) has this name.
    """
    registry = own_loss_backends if own_loss else backends
    if name == AUTO:
        return tuple(candidate for candidate in _ORDER if candidate in registry)
    if name not in registry:
        known = suggestion(name, [AUTO, *registry.names()])
        raise SpecError(f"unknown {registry.kind} {name!r}", remedy=known)
    return (name,)
