"""Lists of modules in the syntax tree of a class: displays, sums, comprehensions and appends."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gradscope.sources.scripts.syntax import dotted_name, last_name

_ADD = {"append", "add_module", "extend"}  # methods of lists, Sequential and ModuleList
_LISTS = {"list", "tuple", "ModuleList", "Sequential"}


@dataclass(frozen=True)
class Entries:
    """Consecutive entries of a list."""

    nodes: Sequence[ast.expr]
    loop: ast.comprehension | None = None  # the loop that adds the entries once for each value
    certain: bool = True  # whether they are always added: not in a branch of `if`


Added = Mapping[str, Sequence[Entries]]  # {dotted name of a list: what is added to it}


def added_entries(methods: Sequence[ast.FunctionDef]) -> dict[str, list[Entries]]:
    """Return the entries that methods add to lists by append, extend and +=, by dotted name."""
    found: dict[str, list[Entries]] = {}
    for method in methods:
        for name, entries in _in_body(method.body, None, True):
            found.setdefault(name, []).append(entries)
    return found


def _in_body(
    body: Sequence[ast.stmt], loop: ast.comprehension | None, certain: bool
) -> Iterator[tuple[str, Entries]]:
    for line in body:
        if isinstance(line, ast.For):
            own = ast.comprehension(line.target, line.iter, [], 0)
            yield from _in_body(line.body, own, loop is None)
        elif isinstance(line, ast.If):
            yield from _in_body([*line.body, *line.orelse], loop, False)
        elif isinstance(line, ast.With):
            yield from _in_body(line.body, loop, certain)
        elif isinstance(line, ast.AugAssign) and isinstance(line.op, ast.Add):
            yield from _each(line.target, line.value, loop, certain)
        elif isinstance(line, ast.Assign) and isinstance(line.value, ast.BinOp):
            left = line.value  # layers = layers + [Linear(width, width)]
            if isinstance(left.op, ast.Add) and dotted_name(left.left) == dotted_name(
                line.targets[0]
            ):
                yield from _each(line.targets[0], left.right, loop, certain)
        elif isinstance(line, ast.Expr) and isinstance(line.value, ast.Call):
            call = line.value
            if isinstance(call.func, ast.Attribute) and call.func.attr in _ADD and call.args:
                several, named = call.func.attr == "extend", call.func.attr == "add_module"
                value = call.args[-1] if several else ast.List([call.args[-1]])
                yield from _each(call.func.value, value, loop, certain and not named)


def _each(
    target: ast.expr, value: ast.expr, loop: ast.comprehension | None, certain: bool
) -> Iterator[tuple[str, Entries]]:
    name = dotted_name(target)
    for entries in entries_of(value, {}, {}) if name else ():
        known = entries.loop is None or loop is None
        yield name or "", replace(entries, loop=entries.loop or loop, certain=certain and known)


def entries_of(node: ast.expr, names: Mapping[str, ast.expr], added: Added) -> list[Entries]:
    """Return the entries of an expression that is a list, in order.

    Args:
        node: The expression. An unknown expression is one entry, a Starred node.
        names: The values of variables and of self.NAME.
        added: The entries that methods add to lists afterwards.
    """
    return _merged(_entries(node, names, added, ()))


def _entries(
    node: ast.expr, names: Mapping[str, ast.expr], added: Added, seen: Sequence[str]
) -> Iterator[Entries]:
    name = dotted_name(node)
    if name is not None and name in names and name not in seen:
        yield from _entries(names[name], names, added, [*seen, name])
        yield from added.get(name, ())
    elif isinstance(node, ast.List | ast.Tuple):
        for entry in node.elts:
            if isinstance(entry, ast.Starred):
                yield from _entries(entry.value, names, added, seen)
            else:
                yield Entries([entry])
    elif isinstance(node, ast.ListComp | ast.GeneratorExp):
        first = node.generators[0]
        plain = len(node.generators) == 1 and not first.ifs
        yield Entries([node.elt], first, certain=plain)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _entries(node.left, names, added, seen)
        yield from _entries(node.right, names, added, seen)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times = ast.Call(ast.Name("range"), [node.right], [])
        for entries in _entries(node.left, names, added, seen):
            of = ast.comprehension(ast.Name("_"), times, [], 0)
            yield replace(entries, loop=of, certain=entries.loop is None)
    elif isinstance(node, ast.Call) and last_name(node.func) in _LISTS:
        for argument in node.args:
            listed = last_name(node.func) != "Sequential" or isinstance(argument, ast.Starred)
            value = argument.value if isinstance(argument, ast.Starred) else argument
            if listed or isinstance(value, ast.List | ast.ListComp):
                yield from _entries(value, names, added, seen)
            else:
                yield Entries([value])
    else:
        yield Entries([ast.Starred(node)], certain=False)


def _merged(parts: Iterator[Entries]) -> list[Entries]:
    """Join the entries that are added in the same loop."""
    found: list[Entries] = []
    for entries in parts:
        last = found[-1] if found else None
        if last is not None and last.loop is entries.loop and entries.loop is not None:
            nodes = [*last.nodes, *entries.nodes]
            found[-1] = Entries(nodes, last.loop, last.certain and entries.certain)
        elif last is not None and last.loop is entries.loop and last.certain == entries.certain:
            found[-1] = replace(last, nodes=[*last.nodes, *entries.nodes])
        else:
            found.append(entries)
    return found
