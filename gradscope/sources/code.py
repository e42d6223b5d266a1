"""The user's own functions: "FILE.py:NAME" and "package.module:NAME".

A file is imported under a private name, so that it can hide no module and no other file of the
same name. Its folder can be imported from, first in line while the file itself is imported and
last in line afterwards. Two folders may each have, say, a `utils.py`.
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from gradscope.config import split_reference
from gradscope.core.locate import first_line, is_installed, is_users, own_lines, raised
from gradscope.core.registry import suggestion
from gradscope.core.shortage import is_shortage
from gradscope.core.stops import is_stop
from gradscope.errors import GradscopeError, ModelError, RefusedError
from gradscope.sources import modules
from gradscope.sources.listing import article

_PRIVATE = "_gradscope_"  # what names of files that are imported begin with

_neighbours: dict[str, dict[str, ModuleType]] = {}  # folder: the modules found in it, by name
_codes: dict[str, dict[str, str]] = {}  # module: the digests of its code, by file


def load_function(reference: str, kind: str) -> Callable[..., Any]:
    """Import the function that a reference names.

    Args:
        reference: "FILE.py:NAME" or "package.module:NAME"; NAME may have dots.
        kind: What it is for, in messages: "model factory", "loss".

    Raises:
        SpecError: The reference has neither form.
        ModelError: The file or function is absent, or importing it raised.
    """
    module, _, name = _load(reference, kind)
    where = f"{kind} {reference}"
    with user_file(where):  # a module may look its names up by code of its own
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
    if found is None:
        known = _functions(module)
        raise ModelError(
            f"there is no {name!r} in it",
            where=where,
            remedy=suggestion(name, known) if known else "It defines no function.",
        )
    if not callable(found):
        raise ModelError(
            f"{name!r} is {article(type(found).__name__)}, not a function",
            where=where,
            remedy=f"Name a function; it has: {', '.join(_functions(module)) or 'none'}.",
        )
    return found


def code_digests(reference: str, kind: str) -> dict[str, str]:
    """Return the SHA-256 of the code that a reference stands for, by file; see `modules.digests`.

    It is that of the files when they were imported.
    """
    _, key, _ = _load(reference, kind)
    return dict(_codes.get(key, {}))


def class_digests(names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the code of loaded modules that were not installed, by module."""
    found: dict[str, str] = {}
    for name in sorted(set(names)):
        for path in modules.files_of([name]):
            depth = name.count(".") + (path.stem == "__init__")
            found |= modules.digests(path, path.parents[min(depth, len(path.parents) - 1)])
    return found


@contextmanager
def loading(reference: str, kind: str) -> Iterator[None]:
    """Count what is imported in the body as code that a reference stands for."""
    _, key, _ = _load(reference, kind)
    with _noted(key):
        yield


@contextmanager
def user_file(what: str) -> Iterator[None]:
    """Turn what the user's file raises, sys.exit included, into a `ModelError` that shows it.

    What it prints goes to stderr, since stdout is for results.

    Args:
        what: What is running, such as "model factory model.py:build".
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except MemoryError:
        raise
    except BaseException as error:  # whatever the user's code raises
        if is_stop(error):
            raise
        raise _users(error).at(what) from error


def blamed(error: BaseException) -> GradscopeError | None:
    """Return the error for what nobody nearer to it has caught; None where it is a bug of ours."""
    if is_users(error) or isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
        return _users(error)
    if is_shortage(error):
        remedy = "Free memory, or give it less to do."
        return RefusedError(f"memory ran out: {first_line(error)}", remedy=remedy)
    return None


def _load(reference: str, kind: str) -> tuple[ModuleType, str, str]:
    """Return the module that a reference names, what it is kept under, and the name in it."""
    place, name = split_reference(reference)
    if place.endswith(".py"):
        return *_import_file(Path(place), kind), name
    return _import(place, kind), place, name


def _import_file(path: Path, kind: str) -> tuple[ModuleType, str]:
    """Import a file, and return what it is kept under; the same content is imported once."""
    path = path.absolute()
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OSError(None, "this is no regular file")
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"cannot be read: {error.strerror}", where=f"{kind} {path}", remedy="Check the path."
        ) from error
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape") + content).hexdigest()
    name = f"{_PRIVATE}{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name], name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with user_file(f"{kind} {path}"), importable(path.parent), _noted(name):
            exec(compile(content, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module, name


def _import(name: str, kind: str) -> ModuleType:
    what = f"{kind} {name}"
    with user_file(what), importable(Path.cwd()):
        try:
            with _noted(name):
                return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists and imports another one that does not
    raise ModelError(
        "there is no such module",
        where=what,
        remedy="Install it, run in the folder that holds it, or give FILE.py:NAME.",
    )


@contextmanager
def _noted(key: str) -> Iterator[None]:
    """Keep what code a module is made of, some of which is imported in the body.

    Args:
        key: The name that it has there at the end.
    """
    before = set(sys.modules)
    yield
    file = getattr(sys.modules.get(key), "__file__", None)
    fresh = modules.files_of(sys.modules.keys() - before)
    if file is not None and (fresh or key not in _codes):
        path = Path(file).absolute()
        named = key.startswith(_PRIVATE)  # the modules beside it are looked up in its own folder
        depth = 0 if named else key.count(".") + (path.stem == "__init__")
        _codes[key] = _codes.get(key, {}) | modules.digests(path, path.parents[depth], fresh)


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let modules of a folder be imported: first in line here, last in line afterwards."""
    text = str(folder)
    for other, known in _neighbours.items():
        if other != text:
            for name, module in known.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]
    mine = _neighbours.setdefault(text, {})
    sys.modules.update(mine)
    before = set(sys.modules)
    importlib.invalidate_caches()
    sys.path.insert(0, text)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code may have removed it
            sys.path.remove(text)
        if text not in sys.path:
            sys.path.append(text)
        fresh = {k: m for k, m in sys.modules.items() if k not in before}
        mine.update({k: m for k, m in fresh.items() if _is_neighbour(k, m, folder, before)})


def _is_neighbour(name: str, module: ModuleType, folder: Path, before: set[str]) -> bool:
    file = getattr(module, "__file__", None)
    new = name.partition(".")[0] not in before  # a part of what was there already is not the user's
    if not new or file is None or is_installed(Path(file)):  # an environment may lie in the folder
        return False
    return Path(file).is_relative_to(folder)


def _functions(module: ModuleType) -> list[str]:
    public = {k: v for k, v in vars(module).items() if callable(v) and not k.startswith("_")}
    own = [k for k, v in public.items() if getattr(v, "__module__", None) == module.__name__]
    return own or list(public)


def _users(error: BaseException) -> ModelError:
    return ModelError(f"your code {raised(error)}", remedy=_trace(error))


def _trace(error: BaseException) -> str:
    """Return the user's part of a traceback, below a line that says whose it is."""
    last = traceback.format_exception_only(error) if isinstance(error, SyntaxError) else []
    shown = "\n".join(filter(None, (own_lines(error), "".join(last).rstrip())))
    return f"It is yours to correct:\n{shown}" if shown else "Correct it there."
