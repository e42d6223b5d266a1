"""Whose code raised: the innermost layer of a model on an exception's traceback."""

import importlib
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from gradscope.core.batch import Batch
from gradscope.core.hints import hint
from gradscope.core.shortage import is_shortage
from gradscope.core.stops import is_stop
from gradscope.errors import GradscopeError, ModelError


def layer_of(error: BaseException, model: nn.Module) -> str | None:
    """Return the name of the innermost layer whose method was running when `error` was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = names.get(id(frame.f_locals.get("self")))
        found = found if name is None else name
    if not found:
        return None
    return f"layer {found!r} ({type(model.get_submodule(found)).__name__})"


def first_line(error: BaseException) -> str:
    """Return the exception's type and the first line of its message."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # a user's exception may be broken, too
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def own_lines(error: BaseException, limit: int = 8) -> str:
    """Return the user's part of a traceback, as Python prints it; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _is_machinery(frame.filename)]
    return "".join(traceback.format_list(theirs[-limit:])).rstrip()


def _is_machinery(file: str) -> bool:
    imports = file.startswith("<frozen importlib") or file == importlib.__file__
    return imports or any(Path(file).is_relative_to(package) for package in _PACKAGES)


_OURS = Path(__file__).parents[1]
_PACKAGES = (_OURS, Path(torch.__file__).parent)
_INSTALLED = {Path(sysconfig.get_path(k)) for k in ("stdlib", "platstdlib", "purelib", "platlib")}
_SITES = {"site-packages", "dist-packages"}


def is_installed(file: Path) -> bool:
    """Whether a file is part of Python, of a package that was installed, or of ours."""
    if not file.is_absolute() or not _SITES.isdisjoint(file.parts):
        return True
    return any(file.is_relative_to(place) for place in (*_PACKAGES, *_INSTALLED))


def is_users(error: BaseException) -> bool:
    """Whether the user's code raised, and not ours: by the last frame that is either's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(_OURS):
            return False
        if not is_installed(file):
            return True
    return False


def raised(error: BaseException) -> str:
    """Return what the user's code did."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    return f"raised {first_line(error)}"


@contextmanager
def user_code(model: nn.Module, batch: Batch | None = None) -> Iterator[None]:
    """Turn what the user's model or loss raises into a `ModelError` that names layer or sample.

    sys.exit is as good as an error, and so is a `KeyboardInterrupt` that is no Ctrl-C.

    Running out of memory is not the model's fault and passes through unchanged.

    Args:
        model: Whose layers there are.
        batch: What it is given.
    """
    try:
        yield
    except GradscopeError:
        raise
    except BaseException as error:
        if is_stop(error) or is_shortage(error):
            raise
        sample, remedy = hint(error, batch)
        lines = own_lines(error, 3)
        raise ModelError(
            f"the model or its loss {raised(error)}",
            where=", ".join(filter(None, (layer_of(error, model), sample))) or None,
            remedy=f"{remedy}\nIt came from:\n{lines}" if lines else remedy,
        ) from error


@contextmanager
def own_stage(what: str) -> Iterator[None]:
    """Turn what a stage of the user's raises into a `ModelError`; see `user_code`.

    Args:
        what: Such as "transform soft_threshold".
    """
    try:
        yield
    except GradscopeError:
        raise
    except BaseException as error:
        if is_stop(error) or is_shortage(error):
            raise
        lines = own_lines(error, 3)
        remedy = f"It came from:\n{lines}" if lines else None
        raise ModelError(f"your code {raised(error)}", where=what, remedy=remedy) from error
