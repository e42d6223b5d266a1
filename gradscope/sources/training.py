"""Finds and removes the statements of a training script that train during its import.

An import with these statements would train again and overwrite the script's checkpoint.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
PARSERS = {"parse_args", "parse_known_args"}
_FIT = {"fit", "train", "run"}  # methods of a trainer that train
_PLACES = 2  # the folders to search for an imported file: the script's folder, and the one above


def without_training(tree: ast.Module, path: Path) -> tuple[ast.Module, int | None]:
    """Return a script without its training, and the line of its first statement that trains.

    A script that does not train has no such line: None.

    From the first statement that trains on, only definitions and imports are kept. A statement
    trains if it calls `backward()`, names a function that trains, or calls a method that trains.

    Args:
        tree: The script.
        path: Its file. Functions imported from files in its folder, or in the folder above, are
            also analysed.
    """
    trains_here = training_in(tree, path)
    for k, node in enumerate(tree.body):
        if isinstance(node, _DEFINITION) or is_main_block(node):
            continue
        if trains_here(node):
            later = [_tried(n) for n in tree.body[k:] if isinstance(n, _DEFINITION)]
            made = ast.Module([*tree.body[:k], *later], tree.type_ignores)
            return ast.fix_missing_locations(made), node.lineno
    return tree, None


def training_in(tree: ast.Module, path: Path) -> Callable[[ast.AST], bool]:
    """Return a function that says whether a statement of a script trains; `path` is its file."""
    functions, methods = _training_names(tree, path, {})
    trainers = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _name_of_call(node.value).endswith("Trainer")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return lambda node: _trains(node, functions, methods, trainers)


def trains(tree: ast.Module) -> bool:
    """Whether a script calls `backward()`, or defines a `training_step` of Lightning."""
    return _trains(tree, set(), set(), set()) or any(
        isinstance(node, ast.FunctionDef) and node.name == "training_step"
        for node in ast.walk(tree)
    )


def parses_arguments(tree: ast.Module) -> bool:
    """Whether a statement at the top level parses command-line arguments."""
    return any(
        isinstance(node, ast.Assign | ast.Expr) and _name_of_call(node.value) in PARSERS
        for node in tree.body
    )


def _training_names(
    tree: ast.Module, path: Path, known: dict[Path, set[str]]
) -> tuple[set[str], set[str]]:
    """Return the names of a script's functions that train, and of its methods that train.

    `known` has the functions that train of the files that were analysed before.
    """
    functions, methods = set(_imported(tree, path, known)), set[str]()
    inside = {
        id(method)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
    }
    own = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    before = -1
    while len(functions) + len(methods) > before:  # a function may call a function that trains
        before = len(functions) + len(methods)
        for node in own:
            if _trains(node, functions, methods, set()):
                (methods if id(node) in inside else functions).add(node.name)
    return functions, methods - {"__init__", "forward"}


def _imported(tree: ast.Module, path: Path, known: dict[Path, set[str]]) -> Iterator[str]:
    """Yield the functions that train and are imported from files, as a script calls them.

    A function is FUNCTION or, if its module is imported, MODULE.FUNCTION.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found = _functions_of(node.module, path, known)
            yield from (a.asname or a.name for a in node.names if a.name in found)
            modules = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            modules = {a.asname or a.name: a.name for a in node.names}
        else:
            continue
        for name, module in modules.items():
            yield from (f"{name}.{each}" for each in _functions_of(module, path, known))


def _functions_of(module: str, path: Path, known: dict[Path, set[str]]) -> set[str]:
    """Return the functions that train of a module that the script `path` imports."""
    for folder in path.parents[:_PLACES]:
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        if file not in known and file.is_file():
            known[file] = set()  # two files may import each other
            with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                known[file] = _training_names(ast.parse(file.read_bytes()), file, known)[0]
        if file in known:
            return known[file]
    return set()


def _trains(node: ast.AST, functions: set[str], methods: set[str], trainers: set[str]) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in functions:
            return True
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            called, of = inner.func.attr, inner.func.value
            if called == "backward" or called in methods or ast.unparse(inner.func) in functions:
                return True
            if called in _FIT and isinstance(of, ast.Name) and of.id in trainers:
                return True
    return False


def _name_of_call(node: ast.expr) -> str:
    """Return the last name of the called function, or "" if the node is not a call."""
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", None) or getattr(called, "id", None) or ""


def is_main_block(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__"`."""
    return isinstance(node, ast.If) and any(
        isinstance(inner, ast.Name) and inner.id == "__name__" for inner in ast.walk(node.test)
    )


def _tried(node: ast.stmt) -> ast.stmt:
    """Return the definition in a try statement: it may need results of the training."""
    handler = ast.ExceptHandler(ast.Name("NameError", ast.Load()), None, [ast.Pass()])
    made = ast.Try([node], [handler], [], [])
    return ast.copy_location(made, node)
