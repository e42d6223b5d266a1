"""Functions of the C library that Python does not offer, where there are any."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache


@cache
def function(name: str, *arguments: type) -> Callable[..., int] | None:
    """Return a function of Linux' C library; a call lets go of the GIL and sets ctypes' errno.

    Args:
        name: Its name.
        arguments: The ctypes of its arguments.

    Returns:
        The function, or None on another system or where the library lacks it.
    """
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if found is not None:
        found.argtypes = arguments
    return found
