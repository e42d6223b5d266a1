"""`auto`: which backends to try, in which order.

The graph-reading backend keeps structure and needs one backward pass; the others are there for what
it refuses. Whoever binds them proves the first answer (the certificate) and goes on to the next
candidate when a backend refuses or a proof fails.
"""

from gradscope.backends.base import backends

AUTO = "auto"

_ORDER = ("hooks", "vmap", "expand", "loop")


def candidates(name: str) -> tuple[str, ...]:
    """Return the backends to try for a chosen name: for `auto`, fastest first.

    Raises:
        SpecError: No backend has this name.
    """
    if name == AUTO:
        return tuple(candidate for candidate in _ORDER if candidate in backends)
    backends.get(name)
    return (name,)
