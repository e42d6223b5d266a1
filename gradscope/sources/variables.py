"""Variables of functions in scripts: the statements that compute a variable, without the rest.

Many scripts build their data and their model in main(), which also trains. FILE.py:main.loader
names the variable `loader` of this function. Only the statements on which the variable depends are
run: the assignments of the variables that it needs, changes of these variables, and seeds.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gradscope.sources.training import is_main_block, training_in

# functions and methods that return the module that they get
MOVED = {"to", "cuda", "eval", "train", "double", "float", "prepare", "compile"}
MOVED |= {"DataParallel", "DistributedDataParallel"}
MAIN = "__main__"  # the name of the block if __name__ == "__main__"
_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try)
_DEPTH = 4  # how many callers to follow for the values of parameters
_IDLE = {"zero_grad", "step", "write", "close", "info"}  # methods that change no variable
# methods that do not change what the variable is for: the checkpoint has the weights
_NEUTRAL = {"load_state_dict", "train", "eval", *_IDLE}


@dataclass(frozen=True)
class Variables:
    """The variables of the functions of a script.

    A function is named by its name, and the block if __name__ == "__main__" by "__main__".
    """

    tree: ast.Module
    path: Path  # the script's file
    # functions and methods of other files that the script calls, by their names in the script
    others: Mapping[str, ast.FunctionDef] = field(default_factory=dict)

    def statements(self, function: str, name: str) -> list[ast.stmt] | None:
        """Return the statements that compute a variable at its last assignment, or None.

        `name` may be the names of several variables, "x,y". The result is None if the value of a
        parameter is unknown, or if the statements train.
        """
        names = {*name.split(",")}
        found = self._slice(function, names, _DEPTH)
        if found is None or not names <= bound_in(found):
            return None
        return None if any(map(self._trains, found)) else found

    def places(self, name: str) -> list[str]:
        """Return the functions that compute a variable, or several "x,y", without training."""
        names = {*name.split(",")}
        own = [place for place, body in self._bodies.items() if names <= bound_in(body)]
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
        known = {**self.others, **self._functions}
        found: dict[str, Sequence[ast.stmt]] = {name: f.body for name, f in known.items()}
        for node in (n for n in self.tree.body if isinstance(n, ast.If) and is_main_block(n)):
            found[MAIN] = node.body
        return found

    @cached_property
    def _functions(self) -> dict[str, ast.FunctionDef]:
        """The functions, and the methods as CLASS.METHOD."""
        found = {n.name: n for n in self.tree.body if isinstance(n, ast.FunctionDef)}
        for node in (n for n in self.tree.body if isinstance(n, ast.ClassDef)):
            own = (n for n in node.body if isinstance(n, ast.FunctionDef))
            found |= {f"{node.name}.{method.name}": method for method in own}
        return found

    def _function(self, name: str) -> ast.FunctionDef | None:
        return self._functions.get(name) or self.others.get(name)

    @cached_property
    def _top(self) -> Sequence[ast.stmt]:
        """The statements at the top level, without definitions and the block of __main__."""
        kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
        return [n for n in self.tree.body if not isinstance(n, kinds) and not is_main_block(n)]

    @cached_property
    def imported(self) -> list[ast.stmt]:
        """The statements at the top level that an import runs: those in front of the training."""
        ends = [k for k, line in enumerate(self._top) if self._trains(line)]
        return [*self._top[: min(ends, default=None)]]

    @cached_property
    def _trains(self) -> Callable[[ast.AST], bool]:
        return training_in(self.tree, self.path)

    def computing(
        self, function: str, names: set[str], given: Collection[str] = ()
    ) -> list[ast.stmt] | None:
        """Return the statements that compute variables of a function, or None; see `statements`.

        The variables `given` are known. Their statements are left out, and no other statement may
        read them.
        """
        found = self._slice(function, names, _DEPTH, frozenset(given))
        unknown = any({*given} & names_in(line) for line in found or ())
        return None if unknown else found

    def _slice(
        self,
        function: str,
        names: set[str],
        depth: int,
        given: frozenset[str] = frozenset(),
        until: ast.AST | None = None,
    ) -> list[ast.stmt] | None:
        """Return the statements that compute variables of a function, after those of callers.

        With `until`, they are in front of this node; otherwise up to the last assignment.
        """
        if depth == 0:
            return None
        if function == "":  # the import runs the statements in front of the training
            rest = self._top[len(self.imported) :]
            front = rest if until is None else in_front_of(rest, until)
            return self.needed(front, names, bound_in(rest), given)[0]
        body = self._bodies.get(function)
        if body is None:
            return None
        front, is_main = body if until is None else in_front_of(body, until), function == MAIN
        whole = until is not None
        own = bound_in(body)
        found, needed = self.needed(front, names, own, given, is_main=is_main, whole=whole)
        before = self.of_parameters(function, needed, given, depth)
        return None if before is None else [*before, *found]

    def of_parameters(
        self, function: str, names: set[str], given: Collection[str] = (), depth: int = _DEPTH
    ) -> list[ast.stmt] | None:
        """Return the statements that compute parameters of a function, from its callers, or None.

        The parameters in `given` are known. Names that are no parameters are ignored.
        """
        node = self._function(function)
        if node is None:
            return []
        arguments, known = node.args, parameters(node)
        wanted = [name for name in known if name in names and name not in given]
        instance: list[ast.stmt] | None = []
        if known[:1] == ["self"] and "self" in wanted:
            instance = self._instance(function.rpartition(".")[0], depth)
            wanted = [name for name in wanted if name != "self"]
        if instance is None or not wanted:
            return instance
        for place, call, found in self._calls_of(function):
            passed = _given(call, arguments, wanted)
            read = {n.id for v in passed.values() for n in ast.walk(v) if isinstance(n, ast.Name)}
            held = _given(call, arguments, [*given])
            outer = frozenset(n.id for n in held.values() if isinstance(n, ast.Name))
            before = self._slice(place, read, depth - 1, outer, found)
            if len(passed) == len(wanted) and before is not None:
                own = [assignment(k, v) for k, v in passed.items() if _name(v) != k]
                if any(outer & names_in(line) for line in (*before, *own)):
                    return None  # a value of a variable that is given
                return [*instance, *before, *own]
        defaults = _given(ast.Call(ast.Name(""), [], []), arguments, wanted)
        if len(defaults) < len(wanted):
            return None
        return [*instance, *(assignment(k, v) for k, v in defaults.items())]

    def passed(self, function: str, names: Collection[str], depth: int = _DEPTH) -> set[str]:
        """Return the parameters of a function to which callers pass some variables or attributes.

        A caller may have the variable from its own callers.
        """
        node = self._function(function)
        if node is None or depth == 0:
            return set()
        found = set[str]()
        for place, call, _ in self._calls_of(function):
            given = _given(call, node.args, parameters(node))
            held = {*names, *self.passed(place, names, depth - 1)}
            found |= {k for k, v in given.items() if (_name(v) or _attribute(v)) in held}
        return found

    def origin_of_attribute(self, kind: str, attribute: str) -> str:
        """Return the variable from which a class has self.NAME, as `origin`, or ""."""
        made = self._function(f"{kind}.__init__")
        if made is None:
            return ""
        held = (n for n in ast.walk(made) if isinstance(n, ast.Assign))
        values = [n.value for n in held if _attribute(n.targets[0]) == attribute]
        names = {name for value in values for name in names_in(value)} & {*parameters(made)}
        for name in sorted(names - {"self"}):
            for place, call, _ in self._calls_of(kind):
                value = _given(call, made.args, [name]).get(name)
                if isinstance(value, ast.Name):
                    return self.origin(place, value.id)
        return ""

    def given(self, function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
        """Return the values of a function's parameters in a call."""
        return _given(call, function.args, parameters(function))

    def looped_calls(self, function: str) -> Iterator[tuple[ast.For, ast.Call]]:
        """Yield the calls of a function inside loops, each with the innermost loop around it."""
        bodies = {**self._bodies, "": self._top}
        for place, call, node in self._calls_of(function):
            inside = (n for line in bodies[place] for n in ast.walk(line))
            around = [n for n in inside if isinstance(n, ast.For)]
            loops = [n for n in around if any(inner is node for inner in ast.walk(n))]
            if loops:
                yield loops[-1], call

    def origin(self, function: str, name: str, depth: int = _DEPTH) -> str:
        """Return FUNCTION.NAME, or NAME at the top level, for the variable that a parameter is.

        Without a caller that passes a variable, the result is "".
        """
        node = self._function(function)
        if node is None or name not in parameters(node):
            places = dict.fromkeys((function, MAIN))  # otherwise it is global
            within = (k for k in places if name in bound_in(self._bodies.get(k, ())))
            return f"{next(within, '')}.{name}".removeprefix(".")
        for place, call, _ in self._calls_of(function) if depth else ():
            value = _given(call, node.args, [name]).get(name)
            if isinstance(value, ast.Name):
                return self.origin(place, value.id, depth - 1)
        return ""

    def _calls_of(self, function: str) -> list[tuple[str, ast.Call, ast.AST]]:
        """Return the calls of a function or a method: (place, call, its node in the tree).

        The place of the top level is "".
        """
        owner, _, name = function.rpartition(".")
        bodies = {**self._bodies, "": self._top}
        return [
            (place, call, node)
            for place, body in bodies.items()
            for node in (n for line in body for n in ast.walk(line))
            if isinstance(node, ast.Call)
            and place != function
            and (call := _call_of(node, name, is_method=bool(owner))) is not None
        ]

    def _instance(self, kind: str, depth: int) -> list[ast.stmt] | None:
        """Return the statements that make an object of a class, and assign it to `self`."""
        for place, call, node in self._calls_of(kind):
            read = {name for value in (*call.args, *call.keywords) for name in names_in(value)}
            before = self._slice(place, read, depth - 1, until=node)
            if before is not None:
                return [*before, assignment("self", call)]
        return None

    def needed(
        self,
        body: Sequence[ast.stmt],
        names: set[str],
        own: set[str],
        given: Collection[str] = (),
        *,
        is_main: bool = False,
        whole: bool = False,
    ) -> tuple[list[ast.stmt], set[str]]:
        """Return the statements on which variables depend, and all names that they read.

        Args:
            body: The statements of a function.
            names: The variables.
            own: The names that the function assigns. A method called on another name, such as a
                module's function, changes no variable.
            given: Variables that are known.
            is_main: Whether the names are global, so that functions and classes read them.
            whole: Whether statements after the last assignment of the variables also count.
        """
        names = names - {*given}
        ends = [k for k, line in enumerate(body) if not names.isdisjoint(bound(line))]
        last = len(body) - 1 if whole else max(ends, default=-1)
        needed, found = set(names), list[ast.stmt]()
        for line in reversed(body[: last + 1]):
            if isinstance(line, ast.For | ast.While) and self._trains(line):
                lines = _first_round(line, needed)
                inner, reads = self.needed(lines, needed & bound_in(lines), own, given)
                found, needed = [*inner, *found], needed | reads
                continue
            kept = isinstance(line, ast.Global | ast.Nonlocal) or _seeds(line)
            idle = _IDLE if given else _NEUTRAL  # other models have weights of their own
            if kept or not needed.isdisjoint({*bound(line), *_changed(line, own, idle)}):
                line = _pruned(line, needed, own)
                found.insert(0, line)
                needed |= {n.id for n in ast.walk(line) if isinstance(n, ast.Name)} - {*given}
                needed |= self._read_by(needed) & own if is_main else set()
        return found, needed

    def reads(self, names: set[str]) -> set[str]:
        """Return what functions, and the statements that the import runs, read to make names."""
        needed = self.needed(self.imported, names, bound_in(self.imported))[1]
        return needed | self._read_by(needed | names)

    def globals_read(self, names: set[str]) -> set[str]:
        """Return the names of the block of __main__ that names, functions and classes read."""
        return (names | self._read_by(names)) & bound_in(self._bodies.get(MAIN, ()))

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
        top = bound_in(node for node in self.tree.body if not is_main_block(node))
        return bool(self._read_by({name}) & bound_in(self._bodies.get(MAIN, ())) - top)

    def globals_of(self, statements: Sequence[ast.stmt]) -> list[str]:
        """Return the names that statements assign and that are global in the script."""
        return sorted(bound_in(statements) & bound_in(self._bodies.get(MAIN, ())))


def _free(node: ast.AST) -> set[str]:
    """Return the names that a function or a class reads and does not bind."""
    if isinstance(node, ast.ClassDef):
        every = (*node.body, *node.bases, *node.decorator_list)
        return {name for part in every for name in _free(part)} - bound_in(node.body)
    nodes = [*ast.walk(node)]
    names = [n for n in nodes if isinstance(n, ast.Name)]
    own = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    own |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    shared = {name for n in nodes if isinstance(n, ast.Global) for name in n.names}
    read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
    return read - (own - shared if isinstance(node, ast.FunctionDef) else set())


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of the parameters of a function, without *args and **kwargs."""
    own = function.args
    return [a.arg for a in (*own.posonlyargs, *own.args, *own.kwonlyargs)]


def _pruned(line: ast.stmt, needed: set[str], own: set[str]) -> ast.stmt:
    """Return a compound statement without calls of methods of variables that nothing else reads.

    An example is a writer or a progress bar: writer.add_scalar("loss", loss).
    """
    calls = [n for n in ast.walk(line) if isinstance(n, ast.Expr) and _owner(n) in own - needed]
    inside = {id(n) for call in calls for n in ast.walk(call)}
    read = {n.id for n in ast.walk(line) if isinstance(n, ast.Name) and id(n) not in inside}
    left = {id(call) for call in calls if _owner(call) not in read}
    return _without(line, left) if left else line


def _without(line: ast.stmt, left: set[int]) -> ast.stmt:
    """Return a copy of a statement without the inner statements with some ids."""
    made = copy(line)
    for key in ("body", "orelse", "finalbody"):
        block = getattr(line, key, None)
        if isinstance(block, list):
            kept = [_without(each, left) for each in block if id(each) not in left]
            empty = [ast.copy_location(ast.Pass(), line)] if key == "body" else []
            setattr(made, key, kept or empty)
    return made


def _owner(node: ast.stmt) -> str:
    """Return NAME of the statement NAME.method(...), or ""."""
    call = node.value if isinstance(node, ast.Expr) else None
    called = call.func if isinstance(call, ast.Call) else None
    return _name(called.value) if isinstance(called, ast.Attribute) else ""


def _call_of(node: ast.Call, function: str, *, is_method: bool = False) -> ast.Call | None:
    """Return a call of a function: f(x), launch(f, args=(x,)) or spawn(f, args=(x,)); or None.

    torch.multiprocessing.spawn passes the number of the process first. A method is called as
    OWNER.METHOD(x).
    """
    if is_method:
        return node if _attribute(node.func) == function else None
    if _name(node.func) == function:
        return node
    passed = next((k.value for k in node.keywords if k.arg == "args"), None)
    if function not in map(_name, node.args) or not isinstance(passed, ast.Tuple):
        return None
    first = [ast.Constant(0)] if last_name_of_call(node) == "spawn" else []
    return ast.Call(ast.Name(function), [*first, *passed.elts], [])


def assignment(name: str, value: ast.expr) -> ast.stmt:
    """Return the statement NAME = VALUE."""
    made = ast.Assign([ast.Name(name, ast.Store())], value)
    return ast.fix_missing_locations(ast.copy_location(made, value))


def _given(
    call: ast.Call,
    arguments: ast.arguments,
    wanted: Sequence[str],
) -> dict[str, ast.expr]:
    """Return the values of parameters: what a call passes, else their defaults."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(not k.arg for k in call.keywords):
        return {}
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    optional = names[len(names) - len(arguments.defaults) :]
    defaults = dict(zip(optional, arguments.defaults, strict=True))
    only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found = defaults | {a.arg: d for a, d in only if d is not None}
    found |= dict(zip(names[names[:1] == ["self"] :], call.args, strict=False))
    found |= {k.arg: k.value for k in call.keywords if k.arg}
    return {name: found[name] for name in wanted if name in found}


def in_front_of(body: Sequence[ast.stmt], node: ast.AST) -> list[ast.stmt]:
    """Return the statements that run before a node; a loop around it is in its first round."""
    seen: list[ast.stmt] = []
    for line in body:
        if not any(inner is node for inner in ast.walk(line)):
            seen.append(line)
            continue
        if isinstance(line, ast.For):
            seen.append(first_of(line))
        for block in blocks(line):
            if any(inner is node for each in block for inner in ast.walk(each)):
                return [*seen, *in_front_of(block, node)]
        break
    return seen


def blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of statements in a for, while, with, if or try statement."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return []
    return [value for key in ("body", "orelse", "finalbody") if (value := getattr(node, key, []))]


def first_of(loop: ast.For) -> ast.stmt:
    """Return the assignment of the first round of a loop."""
    call = ast.Call(ast.Name("iter", ast.Load()), [loop.iter], [])
    value = ast.Call(ast.Name("next", ast.Load()), [call], [])
    return of_first_round(ast.Assign([loop.target], value), loop)


def of_first_round(made: ast.stmt, loop: ast.stmt) -> ast.stmt:
    """Return a statement with a mark: it stands for the first round of a loop."""
    made.first_round = True  # type: ignore[attr-defined]
    return ast.fix_missing_locations(ast.copy_location(made, loop))


def is_first(line: ast.stmt) -> bool:
    """Whether a statement stands for the first round of a loop."""
    return hasattr(line, "first_round")


def _first_round(loop: ast.For | ast.While, names: set[str]) -> list[ast.stmt]:
    """Return the statements of the first round of a loop that trains, up to the variables."""
    ends = [k for k, line in enumerate(loop.body) if not names.isdisjoint(bound(line))]
    lines = loop.body[: max(ends, default=-1) + 1]
    if isinstance(loop, ast.While):
        return lines
    return [first_of(loop), *lines]


def names_in(node: ast.AST) -> set[str]:
    """Return the names of variables in a tree."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def bound_in(lines: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements assign, define or import."""
    return {name for line in lines for name in bound(line)}


def bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement assigns, defines or imports."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, _COMPOUND):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id
            elif isinstance(inner, ast.Import | ast.ImportFrom):
                yield from bound(inner)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (a.asname or a.name.partition(".")[0] for a in node.names)
    else:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id


def _changed(node: ast.stmt, own: set[str], idle: Collection[str]) -> Iterator[str]:
    """Yield the variables that a statement changes: NAME.x = 1, NAME["k"] = 1 and NAME.add(1)."""
    for inner in ast.walk(node):
        targets: Sequence[ast.expr] = ()
        names = own
        if isinstance(inner, ast.Assign | ast.AugAssign):
            several = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            targets = [t for each in several for t in getattr(each, "elts", [each])]
            names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            names -= {"self", "torch", "np"}  # also parameters: args.n, args.d = x.shape
        elif isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
            called = inner.value.func
            if isinstance(called, ast.Attribute) and called.attr not in idle:
                targets = [called]
        for target in targets:
            owner = target
            while isinstance(owner, ast.Attribute | ast.Subscript):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner is not target and owner.id in names:
                yield owner.id


def _seeds(node: ast.stmt) -> bool:
    """Whether a statement is a call that seeds random numbers, as torch.manual_seed(0)."""
    return isinstance(node, ast.Expr) and "seed" in last_name_of_call(node.value).lower()


def _made(node: ast.expr) -> str:
    """Return NAME for NAME(...), also for NAME(...).to(device) and DataParallel(NAME(...))."""
    while isinstance(node, ast.Call) and (last_name_of_call(node) in MOVED):
        inner = next(iter(node.args), None) if isinstance(node.func, ast.Name) else None
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        moved = inner or (owner if isinstance(owner, ast.Call) else next(iter(node.args), None))
        if moved is None:
            break
        node = moved
    return last_name_of_call(node)


def last_name_of_call(node: ast.AST) -> str:
    """Return the last name of the function that is called, or "" for other nodes."""
    called = node.func if isinstance(node, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else _name(called)


def _name(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _attribute(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""
