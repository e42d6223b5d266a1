"""The part of a training script that trains when the script is imported, found in its tree.

Importing such a script would train anew and overwrite the checkpoint it saves.
"""

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_FIT = {"fit", "train", "run"}  # methods of a trainer that train
_DEPTH = 3  # how many imports in a row are followed


def without_training(tree: ast.Module, path: Path) -> tuple[ast.Module, int | None]:
    """Return a script without its training, and the line of its first statement that trains.

    The line is None if the script does not train.

    From the first statement that trains, only definitions and imports are left. A statement trains
    if it calls `backward()`, or names a function or calls a method that does.

    Args:
        tree: The script.
        path: Its file. Functions that it imports from files in its folder are followed.
    """
    functions, methods = _training_names(tree, path)
    trainers = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and _name_of_call(node.value).endswith("Trainer")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for k, node in enumerate(tree.body):
        if isinstance(node, _DEFINITION) or _is_main(node):
            continue
        if _trains(node, functions, methods, trainers):
            later = [_tried(n) for n in tree.body[k:] if isinstance(n, _DEFINITION)]
            made = ast.Module([*tree.body[:k], *later], tree.type_ignores)
            return ast.fix_missing_locations(made), node.lineno
    return tree, None


def trains(tree: ast.Module) -> bool:
    """Whether a script calls `backward()`, or holds the step of a training by Lightning."""
    return _trains(tree, set(), set(), set()) or any(
        isinstance(node, ast.FunctionDef) and node.name == "training_step"
        for node in ast.walk(tree)
    )


def _training_names(tree: ast.Module, path: Path, depth: int = 0) -> tuple[set[str], set[str]]:
    """Return the names of functions of a script that train, and the names of such methods."""
    functions, methods = set(_imported(tree, path, depth)), set[str]()
    inside = {
        id(method)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
    }
    own = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    before = -1
    while len(functions) + len(methods) > before:  # a function may call another one that trains
        before = len(functions) + len(methods)
        for node in own:
            if _trains(node, functions, methods, set()):
                (methods if id(node) in inside else functions).add(node.name)
    return functions, methods - {"__init__", "forward"}


def _imported(tree: ast.Module, path: Path, depth: int) -> Iterator[str]:
    """Yield the names of imported functions that train, of files in the script's folder."""
    for node in tree.body if depth < _DEPTH else ():
        if isinstance(node, ast.ImportFrom) and node.module:
            file = path.parent.joinpath(*node.module.split(".")).with_suffix(".py")
            with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                found, _ = _training_names(ast.parse(file.read_bytes()), file, depth + 1)
                yield from (a.asname or a.name for a in node.names if a.name in found)


def _trains(node: ast.AST, functions: set[str], methods: set[str], trainers: set[str]) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in functions:
            return True
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            called, of = inner.func.attr, inner.func.value
            if called == "backward" or called in methods:
                return True
            if called in _FIT and isinstance(of, ast.Name) and of.id in trainers:
                return True
    return False


def _name_of_call(node: ast.expr) -> str:
    """Return the last name of what is called, "" if nothing is."""
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", None) or getattr(called, "id", None) or ""


def _is_main(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__"`."""
    return isinstance(node, ast.If) and any(
        isinstance(inner, ast.Name) and inner.id == "__name__" for inner in ast.walk(node.test)
    )


def _tried(node: ast.stmt) -> ast.stmt:
    """Let a definition that needs what the training would have made be left out."""
    handler = ast.ExceptHandler(ast.Name("NameError", ast.Load()), None, [ast.Pass()])
    made = ast.Try([node], [handler], [], [])
    return ast.copy_location(made, node)
