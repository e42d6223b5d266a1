"""Variables of functions in scripts: the statements that compute a variable, without the rest.

Many scripts build their data and their model in main(), which also trains. FILE.py:main.loader
names the variable `loader` of this function. Only the statements on which the variable depends are
run: the assignments of the variables that it needs, changes of these variables, and seeds.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gradscope.sources.training import is_main_block, training_in

# functions and methods that return the module that they get
MOVED = {"to", "cuda", "eval", "train", "double", "float", "prepare", "compile"}
MOVED |= {"DataParallel", "DistributedDataParallel"}
MAIN = "__main__"  # the name of the block if __name__ == "__main__"
_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try)
_DEPTH = 4  # how many callers to follow for the values of parameters
# methods that do not change what the variable is for: the checkpoint has the weights
_NEUTRAL = {"load_state_dict", "train", "eval", "zero_grad", "step", "write", "close", "info"}


@dataclass(frozen=True)
class Variables:
    """The variables of the functions of a script.

    A function is named by its name, and the block if __name__ == "__main__" by "__main__".
    """

    tree: ast.Module
    path: Path  # the script's file

    def statements(self, function: str, name: str) -> list[ast.stmt] | None:
        """Return the statements that compute a variable at its last assignment, or None.

        `name` may be the names of several variables, "x,y". The result is None if the value of a
        parameter is unknown, or if the statements train.
        """
        names = {*name.split(",")}
        found = self._slice(function, names, _DEPTH)
        if found is None or not names <= _bound_in(found):
            return None
        return None if any(map(self._trains, found)) else found

    def places(self, name: str) -> list[str]:
        """Return the functions that compute a variable, or several "x,y", without training."""
        names = {*name.split(",")}
        own = [place for place, body in self._bodies.items() if names <= _bound_in(body)]
        return [place for place in own if self.statements(place, name) is not None]

    def made_by(self, called: Collection[str], named: str = "(?!)") -> list[str]:
        """Return FUNCTION.NAME for variables to which calls of some names are assigned.

        Args:
            called: The names of the functions and classes.
            named: A pattern. It also selects variables, by their names.
        """
        found = {
            (place, target.id): None
            for place, body in self._bodies.items()
            for node in (inner for line in body for inner in ast.walk(line))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in (n for t in node.targets for n in ast.walk(t))
            if isinstance(target, ast.Name)
            and (_made(node.value) in called or re.search(named, target.id))
        }
        return [f"{f}.{name}" for f, name in found if self.statements(f, name) is not None]

    def is_called(self, function: str) -> bool:
        """Whether the script calls a function, or the function has no parameters."""
        node = next((n for n in self.tree.body if getattr(n, "name", "") == function), None)
        if not isinstance(node, ast.FunctionDef) or not (node.args.args or node.args.kwonlyargs):
            return True
        lines = (n for body in self._bodies.values() for line in body for n in ast.walk(line))
        return any(isinstance(n, ast.Call) and _call_of(n, function) is not None for n in lines)

    @cached_property
    def _bodies(self) -> dict[str, Sequence[ast.stmt]]:
        own = (node for node in self.tree.body if isinstance(node, ast.FunctionDef))
        blocks = (node for node in self.tree.body if isinstance(node, ast.If))
        found: dict[str, Sequence[ast.stmt]] = {node.name: node.body for node in own}
        for node in filter(is_main_block, blocks):
            found[MAIN] = node.body
        return found

    @cached_property
    def _trains(self) -> Callable[[ast.AST], bool]:
        return training_in(self.tree, self.path)

    def _slice(self, function: str, names: set[str], depth: int) -> list[ast.stmt] | None:
        """Return the statements that compute variables of a function, after those of callers."""
        body = self._bodies.get(function)
        if body is None or depth == 0:
            return None
        found, needed = self._needed(body, names, _bound_in(body), is_main=function == MAIN)
        node = next((n for n in self.tree.body if getattr(n, "name", "") == function), None)
        if not isinstance(node, ast.FunctionDef):
            return found
        arguments = node.args
        known = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        wanted = [name for name in known if name in needed]
        calls = [
            (place, call)
            for place, other in self._bodies.items()
            for node in (n for line in other for n in ast.walk(line))
            if isinstance(node, ast.Call)
            and place != function
            and (call := _call_of(node, function)) is not None
        ]
        for place, call in calls if wanted else ():
            given = _given(call, arguments, wanted)
            nodes = [n for value in given.values() for n in ast.walk(value)]
            read = {n.id for n in nodes if isinstance(n, ast.Name)}
            before = self._slice(place, read, depth - 1)
            if len(given) == len(wanted) and before is not None:
                passed = [_assignment(k, v) for k, v in given.items() if _name(v) != k]
                return [*before, *passed, *found]
        defaults = _given(ast.Call(ast.Name(""), [], []), arguments, wanted)
        if len(defaults) < len(wanted):
            return None
        return [*(_assignment(k, v) for k, v in defaults.items()), *found]

    def _needed(
        self, body: Sequence[ast.stmt], names: set[str], own: set[str], *, is_main: bool = False
    ) -> tuple[list[ast.stmt], set[str]]:
        """Return the statements on which variables depend, and all names that they read.

        Args:
            body: The statements of a function.
            names: The variables.
            own: The names that the function assigns. A method called on another name, such as a
                module's function, changes no variable.
            is_main: Whether the names are global, so that functions and classes read them.
        """
        ends = [k for k, line in enumerate(body) if not names.isdisjoint(_bound(line))]
        needed, found = set(names), list[ast.stmt]()
        for line in reversed(body[: max(ends, default=-1) + 1]):
            if isinstance(line, ast.For | ast.While) and self._trains(line):
                lines = _first_round(line, needed)
                inner, reads = self._needed(lines, needed & _bound_in(lines), own)
                found, needed = [*inner, *found], needed | reads
                continue
            kept = isinstance(line, ast.Global | ast.Nonlocal) or _seeds(line)
            if kept or not needed.isdisjoint({*_bound(line), *_changed(line, own)}):
                found.insert(0, line)
                needed |= {n.id for n in ast.walk(line) if isinstance(n, ast.Name)}
                needed |= self._read_by(needed) & own if is_main else set()
        return found, needed

    def _read_by(self, names: set[str]) -> set[str]:
        """Return the names that functions and classes of the script read, also indirectly."""
        found, waiting = set[str](), [*names]
        nodes = {getattr(node, "name", ""): node for node in self.tree.body}
        while waiting:
            node = nodes.pop(waiting.pop(), None)
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                read = _free(node) - found
                found |= read
                waiting += read
        return found

    def reads_block(self, name: str) -> bool:
        """Whether a class or function reads variables of the block if __name__ == "__main__"."""
        top = _bound_in(node for node in self.tree.body if not is_main_block(node))
        return bool(self._read_by({name}) & _bound_in(self._bodies.get(MAIN, ())) - top)

    def globals_of(self, statements: Sequence[ast.stmt]) -> list[str]:
        """Return the names that statements assign and that are global in the script."""
        return sorted(_bound_in(statements) & _bound_in(self._bodies.get(MAIN, ())))


def _free(node: ast.AST) -> set[str]:
    """Return the names that a function or a class reads and does not bind."""
    if isinstance(node, ast.ClassDef):
        every = (*node.body, *node.bases, *node.decorator_list)
        return {name for part in every for name in _free(part)} - _bound_in(node.body)
    nodes = [*ast.walk(node)]
    names = [n for n in nodes if isinstance(n, ast.Name)]
    bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    shared = {name for n in nodes if isinstance(n, ast.Global) for name in n.names}
    read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
    return read - (bound - shared if isinstance(node, ast.FunctionDef) else set())


def _call_of(node: ast.Call, function: str) -> ast.Call | None:
    """Return a call of a function: f(x), launch(f, args=(x,)) or spawn(f, args=(x,)); or None.

    torch.multiprocessing.spawn passes the number of the process first.
    """
    if _name(node.func) == function:
        return node
    passed = next((k.value for k in node.keywords if k.arg == "args"), None)
    if function not in map(_name, node.args) or not isinstance(passed, ast.Tuple):
        return None
    first = [ast.Constant(0)] if _last_name_of_call(node) == "spawn" else []
    return ast.Call(ast.Name(function), [*first, *passed.elts], [])


def _assignment(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _given(call: ast.Call, arguments: ast.arguments, wanted: Sequence[str]) -> dict[str, ast.expr]:
    """Return the values of parameters: what a call passes, else their defaults."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(not k.arg for k in call.keywords):
        return {}
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    optional = names[len(names) - len(arguments.defaults) :]
    defaults = dict(zip(optional, arguments.defaults, strict=True))
    only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found = defaults | {a.arg: d for a, d in only if d is not None}
    found |= dict(zip(names, call.args, strict=False))
    found |= {k.arg: k.value for k in call.keywords if k.arg}
    return {name: found[name] for name in wanted if name in found}


def _first_round(loop: ast.For | ast.While, names: set[str]) -> list[ast.stmt]:
    """Return the statements of the first round of a loop that trains, up to the variables."""
    ends = [k for k, line in enumerate(loop.body) if not names.isdisjoint(_bound(line))]
    lines = loop.body[: max(ends, default=-1) + 1]
    if isinstance(loop, ast.While):
        return lines
    first = ast.Call(ast.Name("iter", ast.Load()), [loop.iter], [])
    value = ast.Call(ast.Name("next", ast.Load()), [first], [])
    return [ast.Assign([loop.target], value), *lines]


def _bound_in(lines: Iterable[ast.stmt]) -> set[str]:
    return {name for line in lines for name in _bound(line)}


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement assigns, defines or imports."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, _COMPOUND):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id
            elif isinstance(inner, ast.Import | ast.ImportFrom):
                yield from _bound(inner)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (a.asname or a.name.partition(".")[0] for a in node.names)
    else:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id


def _changed(node: ast.stmt, own: set[str]) -> Iterator[str]:
    """Yield the variables that a statement changes: NAME.x = 1, NAME["k"] = 1 and NAME.add(1)."""
    for inner in ast.walk(node):
        targets: Sequence[ast.expr] = ()
        if isinstance(inner, ast.Assign):
            targets = inner.targets
        elif isinstance(inner, ast.AugAssign):
            targets = [inner.target]
        elif isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
            called = inner.value.func
            if isinstance(called, ast.Attribute) and called.attr not in _NEUTRAL:
                targets = [called]
        for target in targets:
            owner = target
            while isinstance(owner, ast.Attribute | ast.Subscript):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner is not target and owner.id in own:
                yield owner.id


def _seeds(node: ast.stmt) -> bool:
    """Whether a statement is a call that seeds random numbers, as torch.manual_seed(0)."""
    return isinstance(node, ast.Expr) and "seed" in _last_name_of_call(node.value).lower()


def _made(node: ast.expr) -> str:
    """Return NAME for NAME(...), also for NAME(...).to(device) and DataParallel(NAME(...))."""
    while isinstance(node, ast.Call) and (_last_name_of_call(node) in MOVED):
        inner = next(iter(node.args), None) if isinstance(node.func, ast.Name) else None
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        moved = inner or (owner if isinstance(owner, ast.Call) else next(iter(node.args), None))
        if moved is None:
            break
        node = moved
    return _last_name_of_call(node)


def _last_name_of_call(node: ast.expr) -> str:
    called = node.func if isinstance(node, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else _name(called)


def _name(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""
