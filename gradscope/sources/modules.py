"""What code of the user's a run depends on: a named file and the modules that it imports.

Followed are the imports that stand in the source, also within functions that have not run yet, and
modules that were loaded along with the file in any other way. They lie in the file's own folder and
below; elsewhere, a module counts where it is loaded already and is not one that was installed.
"""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from gradscope.core.locate import is_installed

_IMPORTERS = {"import_module", "__import__"}


def digests(file: Path, folder: Path, loaded: Iterable[Path] = ()) -> dict[str, str]:
    """Return the SHA-256 of a file and of what it imports, {place below the folder: digest}.

    What lies elsewhere goes by the name of its module: nothing depends on where a folder is.

    Args:
        file: The file that was named.
        folder: Where its imports are looked up first.
        loaded: Other files that it has loaded.
    """
    found: dict[str, str] = {}
    waiting = {file: ""} | {path: "" for path in loaded if _is_below(path, folder)}
    while waiting:
        path, module = waiting.popitem()
        place = module or path.relative_to(folder).as_posix()
        content = None if place in found else _content(path)
        if content is not None:
            found[place] = hashlib.sha256(content).hexdigest()
            own = module.split(".") if module else []
            for name, level in _imports(content):
                waiting |= dict(_files(name, level, path, folder, own))
    return dict(sorted(found.items()))


def files_of(names: Iterable[str]) -> set[Path]:
    """Return the files of some loaded modules, those that were installed left out."""
    places = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    found = {Path(place) for place in places if isinstance(place, str)}
    return {path for path in found if not is_installed(path)}


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:  # a module that something other than a file holds
        return None


def _imports(content: bytes) -> Iterator[tuple[str, int]]:
    """Yield the dotted names that a source imports, and the dots in front of them.

    Of `from a import b` both `a` and `a.b`, since b may be a module.
    """
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # or no Python at all
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = [node.module] if node.module else []
            names = [".".join([*above, alias.name]) for alias in node.names]
            yield from ((name, node.level) for name in (*above, *names))
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            first = node.args[0]
            text = first.value if isinstance(first, ast.Constant) else None
            if called in _IMPORTERS and isinstance(text, str):
                yield text.lstrip("."), len(text) - len(text.lstrip("."))


def _files(
    name: str, level: int, path: Path, folder: Path, own: list[str]
) -> Iterator[tuple[Path, str]]:
    """Yield the files that an import runs, and what they are called where they lie elsewhere.

    Args:
        name: What is imported.
        level: The dots in front of it.
        path: The file that imports it.
        folder: That of the named file.
        own: The name of the importing module, in parts, where it lies elsewhere.
    """
    if level:
        root = path.parents[min(level, len(path.parents)) - 1]
        package = own if path.stem == "__init__" else own[:-1]
        known = package[: len(package) + 1 - level]
        for depth, file in _places(name, root):
            parts = [*known, *name.split(".")[:depth]]
            if own or _is_below(file, folder):
                yield file, ".".join(parts) if own else ""
        return
    if not _is_the_librarys(name, folder):
        roots = [folder, *(p for p in map(Path, sys.path) if p != folder and _is_below(p, folder))]
        places = (file for root in roots for _, file in _places(name, root))
        inside = [file for file in places if _is_below(file, folder)]
        yield from ((file, "") for file in inside)
        if not inside:
            parts = name.split(".")
            for k in range(1, len(parts) + 1):
                module = ".".join(parts[:k])
                yield from ((f, "" if _is_below(f, folder) else module) for f in files_of([module]))


def _places(name: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Yield the files below a folder that importing a dotted name runs: part from 1, and file."""
    for depth, part in enumerate(name.split("."), 1):
        module, package = root / f"{part}.py", root / part
        if (package / "__init__.py").is_file():
            yield depth, package / "__init__.py"
        elif module.is_file():
            yield depth, module
            return
        root = package


def _is_the_librarys(name: str, folder: Path) -> bool:
    """Whether a module of Python's own hides one of the folder that is called alike."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names and not any(
        _is_below(file, folder) for file in files_of([top])
    )


def _is_below(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder) and not is_installed(path)
