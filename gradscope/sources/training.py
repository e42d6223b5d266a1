"""Finds and removes the statements of a training script that train during its import.

An import with these statements would train again and overwrite the script's checkpoint.
"""

import ast
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
PARSERS = {"parse_args", "parse_known_args"}
_UNORDERED = {"sorted", "len", "sum", "max", "min", "set", "any", "all", "Counter"}
_BACKWARD = ".backward"
_FIT = {"fit", "train", "run"}  # methods of a trainer that train
_PLACES = 2  # the folders to search for an imported file: the script's folder, and the one above


def without_training(
    tree: ast.Module, path: Path, known: "Known | None" = None
) -> tuple[ast.Module, int | None]:
    """Return a script without its training, and the line of its first statement that trains.

    A script that does not train has no such line: None.

    From the first statement that trains on, only definitions and imports are kept. A statement
    trains if it calls `backward()`, names a function that trains, or calls a method that trains.

    Args:
        tree: The script.
        path: Its file. Functions imported from files in its folder, or in the folder above, are
            also analysed.
        known: The files that were analysed before. The analysis adds the files that it reads.
    """
    trains_here = training_in(tree, path, known)
    for k, node in enumerate(tree.body):
        if isinstance(node, _DEFINITION) or is_main_block(node):
            continue
        if trains_here(node):
            later = [_tried(n) for n in tree.body[k:] if isinstance(n, _DEFINITION)]
            made = ast.Module([*tree.body[:k], *later], tree.type_ignores)
            return ast.fix_missing_locations(made), node.lineno
    return tree, None


def training_in(
    tree: ast.Module, path: Path, known: "Known | None" = None
) -> Callable[[ast.AST], bool]:
    """Return a function that says whether a statement of a script trains; `path` is its file."""
    known = {} if known is None else known
    own = _training_names(tree, path, known)
    methods = own.methods - {".__init__", ".forward"}
    fits = {
        f"{target.id}.{method}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _name_of_call(node.value).endswith("Trainer")
        for target in node.targets
        if isinstance(target, ast.Name)
        for method in _FIT
    }
    fits |= _methods_of_objects(tree, own, known)
    return lambda node: own.trains(_names_in(node), known, methods | fits)


def _methods_of_objects(tree: ast.Module, own: "TrainingNames", known: "Known") -> set[str]:
    """Return OBJECT.METHOD for methods that train, of objects of classes in other files.

    An example is exp.train, after exp = Exp(args) and Exp = Experiment, imported from exp.py.
    """
    files = {local: file for local, file, _ in own.imported}
    found = set[str]()
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.Assign)):
        target = node.targets[0]
        if not isinstance(target, ast.Name):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in files:  # a second name
            files[target.id] = files[node.value.id]
        file = files.get(_name_of_call(node.value))
        methods = set() if file is None else known[file].methods - {".__init__", ".forward"}
        found |= {f"{target.id}{method}" for method in methods}
    return found


def trains(tree: ast.Module) -> bool:
    """Whether a script calls `backward()`, or defines a `training_step` of Lightning."""
    return _BACKWARD in _names_in(tree) or any(
        isinstance(node, ast.FunctionDef) and node.name == "training_step"
        for node in ast.walk(tree)
    )


def unordered_line(nodes: Iterable[ast.AST]) -> int | None:
    """Return the first line that uses the order of a set, as list(set(words)), or None.

    The order of texts in a set differs between processes, unless PYTHONHASHSEED is set.
    """
    every = [inner for node in nodes for inner in ast.walk(node)]
    sets: set[str] = set()

    def is_set(node: ast.AST) -> bool:
        of_set = isinstance(node, ast.Call) and _name_of_call(node) in ("set", "frozenset")
        return of_set or isinstance(node, ast.Set | ast.SetComp) or getattr(node, "id", "") in sets

    for node in every:
        if isinstance(node, ast.Assign) and is_set(node.value):
            sets |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    safe = {
        id(inner)
        for node in every
        if isinstance(node, ast.Call) and _name_of_call(node) in _UNORDERED
        for inner in ast.walk(node)
    }
    for node in every:
        used: list[ast.AST] = []
        if isinstance(node, ast.Call) and _name_of_call(node) in ("list", "tuple", "enumerate"):
            used = [*node.args[:1]]
        elif isinstance(node, ast.ListComp | ast.DictComp):
            used = [part.iter for part in node.generators]
        elif isinstance(node, ast.For):
            stores = (n for n in ast.walk(node) if isinstance(n, ast.Subscript))
            used = [node.iter] if any(isinstance(n.ctx, ast.Store) for n in stores) else []
        if id(node) not in safe and any(map(is_set, used)):
            return int(node.lineno)  # type: ignore[attr-defined]
    return None


def parses_arguments(tree: ast.Module) -> bool:
    """Whether a statement at the top level parses command-line arguments."""
    return any(
        isinstance(node, ast.Assign | ast.Expr) and _name_of_call(node.value) in PARSERS
        for node in tree.body
    )


@dataclass(frozen=True)
class _Summary:
    """The names in a file that the analysis needs."""

    definitions: Sequence[tuple[str, frozenset[str]]]  # NAME or .METHOD, and the names in it
    imports: Sequence[tuple[str, str, str]]  # a module, "" or a name in it, and its local name


@dataclass
class TrainingNames:
    """The functions and methods of a file that train."""

    summary: _Summary
    modules: dict[str, list[Path]] = field(default_factory=dict)  # {local name: files}
    imported: list[tuple[str, Path, str]] = field(default_factory=list)  # local name, file, name
    functions: set[str] = field(default_factory=set)  # also imported functions
    methods: set[str] = field(default_factory=set)  # .NAME

    def trains(self, names: Set[str], known: "Known", methods: Set[str]) -> bool:
        """Whether code with some names trains, if `methods` train."""
        if _BACKWARD in names or not (names.isdisjoint(self.functions | methods)):
            return True
        return any(self._of_module(name, known) for name in names if "." in name[1:])

    def _of_module(self, name: str, known: "Known") -> bool:
        """Whether MODULE.FUNCTION trains; modules may be in modules."""
        parts = name.split(".")
        for k in range(1, len(parts)):
            rest = ".".join(parts[k:])
            for file in self.modules.get(".".join(parts[:k]), ()):
                if rest in known[file].functions or known[file]._of_module(rest, known):
                    return True
        return False

    def update(self, known: "Known") -> bool:
        """Add the functions and methods that train as far as `known` says; return if any is new."""
        before = len(self.functions) + len(self.methods)
        taken = (own for own, file, name in self.imported if name in known[file].functions)
        self.functions.update(taken)
        for name, names in self.summary.definitions:
            of = self.methods if name.startswith(".") else self.functions
            if name not in of and self.trains(names, known, self.methods):
                of.add(name)
        return len(self.functions) + len(self.methods) > before


Known = dict[Path, TrainingNames]


def _training_names(tree: ast.Module, path: Path, known: Known) -> TrainingNames:
    """Return the functions and methods of a script that train.

    The files that it imports, also indirectly, are added to `known`. Files may import each other,
    so they are updated in turns until no function is new.
    """
    own = TrainingNames(_summary_of(tree))
    fresh = [(path, own)]
    for file, names in fresh:  # it grows: an imported file also imports
        for module, name, local in names.summary.imports:
            other = file_of(module, file)
            if other is None:
                continue
            if other not in known:
                known[other] = TrainingNames(_summary(other))
                fresh.append((other, known[other]))
            if name:
                names.imported.append((local, other, name))
            else:
                names.modules.setdefault(local, []).append(other)
    while sum(names.update(known) for _, names in reversed(fresh)):
        pass
    return own


def file_of(module: str, path: Path) -> Path | None:
    """Return the file of a module that the script `path` imports, if it is near the script.

    Folders to import from are the script's, the one above, and the working directory above both.
    """
    here = Path.cwd()
    folders = [*path.parents[:_PLACES], *([here] if here in path.absolute().parents else [])]
    files = (folder.joinpath(*module.split(".")).with_suffix(".py") for folder in folders)
    return next((file for file in files if file.is_file()), None)


def parsed(file: Path) -> ast.Module | None:
    """Return the tree of a Python file, or None if it cannot be read."""
    with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse(file.read_bytes())
    return None


def definitions(file: Path) -> set[str]:
    """Return the names of the functions and classes at the top level of a file."""
    tree = parsed(file)
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, kinds)} if tree else set()


def _summary(file: Path) -> _Summary:
    """Return the names of a file. An unchanged file is parsed once."""
    with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        found = file.stat()
        return _parsed(file, found.st_ino, found.st_mtime_ns)
    return _Summary((), ())


@lru_cache(maxsize=4096)
def _parsed(file: Path, _inode: int, _changed: int) -> _Summary:
    return _summary_of(ast.parse(file.read_bytes()))


def _summary_of(tree: ast.Module) -> _Summary:
    nodes = list(ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    inside = {id(method) for node in classes for method in node.body}
    definitions = [
        (f".{node.name}" if id(node) in inside else node.name, _names_in(node))
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    imports: list[tuple[str, str, str]] = []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            for a in node.names:
                local = a.asname or a.name
                imports += [(node.module, a.name, local), (f"{node.module}.{a.name}", "", local)]
        elif isinstance(node, ast.Import):
            imports += [(a.name, "", a.asname or a.name) for a in node.names]
    return _Summary(definitions, imports)


def _names_in(node: ast.AST) -> frozenset[str]:
    """Return the names in a statement, NAME, and its calls of attributes, .NAME and OWNER.NAME."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            found.add(inner.id)
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            found |= {f".{inner.func.attr}", ast.unparse(inner.func)}
    return frozenset(found)


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
