"""Which definitions of the package each command can reach: an over-approximation by names.

A definition reaches what its body names: functions, classes, constants, and what registries hold.
Annotations reach nothing.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from inspect import signature, unwrap
from pathlib import Path

from typer.main import get_command

import gradscope
from gradscope.cli.app import app

HERE = Path(gradscope.__file__).parent
COMMANDS = get_command(app).commands
SHARED = [("gradscope.cli.app", "execute"), ("gradscope.cli.app", "_code")]
# the application holds all commands, of which one runs; `with_flags` calls `run_spec` for some
NOT_FOLLOWED = {("gradscope.cli.app", "app"), ("gradscope.cli.options", "with_flags")}

Node = tuple[str, str]  # module, and a name at its top level; "" is what else runs at import


def _module(path: Path) -> str:
    parts = ("gradscope", *path.relative_to(HERE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {_module(path): ast.parse(path.read_text()) for path in sorted(HERE.rglob("*.py"))}


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it but annotations."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for below in value if isinstance(value, list) else [value]:
                if isinstance(below, ast.AST):
                    yield from walk(below)


def _imports(nodes: Iterable[ast.AST]) -> dict[str, Node]:
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _definitions(tree: ast.Module) -> dict[str, list[ast.AST]]:
    """Return the statements behind each name of a module."""
    found: dict[str, list[ast.AST]] = defaultdict(list)
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found[name].append(statement)
            case ast.Assign() | ast.AnnAssign():
                targets = statement.targets if isinstance(statement, ast.Assign) else None
                for target in targets or [statement.target]:
                    for each in ast.walk(target):
                        if isinstance(each, ast.Name):
                            found[each.id].append(statement)
            case _:
                found[""].append(statement)
    return found


DEFINED = {module: _definitions(tree) for module, tree in TREES.items()}
IMPORTED = {module: _imports(tree.body) for module, tree in TREES.items()}


@cache
def resolve(module: str, name: str) -> Node | None:
    """Return where a name of a module is defined, or None outside the package."""
    if name in DEFINED.get(module, ()):
        return module, name
    source = IMPORTED.get(module, {}).get(name)
    if source is not None and source != (module, name):
        return resolve(*source)
    return (f"{module}.{name}", "") if f"{module}.{name}" in TREES else None


def _registered() -> dict[Node, set[Node]]:
    """Return what decorators of the package put into each registry."""
    found: dict[Node, set[Node]] = defaultdict(set)
    for module, tree in TREES.items():
        for node in tree.body:
            for decorator in getattr(node, "decorator_list", []):
                for each in ast.walk(decorator):
                    place = resolve(module, each.id) if isinstance(each, ast.Name) else None
                    if place is not None and place[1]:
                        found[place].add((module, node.name))
    return found


REGISTERED = _registered()


@cache
def references(node: Node) -> frozenset[Node]:
    """Return the definitions that a definition names."""
    module, name = node
    places: set[Node | None] = {*REGISTERED[node]}
    for statement in DEFINED[module].get(name, ()):
        inner = _imports(walk(statement))
        for each in walk(statement):
            of = each.value if isinstance(each, ast.Attribute) else each
            if isinstance(of, ast.Name):
                place = resolve(*inner[of.id]) if of.id in inner else resolve(module, of.id)
                if isinstance(each, ast.Attribute) and place is not None and not place[1]:
                    place = resolve(place[0], each.attr)
                places.add(place)
    return frozenset(places - {None} - NOT_FOLLOWED)


@cache
def reached(command: str) -> frozenset[Node]:
    """Return every definition that a command can reach."""
    function = unwrap(COMMANDS[command].callback)
    (own,) = signature(function).parameters.values()
    options = own.annotation
    roots = [(each.__module__, each.__name__) for each in (function, options)]
    roots += [("gradscope.cli.options", "run_spec")] if "spec" in options.model_fields else []
    seen: set[Node] = set()
    waiting = [*SHARED, *roots]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += references(node)
    return frozenset(seen)
