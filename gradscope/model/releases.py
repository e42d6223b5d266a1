"""Releases of torch: which were tested, and what one must be like before it is relied on.

Some of what gradscope reads torch documents for inspection but does not promise. What reads such
things has a probe: a function that uses each of them once, on a few numbers, and raises where it is
not what it was. It runs when it is first needed; where it fails, a backend refuses, and `auto` goes
on with the next one, which says so in its notes.
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
    """Return a notice where this torch is older or newer than those that were tested."""
    release = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if OLDEST <= release <= NEWEST:
        return None
    return (
        f"gradscope was tested with torch {TESTED}, not with {torch.__version__}: what it needs of "
        "it is tried first, and what it answers is proved as ever"
    )


def require(who: str, probe: Callable[[], None]) -> None:
    """Refuse what has a probe, such as "the hooks backend", where it fails; each runs once.

    Raises:
        UnsupportedError: It fails with this torch.
    """
    reason = _failure(probe)
    if reason is not None:
        raise torch_changed(who, reason)


def torch_changed(who: str, reason: str) -> UnsupportedError:
    """Return the refusal of what knows torch otherwise than it is."""
    return UnsupportedError(
        f"torch {torch.__version__} is not as {who} knows it ({reason}); "
        f"gradscope was tested with torch {TESTED}",
        remedy="Install one of these. Where another backend can do it, auto takes that one.",
    )


def missing_name(error: BaseException) -> UnsupportedError | None:
    """Return the refusal where a module of ours, as it is loaded, misses a name of another torch.

    None where it is something else, or with a torch that was tested: a bug of ours.
    """
    files = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_OURS)]
    loading = bool(files) and files[-1].name == "<module>"
    if not loading or not isinstance(error, ImportError | AttributeError) or untested() is None:
        return None
    return torch_changed("gradscope", str(error))


def expect(read: Mapping[str, tuple[Any, Any]]) -> None:
    """Compare what a probe has read of torch, by name, with what it should have: (found, wanted).

    Raises:
        RuntimeError: One is different.
    """
    for name, (found, wanted) in read.items():
        if found != wanted:
            raise RuntimeError(f"{name} is {found!r}, not {wanted!r}")


@cache
def _failure(probe: Callable[[], None]) -> str | None:
    try:
        with torch.inference_mode(False), torch.enable_grad():
            probe()
    except Exception as error:  # whatever another torch raises
        if is_machine_error(error):
            raise
        from gradscope.model.locate import first_line  # needs more of torch than this file does

        return first_line(error)
    return None
