"""The loss of a training loop: the lines of a script from a batch to backward().

FILE.py:FUNCTION.loss names the loss of the loop in a function, as FILE.py:main.loader names a
variable. FILE.py:loss names the loss of a loop at the top level, and FILE.py:CLASS.METHOD.loss the
loss of a loop in a method, such as Lightning's training_step. The lines are run for one sample at a
time, as for a batch that has only this sample. So the script may change the batch before the model,
add several losses, and use several outputs.

No code is run here: the lines are found in the syntax tree.
"""

import ast
import re
import symtable
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradscope.sources.training import file_of, is_main_block, parsed
from gradscope.sources.variables import (
    MAIN,
    MOVED,
    Variables,
    assignment,
    blocks,
    bound,
    bound_in,
    first_of,
    is_first,
    last_name_of_call,
    names_in,
    of_first_round,
    parameters,
)

BATCH = "_batch"  # the variable with the batch, in the function that is made of a loop
SIZED = "_sized"  # a function that returns 1 for the size of a batch, if one sample is computed
STEP = "training_step"  # the method of Lightning
_FETCHED = "_fetched"  # the variable of batches that the lines take from iterators
_LOSS = "_loss"  # the variable of a loss that a with statement computes
_LOOPS = (ast.For, ast.While)
_NEXT = {"next", "__next__"}
_GETS = re.compile("batch", re.I)  # functions that return a batch
_DRAWS = re.compile("batch|sample|fetch|draw|next", re.I)  # and others, if the script runs
_SCALES = {"scale", "scale_loss"}
_SCALERS = re.compile(r"scaler|amp|accelerator|fabric", re.I)
# sizes of batches, and numbers of batches that share an update
_SIZES = re.compile(
    r"^(\w*_)?(batch_?size|bsz?|\w*accum\w*|world_size|iter_size|update_freq)$", re.I
)
_BATCH_SIZE = re.compile(r"^(\w*_)?(batch_?size|bsz?|bs|nbatch)$", re.I)
# context managers that change no number, or that change precision only
_AROUND = {"autocast", "tqdm", "no_sync", "accumulate", "profile", "record_function"}
_AROUND |= {"set_detect_anomaly", "detect_anomaly", "enable_grad", "trange", "join", "Timer"}


@dataclass(frozen=True)
class Loop:
    """A training loop, from a batch to the loss."""

    place: str  # FUNCTION, CLASS.METHOD, "__main__", or "" for the top level
    variable: str  # the name of the loss, or "loss" for an expression
    target: ast.expr  # the variables of a batch
    model: str  # NAME, self.NAME, or self
    body: tuple[ast.stmt, ...]  # the lines that compute the loss of a batch
    value: ast.expr  # the loss
    before: tuple[ast.stmt, ...]  # the lines in front of the loop that the body needs
    outer: tuple[ast.stmt, ...]  # lines of callers, for parameters of the function
    parameters: tuple[str, ...]  # these parameters, and names of the block if __name__ == ...
    file: Path  # the file with the loop, which the script may import
    origin: str  # the variable of the script that is the model, FUNCTION.NAME, or ""
    first: tuple[str, ...]  # variables that later rounds change, as a number of the epoch

    @property
    def name(self) -> str:
        """FUNCTION.loss, as in a reference."""
        return f"{self.place}.{self.variable}".removeprefix(".")

    @property
    def lines(self) -> tuple[int, int]:
        """The numbers of the first and the last line."""
        every = [n.lineno for n in (*self.body, self.value) if hasattr(n, "lineno")]
        return min(every), max(every)

    @property
    def unpacks(self) -> bool:
        """Whether a batch is a sequence: x, y = batch, batch[0], or [t.cpu() for t in batch]."""
        if not isinstance(self.target, ast.Name):
            return True
        for node in (n for line in self.every for n in ast.walk(line)):
            if isinstance(node, ast.Assign):
                held, several = node.value, isinstance(node.targets[0], ast.Tuple)
            elif isinstance(node, ast.Subscript):
                held, several = node.value, type(getattr(node.slice, "value", None)) is int
            elif isinstance(node, ast.comprehension | ast.For):
                held, several = node.iter, True
            else:
                continue
            if several and _name(held) == self.target.id:
                return True
        return False

    @property
    def of_samples(self) -> bool:
        """Whether the loop is over samples, whose batch axis it adds: model(x[None])."""
        names = names_in(self.target)
        for node in (n for line in self.every for n in ast.walk(line)):
            if isinstance(node, ast.Subscript):
                slices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                adds, held = _is(slices[0], None), node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                adds, held = node.func.attr == "unsqueeze" and _is(node.args[0], 0), node.func.value
            else:
                continue
            if adds and _name(held) in names:
                return True
        return False

    @property
    def every(self) -> list[ast.stmt]:
        """All lines that are run."""
        return [*self.outer, *self.before, *self.body, ast.Expr(self.value)]

    @property
    def keys(self) -> list[str]:
        """The keys that the lines read of a batch that is a dict, batch["image"]."""
        if not isinstance(self.target, ast.Name):
            return []
        name = self.target.id
        nodes = (n for line in (*self.body, self.value) for n in ast.walk(line))
        read = (n for n in nodes if isinstance(n, ast.Subscript) and _name(n.value) == name)
        found = (getattr(n.slice, "value", None) for n in read)
        return list(dict.fromkeys(key for key in found if isinstance(key, str)))

    @property
    def code(self) -> ast.Module:
        """A module with a function of the parameters; it returns the loss of (model, batch).

        Lines in front of the loop that do not read the model are run once, in the outer function.
        """
        of_self = self.model.startswith("self.")
        taken = "_model" if of_self else self.model
        once, each, made = list[ast.stmt](), list[ast.stmt](), {taken}
        if of_self:  # the model is an attribute of a trainer, which is copied
            once += ast.parse("import copy as _copy\n_self = self").body
            each += ast.parse(f"self = _copy.copy(_self)\n{self.model} = {taken}").body
            made.add("self")
        for line in self.before:
            depends = not made.isdisjoint(_read(line))
            (each if depends else once).append(line)
            made |= {*bound(line)} if depends else set()
        each += [ast.Assign([self.target], ast.Name(BATCH, ast.Load())), *self.body]
        lines = [*each, ast.Return(self.value)]
        kept = sorted(_exposed(lines) & bound_in(lines) - {BATCH, taken})
        given = ast.arguments([], [ast.arg(taken), ast.arg(BATCH)], None, [], [], None, [])
        given.kwonlyargs = [ast.arg(name) for name in kept]
        given.kw_defaults = [ast.Name(name, ast.Load()) for name in kept]
        of = ast.FunctionDef("loss", given, lines, [])
        whole = [*once, of, ast.Return(ast.Name("loss", ast.Load()))]
        arguments = ast.arguments([], [ast.arg(n) for n in self.parameters], None, [], [], None, [])
        function = ast.FunctionDef("make_loss", arguments, whole, [])
        return ast.fix_missing_locations(ast.Module([function], []))


def loops(tree: ast.Module, path: Path, owners: Iterable[str] = ()) -> list[Loop]:
    """Return the training loops of a script whose loss can be computed for one sample.

    A loop may be in a function or a class that the script imports from a file in its folder, or in
    the folder above.

    Args:
        tree: The script.
        path: Its file.
        owners: Variables that hold trained models in other scripts.
    """
    trees = {path: tree} | {file: other for _, _, file, other in _imported(tree, path)}
    known = {name for each in trees.values() for name in _owners(each)} | {*owners}
    places = [(place, path, node) for place, node in _places(tree)]
    own = {place for place, *_ in places}
    for alias, name, file, other in _imported(tree, path):
        for place, node in _places(other):
            first, dot, rest = place.partition(".")
            if place in ("", MAIN):
                continue
            if not name:  # a module: its functions
                places.append((f"{alias}.{place}", file, node))
            elif first == name:
                places.append((alias + dot + rest, file, node))
            elif not dot and place not in own:  # a function that the imported function may call
                places.append((place, file, node))
    others = {
        place: node
        for place, file, node in places
        if file != path and isinstance(node, ast.FunctionDef)
    }
    callers = Variables(tree, path, others)
    found: list[Loop | None] = []
    for place, file, node in places:
        inner = callers if file == path else Variables(trees[file], file)
        context = _Context(place, file, node, callers, inner, known)
        if isinstance(node, ast.FunctionDef) and node.name == STEP:
            found.append(_step(context))
        body = node.body if isinstance(node, ast.FunctionDef | ast.If) else _top(tree)
        inside = [*_inner_loops(body, ())]
        if isinstance(node, ast.FunctionDef) and not inside and any(map(_calls_backward, body)):
            inside = [(loop, []) for loop in _around(context, node)]
        found += [_loop(context, loop, before) for loop, before in inside]
    return [loop for loop in found if loop is not None]


def loop_named(tree: ast.Module, path: Path, name: str) -> Loop | None:
    """Return the loop of FILE.py:NAME, or None."""
    return next((loop for loop in loops(tree, path) if loop.name == name), None)


@dataclass(frozen=True)
class Round:
    """A round of a loop over batches that runs, up to a line that calls backward()."""

    target: ast.expr  # the variables of a batch
    body: tuple[ast.stmt, ...]  # the lines from a batch to backward()
    value: ast.expr | None  # the loss, or None if a function that the last line calls has it
    head: int  # the line of the loop, or 0 if a call of a function is a round
    start: range  # the first lines at which the variables of a batch have their values
    lines: tuple[int, int]  # its first line, and the line that calls backward() or leads to it
    fetches: bool = False  # whether the lines take the batches from iterators of DataLoaders

    @property
    def names(self) -> set[str]:
        """The names that the lines read."""
        value = self.value or ast.Constant(None)
        return {*_exposed([*self.body, ast.Expr(value)])} | _free(self.body, value)

    def code(self, names: Sequence[str]) -> ast.Module:
        """A module with a function make_loss(names) that returns the loss of (_, batch)."""
        value = self.value or ast.Constant(None)
        loop = Loop("", "", self.target, "_", self.body, value, (), (), (*names,), Path(), "", ())
        return loop.code

    @property
    def carried(self) -> set[str]:
        """The variables that a round takes from the round before."""
        value = self.value or ast.Constant(None)
        lines = [*self.body, ast.Expr(value)]
        return _exposed(lines) & bound_in(lines) - names_in(self.target)


def rounds(
    tree: ast.Module,
    function: tuple[str, int] | None,
    line: int,
    variables: Variables,
    *,
    whole: bool = False,
) -> Iterator[Round]:
    """Yield the rounds of loops over batches around a line that runs, of the innermost loop first.

    The last one is the function itself: each call is a round, and its parameters are the batch.

    Args:
        tree: The file.
        function: The name and the first line of the function that runs, or None for the top level.
        line: The line.
        variables: The variables of the file.
        whole: The round calls backward() several times: whole statements of the loop are run.
    """
    node: ast.AST | None = tree
    if function is not None:
        node = next((n for n in ast.walk(tree) if _is_function(n, *function)), None)
    body: list[ast.stmt] = getattr(node, "body", [])
    way = _way_to(body, line)
    if not way:
        return
    own = bound_in(body)
    fetched = ast.Name(_FETCHED, ast.Store())
    for depth, (_, loop) in reversed([*enumerate(way)]):
        if isinstance(loop, _LOOPS) and depth < len(way) - 1:
            inner = way[depth + 1 : depth + 2] if whole else way[depth + 1 :]
            lines, value = _lines_to(inner, whole=whole)
            around = loop.lineno, loop.body[0], inner[-1][1]
            for target, rest in _batches(loop, lines):
                yield _round(around, lines, value, target, rest, variables, own)
            found = _round(around, lines, value, fetched, lines, variables, own)
            yield replace(found, fetches=True)
    if isinstance(node, ast.FunctionDef):
        way = way[:1] if whole else way
        lines, value = _lines_to(way, whole=whole)
        for target, rest in _batches(ast.While(ast.Constant(True), [], []), lines):
            around = body[0].lineno, body[0], way[-1][1]
            yield _round(around, lines, value, target, rest, variables, own)
        names: list[ast.expr] = [ast.Name(n, ast.Store()) for n in parameters(node) if n != "self"]
        every = ast.Tuple(names, ast.Store())
        around = 0, body[0], way[-1][1]
        yield _round(around, lines, value, every, lines, variables, own)
        found = _round(around, lines, value, fetched, lines, variables, own)
        yield replace(found, fetches=True)


def _batches(
    loop: ast.For | ast.While, lines: Sequence[ast.stmt]
) -> Iterator[tuple[ast.expr, Sequence[ast.stmt]]]:
    """Yield the variables of a batch, and the lines after their assignment, in several ways.

    They are of a statement x = next(batches), of the loop, of a call such as get_batch(), and of
    statements such as part = samples[start:end].
    """
    found, rest = _batch(loop, lines)
    target = (_target(loop) or _zipped(loop)) if isinstance(loop, ast.For) else None
    ways = [(found, rest)] if found is not None else []
    ways += [(target, lines)] if target is not None and target is not found else []
    for k, line in enumerate(lines):
        if not isinstance(line, ast.Assign):
            continue
        values = line.value.elts if isinstance(line.value, ast.Tuple) else [line.value]
        slices = [getattr(_unmoved(each), "slice", None) for each in values]
        gets = _DRAWS.search(last_name_of_call(line.value))
        if gets or None not in [getattr(each, "upper", None) for each in slices]:
            ways.append((line.targets[0], lines[k + 1 :]))
    yield from ways


def _zipped(loop: ast.For) -> ast.expr | None:
    """Return the variables of a loop over batches of several loaders, zip(a, b)."""
    node, target = loop.iter, loop.target
    while isinstance(node, ast.Call) and node.args and last_name_of_call(node) != "zip":
        if last_name_of_call(node) == "enumerate" and isinstance(target, ast.Tuple):
            target = target.elts[-1]
        node = node.args[0]
    return target if last_name_of_call(node) == "zip" else None


def _is_function(node: ast.AST, name: str, first: int) -> bool:
    """Whether a node is the function of a code object, whose first line may be a decorator."""
    if not isinstance(node, ast.FunctionDef) or node.name != name:
        return False
    return min([node.lineno, *(n.lineno for n in node.decorator_list)]) == first


def _way_to(body: Sequence[ast.stmt], line: int) -> list[tuple[list[ast.stmt], ast.stmt]]:
    """Return (statements in front, statement) for each level of blocks around a line."""
    around = [k for k, s in enumerate(body) if s.lineno <= line <= (s.end_lineno or s.lineno)]
    around.sort(key=lambda k: not _calls_backward(body[k]))  # several statements on a line
    for k in around[:1]:
        every = [*blocks(body[k]), *(h.body for h in getattr(body[k], "handlers", ()))]
        inner = (way for block in every if (way := _way_to(block, line)))
        return [([*body[:k]], body[k]), *next(inner, [])]
    return []


def _round(
    around: tuple[int, ast.stmt, ast.stmt],
    lines: Sequence[ast.stmt],
    value: ast.expr | None,
    target: ast.expr,
    rest: Sequence[ast.stmt],
    variables: Variables,
    own: set[str],
) -> Round:
    """Return a round of a loop.

    Args:
        around: The line of the loop (0 for a call of a function), its first and last statement.
        lines: The statements up to backward().
        value: The loss, or None; see `_lines_to`.
        target: The variables of a batch.
        rest: The statements after their assignment, up to backward().
        variables: The variables of the file.
        own: The names that the function assigns.
    """
    head, first, last = around
    kept = {id(line) for line in rest}
    taken = [k for k, line in enumerate(lines) if id(line) not in kept]
    if value is not None:
        rest, value = _without_attributes(rest, value)
    change = _Undivided(bound_in(rest))
    body = [_Unlooped().visit(change.visit(deepcopy(each))) for each in rest]
    if value is not None:
        value = _Sized().visit(change.visit(deepcopy(value)))
        body, _ = variables.needed(body, names_in(value), own)
    body = [_Sized().visit(each) for each in body]
    start = first
    if taken:  # the lines that take the batch
        start = next(iter(lines[taken[-1] + 1 :]), last)
    return Round(
        target=target,
        body=tuple(body),
        value=value,
        head=head,
        start=_lines_of(start),
        lines=(first.lineno, last.lineno),
    )


def _lines_of(line: ast.stmt) -> range:
    """Return the lines of a statement, without the blocks in it."""
    inside = [each.lineno for block in blocks(line) for each in block]
    end = min(inside, default=(line.end_lineno or line.lineno) + 1)
    return range(line.lineno, max(end, line.lineno + 1))


def _lines_to(
    way: Sequence[tuple[list[ast.stmt], ast.stmt]], *, whole: bool = False
) -> tuple[list[ast.stmt], ast.expr | None]:
    """Return the statements up to a call of backward(), and the loss.

    If the last statement is run as it is, the loss is None: with `whole`, or if a function that it
    calls calls backward().
    """
    (before, line), *inner = way
    lines = [each for one in before for each in _spliced(one)]
    if not inner:
        is_direct = not whole and any(map(_is_backward, ast.walk(line)))
        return (lines, _loss_of(line)) if is_direct else ([*lines, line], None)
    inside, value = _lines_to(inner)
    if isinstance(line, ast.With) and not _is_around(line):
        if value is not None:
            inside = [*inside, assignment(_LOSS, value)]
            value = ast.Name(_LOSS, ast.Load())
        made = ast.With(line.items, inside)
        inside = [ast.fix_missing_locations(ast.copy_location(made, line))]
    elif isinstance(line, ast.For):
        inside = [first_of(line), *inside]
    return [*lines, *inside], value


@dataclass(frozen=True)
class _Context:
    """A place with loops: a function, the top level, or the block if __name__ == "__main__"."""

    place: str
    file: Path
    node: ast.AST
    callers: Variables  # the variables of the script
    inner: Variables  # the variables of the place's file
    owners: set[str]  # the variables with trained models

    @property
    def given(self) -> list[str]:
        """The parameters of a function."""
        return parameters(self.node) if isinstance(self.node, ast.FunctionDef) else []


def _imported(tree: ast.Module, path: Path) -> list[tuple[str, str, Path, ast.Module]]:
    """Return what a script imports from files nearby: (name here, name there or "", file, tree)."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            every = [(a.asname or a.name, node.module, a.name) for a in node.names]
            every += [(a.asname or a.name, f"{node.module}.{a.name}", "") for a in node.names]
        elif isinstance(node, ast.Import):
            every = [(a.asname or a.name, a.name, "") for a in node.names]
        else:
            continue
        for alias, module, name in every:
            file = file_of(module, path) or _exported(module, name, path)
            if file is not None and (other := parsed(file)) is not None:
                found.append((alias, name, file, other))
    return found


def _exported(package: str, name: str, path: Path) -> Path | None:
    """Return the file of a name that the __init__.py of a package nearby imports, or None."""
    place = file_of(f"{package}.__init__", path) if name else None
    if place is None or (tree := parsed(place)) is None:
        return None
    for node in (n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module):
        if name in (a.asname or a.name for a in node.names):
            return file_of(str(node.module).removeprefix(f"{package}."), place)
    return None


def _around(context: _Context, function: ast.FunctionDef) -> Iterator[ast.For | ast.While]:
    """Yield loops with the statements of a function that trains on one batch.

    The batch is taken in the function, batch = next(batches), or is passed by a loop that calls it:
    for x, y in loader: train(x, y), or train(*get_batch()).
    """
    yield ast.copy_location(ast.While(ast.Constant(True), function.body, []), function)
    names = [name for name in context.given if name != "self"]
    for loop, call in context.callers.looped_calls(context.place):
        if any(isinstance(each, ast.Starred) for each in call.args):
            given: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
            target: ast.expr = ast.Tuple(given, ast.Store())
            passed, source = list[ast.stmt](), ast.Name("batches", ast.Load())
        else:
            read = names_in(loop.target)
            values = context.callers.given(function, call)
            passed = [
                ast.copy_location(assignment(k, v), function)
                for k, v in values.items()
                if names_in(v) & read
            ]
            target, source = loop.target, loop.iter  # type: ignore[assignment]
        if passed or source is not loop.iter:
            made = ast.For(target, source, [*passed, *function.body], [])
            yield ast.fix_missing_locations(ast.copy_location(made, function))


def _places(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions, the methods as CLASS.METHOD, the block of __main__, the top level."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef))
            yield from ((f"{node.name}.{n.name}", n) for n in methods)
        elif is_main_block(node):
            yield MAIN, node
    yield "", tree


def _top(tree: ast.Module) -> list[ast.stmt]:
    return [node for node in tree.body if not is_main_block(node)]


def _inner_loops(
    body: Sequence[ast.stmt], before: Sequence[ast.stmt]
) -> Iterator[tuple[ast.For | ast.While, list[ast.stmt]]]:
    """Yield the innermost loops that call backward(), with the statements in front of them.

    A loop around a loop is replaced by its first round.
    """
    seen = list(before)
    for line in body:
        if isinstance(line, ast.FunctionDef | ast.ClassDef) or not _calls_backward(line):
            seen.append(line)
        elif isinstance(line, ast.For | ast.While):
            within = (n for n in ast.walk(line) if isinstance(n, _LOOPS) and n is not line)
            if not any(map(_calls_backward, within)):
                yield line, seen
                continue
            first = [first_of(line)] if isinstance(line, ast.For) else []
            yield from _inner_loops(line.body, [*seen, *first])
        else:
            for inner in blocks(line):
                yield from _inner_loops(inner, seen)


def _zero(name: str, place: ast.stmt) -> ast.stmt:
    """Return the assignment of the number of the first batch."""
    return of_first_round(ast.Assign([ast.Name(name, ast.Store())], ast.Constant(0)), place)


def _loop(context: _Context, loop: ast.For | ast.While, before: Sequence[ast.stmt]) -> Loop | None:
    """Return what a loop computes, or None if its lines cannot be run for one sample."""
    ways = (_way(context, loop, before, *way) for way in _until_backward(loop.body))
    return next((found for found in ways if found is not None), None)


def _way(
    context: _Context,
    loop: ast.For | ast.While,
    before: Sequence[ast.stmt],
    lines: list[ast.stmt],
    value: ast.expr,
) -> Loop | None:
    """Return what the statements up to one call of backward() compute, or None."""
    target, rest = _batch(loop, lines)
    if target is None:
        return None
    numbered = isinstance(loop, ast.For) and rest is lines
    lines, value = _without_attributes(rest, value)
    change = _Undivided(bound_in(lines))
    lines = [_Unlooped().visit(change.visit(deepcopy(line))) for line in lines]
    value = change.visit(deepcopy(value))
    own = bound_in([*before, *lines])
    body, needed = context.inner.needed(lines, names_in(value), own)
    batch = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    index = ast.walk(loop.target) if numbered and isinstance(loop, ast.For) else ()
    for name in {n.id for n in index if isinstance(n, ast.Name)} & needed - batch:
        body.insert(0, _zero(name, loop))
    owners = context.owners
    known = owners & {*own, *_free(body, value)} | {f"self.{name}" for name in owners}
    known |= context.callers.passed(context.place, owners)
    model = _model_in([*body, ast.Expr(value)], known)
    if model is None:
        return None
    body = [line for line in body if not _moves(line, model)]
    return _finished(context, value, target, model, body, before, bound_in(loop.body))


def _moves(line: ast.stmt, model: str) -> bool:
    """Whether a statement is MODEL = MODEL.train(), or the same with another such method."""
    if not isinstance(line, ast.Assign) or ast.unparse(line.targets[0]) != model:
        return False
    value = line.value
    while isinstance(value, ast.Call) and last_name_of_call(value) in MOVED:
        inner = value.func.value if isinstance(value.func, ast.Attribute) else value
        value = inner if inner is not value else next(iter(value.args), ast.Constant(None))
    return ast.unparse(value) == model


def _without_attributes(
    lines: Sequence[ast.stmt], value: ast.expr
) -> tuple[list[ast.stmt], ast.expr]:
    """Replace attributes self.NAME that statements assign by variables."""
    nodes = [n for line in lines for n in ast.walk(line) if isinstance(n, ast.Attribute)]
    own = {n.attr for n in nodes if _name(n.value) == "self" and isinstance(n.ctx, ast.Store)}
    if not own:
        return list(lines), value
    change = _Renamed(own)
    return [change.visit(deepcopy(line)) for line in lines], change.visit(deepcopy(value))


class _Undivided(ast.NodeTransformer):
    """Leaves out divisions by sizes of batches and numbers of steps, and scales of AMP.

    Examples are loss / accumulation_steps and loss / args.batch_size: the loss of a batch of one
    sample is not divided. Sizes that the loop assigns, as n = len(x), are 1 in any case.
    """

    def __init__(self, own: set[str]) -> None:
        self.own = own

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Return LOSS of LOSS / SIZE."""
        self.generic_visit(node)
        return node.left if isinstance(node.op, ast.Div) and self._is_size(node.right) else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Leave out LOSS /= SIZE."""
        self.generic_visit(node)
        divides = isinstance(node.op, ast.Div) and self._is_size(node.value)
        return ast.copy_location(ast.Pass(), node) if divides else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Return LOSS of scaler.scale(LOSS)."""
        self.generic_visit(node)
        owner = ast.unparse(node.func).rpartition(".")[0]
        scales = last_name_of_call(node) in _SCALES and _SCALERS.search(owner)
        return node.args[0] if scales and node.args else node

    def _is_size(self, node: ast.expr) -> bool:
        name = node.attr if isinstance(node, ast.Attribute) else _name(node)
        return bool(_SIZES.search(name)) and _name(node) not in self.own


class _Sized(ast.NodeTransformer):
    """Replaces sizes of batches, such as args.batch_size, by SIZED(args.batch_size)."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replace one name."""
        return self._sized(node, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace one attribute."""
        return self._sized(self.generic_visit(node), node.attr)

    def _sized(self, node: Any, name: str) -> ast.AST:
        if not isinstance(node.ctx, ast.Load) or not _BATCH_SIZE.search(name):
            return node  # type: ignore[no-any-return]
        return ast.copy_location(ast.Call(ast.Name(SIZED, ast.Load()), [node], []), node)


class _Unlooped(ast.NodeTransformer):
    """Leaves out `continue` and `break` of the loop over batches."""

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        """Return `pass`."""
        return ast.copy_location(ast.Pass(), node)

    def visit_Break(self, node: ast.Break) -> ast.AST:
        """Return `pass`."""
        return ast.copy_location(ast.Pass(), node)

    def visit_For(self, node: ast.For) -> ast.AST:
        """Return an inner loop unchanged."""
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        """Return an inner loop unchanged."""
        return node


class _Renamed(ast.NodeTransformer):
    """Replaces self.NAME by the variable self_NAME."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace one attribute."""
        if _name(node.value) == "self" and node.attr in self.names:
            return ast.copy_location(ast.Name(f"self_{node.attr}", node.ctx), node)
        return self.generic_visit(node)


def _step(context: _Context) -> Loop | None:
    """Return the lines of Lightning's training_step, whose model is self."""
    assert isinstance(context.node, ast.FunctionDef)
    body, names = context.node.body, context.given
    ends = [k for k, line in enumerate(body) if isinstance(line, ast.Return)]
    value = body[ends[-1]].value if ends else None  # type: ignore[attr-defined]
    if isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        value = next((v for k, v in pairs if getattr(k, "value", None) == "loss"), None)
    if value is None or len(names) < 2:
        return None
    lines, needed = context.inner.needed(body[: ends[-1]], names_in(value), bound_in(body))
    for name in needed & {*names[2:]}:  # the number of the batch
        lines.insert(0, _zero(name, body[0]))
    return _finished(context, value, ast.Name(names[1], ast.Store()), "self", lines, (), set())


def _finished(
    context: _Context,
    value: ast.expr,
    target: ast.expr,
    model: str,
    body: Sequence[ast.stmt],
    before: Sequence[ast.stmt],
    changed: set[str],
) -> Loop | None:
    """Return the loop with the lines in front of it, and the lines of its callers.

    `changed` are the variables that the loop assigns.
    """
    place, callers = context.place, context.callers
    taken = {model}  # "self.NAME" is no variable
    own = bound_in([*before, *body])
    names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    wanted = {*_exposed([*body, ast.Expr(value)]), *_free(body, value)} - names - taken
    around = before if place else _cut(before, callers)
    lines, needed = context.inner.needed(around, wanted, own, taken, whole=True)
    free = needed - own - {*context.given}
    if context.inner.reads(free) & taken:  # made of another object than the model that is given
        return None
    parameters = sorted(needed & {*context.given} - taken)
    found = callers.of_parameters(place, {*parameters}, taken) if parameters else []
    if found is None:
        return None
    if place != MAIN and context.file == callers.path:
        shared = callers.globals_read(needed - own - {*context.given, *taken})
        rest = callers.computing(MAIN, shared, taken) if shared else []
        if rest is None:
            return None
        found, parameters = [*found, *rest], sorted({*parameters, *shared})
    if any(map(_calls_backward, (*lines, *found, *body))):
        return None
    variable = value.id if isinstance(value, ast.Name) else "loss"
    rounds = {name for line in (*lines, *found, *body) if is_first(line) for name in bound(line)}
    first = rounds | ({*_exposed([*body, ast.Expr(value)])} & changed - names)
    return Loop(
        place=place,
        variable=variable.removeprefix("self_"),
        target=target,
        model=model,
        body=tuple(body),
        value=value,
        before=tuple(lines),
        outer=tuple(found),
        parameters=tuple(parameters),
        file=context.file,
        first=tuple(sorted(first - taken)),
        origin=_origin(context, model),
    )


def _origin(context: _Context, model: str) -> str:
    """Return the variable of the script that is the model, FUNCTION.NAME, or none: ""."""
    owner, _, attribute = model.rpartition(".")
    if owner == "self":
        kind = context.place.rpartition(".")[0]
        return context.callers.origin_of_attribute(kind, attribute)
    return "" if model == "self" else context.callers.origin(context.place, model)


def _cut(before: Sequence[ast.stmt], variables: Variables) -> list[ast.stmt]:
    """Return the statements in front of a loop at the top level that the import does not run."""
    run = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    kept = {id(line) for line in variables.imported}
    return [line for line in before if id(line) not in kept and not isinstance(line, run)]


def _until_backward(body: Sequence[ast.stmt]) -> Iterator[tuple[list[ast.stmt], ast.expr]]:
    """Yield the statements up to a call of backward(), and the expression of its loss.

    Branches of an if statement are different ways to the loss; later losses are not the first.
    """
    lines: list[ast.stmt] = []
    for line in body:
        if not _calls_backward(line) or isinstance(line, ast.FunctionDef):
            lines += _spliced(line)
            continue
        inside = blocks(line)
        if not inside:
            yield lines, _loss_of(line)
            return
        if isinstance(line, ast.With) and not _is_around(line):
            return
        found = [way for block in inside for way in _until_backward(block)]
        yield from (([*lines, *inner], value) for inner, value in found)
        if found:
            return


def _spliced(line: ast.stmt) -> list[ast.stmt]:
    """Return the statements in `with autocast():`, or the statement itself."""
    if not (isinstance(line, ast.With) and _is_around(line)):
        return [line]
    return [inner for each in line.body for inner in _spliced(each)]


def _is_around(node: ast.With) -> bool:
    """Whether the contexts of a with statement change no number."""
    calls = (item.context_expr for item in node.items)
    return all(last_name_of_call(call) in _AROUND for call in calls)


def _loss_of(line: ast.stmt) -> ast.expr:
    """Return LOSS of LOSS.backward(), scaler.scale(LOSS).backward(), accelerator.backward(LOSS)."""
    call = next(node for node in ast.walk(line) if _is_backward(node))
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    first = next(iter(call.args), None)
    value = first if isinstance(first, ast.Name | ast.BinOp | ast.Call) else call.func.value
    if isinstance(value, ast.Call) and value.args and last_name_of_call(value) in _SCALES:
        return value.args[0]
    return value


def _is_backward(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    names = ("backward", "manual_backward")
    return isinstance(called, ast.Attribute) and called.attr in names


def _calls_backward(node: ast.AST) -> bool:
    return any(map(_is_backward, ast.walk(node)))


def _batch(
    loop: ast.For | ast.While, lines: Sequence[ast.stmt]
) -> tuple[ast.expr | None, Sequence[ast.stmt]]:
    """Return the variables of a batch, and the statements without their assignment.

    They are the target of a loop over batches, or are assigned by batch = next(batches). Loops over
    positions assign x, y = get_batch(), or x = images[k : k + 32].
    """
    for k, line in enumerate(lines):
        tried = line.body[0] if isinstance(line, ast.Try) and line.body else line
        if not isinstance(tried, ast.Assign):
            continue
        value = _unmoved(tried.value)
        if last_name_of_call(value) in _NEXT:
            return tried.targets[0], lines[k + 1 :]
        if isinstance(value, ast.Subscript) and last_name_of_call(value.value) in _NEXT:
            entry = ast.Subscript(ast.Name("_next", ast.Load()), value.slice, ast.Load())
            first = ast.Assign(tried.targets, entry)  # x = next(batches)[0]
            made = ast.fix_missing_locations(ast.copy_location(first, tried))
            return ast.Name("_next", ast.Store()), [made, *lines[k + 1 :]]
    target = _target(loop) if isinstance(loop, ast.For) else None
    if target is not None and not _is_number(target, lines):
        return target, lines
    for k, line in enumerate(lines):
        if isinstance(line, ast.Assign) and _GETS.search(last_name_of_call(line.value)):
            return line.targets[0], lines[k + 1 :]
    return _sliced(loop, lines)


def _is_number(target: ast.expr, lines: Sequence[ast.stmt]) -> bool:
    """Whether a loop's variable is the number of a batch: data = load_batch(k)."""
    reads = [line for line in lines if _name(target) in names_in(line)]
    values = [line.value for line in reads[:1] if isinstance(line, ast.Assign)]
    gets = (isinstance(v, ast.Call) and _GETS.search(last_name_of_call(v)) for v in values)
    return isinstance(target, ast.Name) and any(gets) and len(reads) == 1


def _unmoved(value: ast.expr) -> ast.expr:
    """Return CALL of CALL.to(device)."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr not in MOVED:
            break
        value = value.func.value
    return value


def _target(loop: ast.For) -> ast.expr | None:
    """Return the variables of a batch in a loop over batches, or None for other loops."""
    node, numbered, target = loop.iter, False, loop.target
    while isinstance(node, ast.Call):
        name = last_name_of_call(node)
        if name in ("range", "trange", "zip", "count"):
            return None
        numbered |= name == "enumerate"
        if not node.args:
            break
        node = node.args[0]
    if not numbered:
        return target
    inner = target.elts if isinstance(target, ast.Tuple) else []
    return inner[1] if len(inner) == 2 else None


def _sliced(
    loop: ast.For | ast.While, lines: Sequence[ast.stmt]
) -> tuple[ast.expr | None, Sequence[ast.stmt]]:
    """Return the variables that are rows of arrays, x = images[k : k + 32]; inputs first."""
    nodes = [n for line in lines for n in ast.walk(line)]
    slices = [n.slice for n in nodes if isinstance(n, ast.Subscript)]
    indices = {name for each in slices for name in names_in(each)}  # idx = order[k : k + 32]
    start = names_in(loop.target) if isinstance(loop, ast.For) else set()
    if start.isdisjoint(indices):
        return None, lines
    rows = [
        line
        for line in lines
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and line.targets[0].id not in indices
        and isinstance(line.value, ast.Subscript)
        and not names_in(line.value.slice).isdisjoint(indices)
    ]
    names = [ast.unparse(line.targets[0]) for line in rows]
    passed = {
        name for n in nodes if isinstance(n, ast.Call) and n.args for name in names_in(n.args[0])
    }
    names.sort(key=lambda name: name not in passed)  # model(x), criterion(out, y)
    made: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
    rest = [line for line in lines if line not in rows]
    return (made[0] if len(made) == 1 else ast.Tuple(made, ast.Store())) if made else None, rest


def _model_in(lines: Iterable[ast.stmt], owners: set[str]) -> str | None:
    """Return the only trained model that statements use: NAME or self.NAME."""
    found: dict[str, None] = {}
    for node in (n for line in lines for n in ast.walk(line)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in owners:
            found[ast.unparse(node)] = None
        elif isinstance(node, ast.Name) and node.id in owners:
            found[node.id] = None
    return next(iter(found)) if len(found) == 1 else None


def _owners(tree: ast.Module) -> set[str]:
    """Return the last names of variables with a call of parameters()."""
    calls = (n for n in ast.walk(tree) if last_name_of_call(n) == "parameters")
    made = (n.func for n in calls if isinstance(n, ast.Call))
    owners = (n.value for n in made if isinstance(n, ast.Attribute))
    return {getattr(n, "attr", "") or _name(n) for n in owners} - {"", "self"}


def _free(body: Sequence[ast.stmt], value: ast.expr) -> set[str]:
    """Return the names that statements and a value read and do not define."""
    lines = ast.unparse(ast.Module([*body, ast.Expr(value)], []))
    text = "def f():\n" + "\n".join(f"    {line}" for line in lines.splitlines())
    (table,) = symtable.symtable(text, "loop", "exec").get_children()
    found, waiting = set[str](), [table]
    while waiting:
        each = waiting.pop()
        found |= {s.get_name() for s in each.get_symbols() if s.is_global() and s.is_referenced()}
        waiting += each.get_children()
    return found


def _exposed(lines: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements read before they assign them."""
    found, done = set[str](), set[str]()
    for line in lines:
        inside = blocks(line)
        if inside:
            head = [n for n in ast.iter_child_nodes(line) if isinstance(n, ast.expr)]
            head += [item.context_expr for item in getattr(line, "items", ())]
            found |= {name for n in head for name in _read(n)} - done
            inner = {n for n in bound(line) if not isinstance(line, ast.For)}
            for block in inside:
                found |= _exposed(block) - done - (set() if inner else {*bound(line)})
        else:
            found |= _read(line) - done
        if isinstance(line, ast.AugAssign) and isinstance(line.target, ast.Name):
            found |= {line.target.id} - done
        done |= {*bound(line)}
    return found


def _read(line: ast.AST) -> set[str]:
    """Return the names that a statement reads, without variables of comprehensions."""
    nodes = list(ast.walk(line))
    inner = (n.target for n in nodes if isinstance(n, ast.comprehension))
    own = {n.id for each in inner for n in ast.walk(each) if isinstance(n, ast.Name)}
    own |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - own


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _name(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""
