"""Releases of torch: the tested ones, and checks of torch's unpromised interfaces.

gradscope uses some parts of torch that are documented only for inspection. Code that uses them has
a probe: a function that uses each of them once, on a few numbers, and raises if one has changed. It
runs at the first use. If it fails, the backend raises. `auto` then continues with the next backend
and says so in its notes.
"""

import re
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gradscope.errors import UnsupportedError
from gradscope.process.shortage import is_machine_error

OLDEST, NEWEST = (2, 8), (2, 15)
_OURS = str(Path(__file__).parents[1])
TESTED = " to ".join(".".join(map(str, release)) for release in (OLDEST, NEWEST))


def untested() -> str | None:
    """Return a notice if this torch is older or newer than the tested releases."""
    release = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if OLDEST <= release <= NEWEST:
        return None
    return (
        f"gradscope was tested with torch {TESTED}, not with {torch.__version__}. It checks the "
        "interfaces of torch that it needs before it uses them, and proves its results as usual"
    )


def require(who: str, probe: Callable[[], None]) -> None:
    """Raise if the probe of `who`, such as "the hooks backend", fails; each probe runs once.

    Raises:
        UnsupportedError: The probe fails with this torch.
    """
    reason = _failure(probe)
    if reason is not None:
        raise torch_changed(who, reason)


def torch_changed(who: str, reason: str) -> UnsupportedError:
    """Return the error for code that does not work with this torch."""
    return UnsupportedError(
        f"{who} does not support torch {torch.__version__} ({reason}); gradscope was tested with "
        f"torch {TESTED}",
        remedy='Install a tested release of torch, or use backend="auto".',
    )


def missing_name(error: BaseException) -> UnsupportedError | None:
    """Return the error for an import of gradscope that misses a name in an untested torch.

    Returns None for other errors, and with a tested torch, where a missing name is a bug.
    """
    files = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_OURS)]
    loading = bool(files) and files[-1].name == "<module>"
    if not loading or not isinstance(error, ImportError | AttributeError) or untested() is None:
        return None
    return torch_changed("gradscope", str(error))


def expect(read: Mapping[str, tuple[Any, Any]]) -> None:
    """Compare values that a probe read from torch with expected values: {name: (found, wanted)}.

    Raises:
        RuntimeError: A value differs.
    """
    for name, (found, wanted) in read.items():
        if found != wanted:
            raise RuntimeError(f"{name} is {found!r}, not {wanted!r}")


@cache
def _failure(probe: Callable[[], None]) -> str | None:
    try:
        with torch.inference_mode(False), torch.enable_grad():
            probe()
    except Exception as error:  # any exception of an unknown torch
        if is_machine_error(error):
            raise
        from gradscope.model.locate import first_line  # imports more of torch than this file

        return first_line(error)
    return None
