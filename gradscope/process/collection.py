"""Garbage collection of the command line: rare while modules are loaded, then as usual."""

import gc

_RARE = 200_000  # new objects between two collections; torch and gradscope create 1.5 million
_usual: list[tuple[int, int, int]] = []


def collect_rarely() -> None:
    """Collect garbage rarely, until `collect_as_usual`; this saves a tenth of torch's import."""
    if not _usual:
        _usual.append(gc.get_threshold())
        gc.set_threshold(_RARE)


def collect_as_usual() -> None:
    """Collect as before `collect_rarely`, but skip the objects of the modules loaded so far.

    They live until the end. A collection that visits torch's objects takes 0.1 s, and the
    interpreter's shutdown does several.
    """
    if _usual:
        gc.freeze()
        gc.set_threshold(*_usual.pop())
