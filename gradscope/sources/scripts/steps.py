"""Training steps in syntax trees: the statements from a batch to `backward()`. No script is run.

A step is a list of lines. A line either binds names to parts of the batch or of the model's result,
or it is a statement that the loss may need.
"""

import ast
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradscope.sources.scripts.syntax import (
    Script,
    assigned_pairs,
    bound_arguments,
    copy_of,
    is_plain,
    key_of,
    last_name,
    parameters_of,
)

# (source, *keys): ("batch", 1) is batch[1], ("outputs", ".logits") is outputs.logits. Sources of
# further calls of the model are "outputs2", "outputs3", ...
Entry = tuple[Any, ...]
BATCH, OUTPUTS = "batch", "outputs"

# methods and functions that move a tensor, or wrap it
_MOVES = {"to", "cuda", "cpu", "Variable", "requires_grad_", "contiguous", "pin_memory"}
_SCALES = {"scale", "scale_loss"}  # of mixed precision: scaler.scale(loss)
_WRAPPERS = re.compile(r"accelerator|fabric|engine|optimi|scaler|^self$|trainer|^amp$")
_OPTIONS = re.compile(r"^(args?|opts?|options|config|cfg|conf|hparams|params|hps|flags)$", re.I)
_OF_TENSORS = {"shape", "dtype", "device", "data", "T", "mT", "grad", "real", "imag", "ndim"}
# conditions about the machine: a CPU in float32 takes the other branch
_MACHINE = re.compile(r"cuda|gpu|amp|fp16|scaler|distributed|apex|mixed_precision")
_SIZES = re.compile(
    r"^(\w*_)?(batch_?size|bsz?|accum\w*|world_size|iter_size|update_freq)$|^steps$", re.I
)
_MIXES = re.compile(r"\(?1\.?0? - (\w+)\)? \*|\* \(1\.?0? - \w+\)")  # (1 - lam) * loss
_COUNTERS = re.compile(r"^([eijknt]|ep|epoch|it|iteration|step|\w*idx)$")
# loops over positions or epochs, not over batches
_POSITIONS = re.compile(
    r"range\(|^count\(|perm(utation)?\(|\.split\(|chunk\(|ind(ices|ex)|idx|arange"
)
_MOVING = re.compile(r"Variable$|\.(to|cuda)\(")  # of map(lambda x: x.to(device), (x, y))
_LOSSES = re.compile(r"loss|criterion", re.I)
_CHANGES = re.compile(r"[^_]_$|^(append|extend|update|add|insert|setdefault|load_state_dict)$")
_DTYPES = re.compile(r"torch\.\w*(float|int|long|double|half|bool)|dtype")
_MODES = re.compile(r"no_grad|inference_mode|enable_grad")
_BATCHES = re.compile(r"^next$|batch", re.I)  # functions that return a batch
_WHOLE = re.compile(r"^(batch|data|sample|minibatch)\w*$", re.I)  # parameters that are a batch
_DEPTH = 3  # how many calls of functions to follow


@dataclass
class Line:
    """A statement of a step, or names that it binds to parts of the batch or of the outputs."""

    node: ast.stmt
    binds: Mapping[str, Entry] = field(default_factory=dict)
    loop: bool = False  # whether the statement is the loop, or the function, around the next lines
    outer: bool = False  # whether it is before the loop over batches
    options: Mapping[str, Any] = field(default_factory=dict)  # the options that it reads


@dataclass
class Step:
    """The lines before a call of backward(), and the loss."""

    script: Script
    lines: list[Line]
    value: ast.expr  # the loss
    owner: str = ""  # the class whose method the step is
    callers: Sequence[Script] = ()  # the scripts that call the step's function


def steps_of(script: Script, others: Sequence[Script] = ()) -> list[Step]:
    """Return the training steps of a script, with the lines of the functions that call them.

    `others` are scripts whose functions may call its functions.
    """
    walks = [_Walk(each) for each in (script, *(o for o in others if o.imports(script)))]
    found = [[*walk.steps(walk.script.tree.body, [], "", None)] for walk in walks]
    return [each for step, place in found[0] for each in walks[0].called(step, place, walks)]


@dataclass
class _Walk:
    script: Script
    sites: dict[str, list[tuple[list[Line], ast.Call, str | None]]] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def steps(
        self, body: Sequence[ast.stmt], before: list[Line], owner: str, place: str | None
    ) -> Iterator[tuple[Step, str | None]]:
        """Yield the steps in some statements, and the function that each of them is in.

        Args:
            body: The statements.
            before: The lines before them.
            owner: The class around them, if any.
            place: The function around them, if any.
        """
        before = list(before)
        for node in body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
                inner = [*before, Line(node, loop=True)]
                yield from self.steps(node.body, inner, owner, node.name)
            elif isinstance(node, ast.ClassDef):
                yield from self.steps(node.body, before, node.name, place)
            elif isinstance(node, ast.For):
                yield from self.steps(node.body, [*before, Line(node, loop=True)], owner, place)
            elif isinstance(node, ast.With):
                kept = any(_MODES.search(ast.unparse(each)) for each in node.items)
                named = [
                    Line(assigned(each.optional_vars, each.context_expr))
                    for each in node.items
                    if each.optional_vars is not None
                ]
                yield from self.steps(node.body, [*before, *named], owner, place)
                if not kept:  # its statements belong to the step
                    before += [*named, *map(Line, _flat(node.body))]
                    self._sites(node, before, place)
                    continue
            elif isinstance(node, ast.If | ast.While | ast.Try):
                for inner_body in (node.body, node.orelse, getattr(node, "finalbody", [])):
                    yield from self.steps(inner_body, before, owner, place)
            else:
                value = _loss(node, place)
                if value is not None:
                    yield Step(self.script, list(before), value, owner), place
            self._sites(node, before, place)
            before += map(Line, _flat([node]))

    def _sites(self, node: ast.stmt, before: list[Line], place: str | None) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.If | ast.While):
            return
        for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
            if isinstance(call.func, ast.Name):
                self.sites.setdefault(call.func.id, []).append((list(before), call, place))

    def called(
        self, step: Step, place: str | None, walks: Sequence["_Walk"], depth: int = _DEPTH
    ) -> Iterator[Step]:
        """Yield a step after the lines of a caller of its function, if there is a caller."""
        function = self.functions.get(place or "")
        walk = next((w for w in (self, *walks) if place in w.sites), None) if depth else None
        if function is None or walk is None:
            yield step
            return
        start = next((k for k, line in enumerate(step.lines) if line.node is function), 0)
        before, call, outer = walk.sites[place or ""][0]
        given = bound_arguments(call, list(parameters_of(function.args)))
        defaults = {k: v for k, v in parameters_of(function.args).items() if v is not None}
        passed = [
            Line(assigned(k, v))
            for k, v in (defaults | given).items()
            if not (isinstance(v, ast.Name) and v.id == k)
        ]
        own = [] if walk is self else step.lines[:start]
        callers = [*step.callers, *([walk.script] if walk is not self else [])]
        made = replace(step, lines=[*own, *before, *passed, *step.lines[start:]], callers=callers)
        yield from walk.called(made, outer, walks, depth - 1)


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, and the statements in `with` and `try`, except in `with no_grad()`."""
    for node in body:
        if (
            isinstance(node, ast.With)
            and not any(_MODES.search(ast.unparse(each)) for each in node.items)
        ) or isinstance(node, ast.Try):
            yield from _flat(node.body)
        else:
            yield node


def _loss(node: ast.stmt, place: str | None) -> ast.expr | None:
    """Return LOSS of LOSS.backward(), accelerator.backward(LOSS) and a training_step's return."""
    value = getattr(node, "value", None)
    if place == "training_step" and isinstance(node, ast.Return) and value is not None:
        if isinstance(value, ast.Dict):
            keys = [getattr(key, "value", None) for key in value.keys]
            return value.values[keys.index("loss")] if "loss" in keys else None
        return value  # type: ignore[no-any-return]
    if not (isinstance(node, ast.Expr) and isinstance(value, ast.Call)):
        return None
    called = value.func
    if not isinstance(called, ast.Attribute) or called.attr not in ("backward", "manual_backward"):
        return None
    if value.args and _WRAPPERS.search(last_name(called.value)):
        return value.args[0]
    return called.value


class Unmoved(ast.NodeTransformer):
    """Removes moves between devices, and writes the values of options.

    Examples are x.to(device), x.cuda(), Variable(x) and scaler.scale(loss).
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.used: dict[str, Any] = {}  # the options that were read
        self.mixed = False  # whether a branch that mixes samples was left out

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Write the size of a batch of one."""
        sized = _SIZES.search(node.id) and isinstance(node.ctx, ast.Load)
        return ast.Constant(1) if sized else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Return LOSS of LOSS / 1."""
        self.generic_visit(node)
        one = isinstance(node.right, ast.Constant) and node.right.value == 1
        return node.left if one and isinstance(node.op, ast.Div) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Return X of X.to(device)."""
        name, method = last_name(node.func), isinstance(node.func, ast.Attribute)
        texts = [ast.unparse(each) for each in (*node.args, *(k.value for k in node.keywords))]
        kind = any(
            re.search(r"torch\.\w*(float|int|long|double|half|bool)|dtype", t) for t in texts
        )
        if name in _MOVES and not kind:
            function = not method or name == "Variable"  # torch.autograd.Variable(x)
            inner = next(iter(node.args), None) if function else node.func.value  # type: ignore[attr-defined]
            if inner is not None:
                return self.visit(inner)  # type: ignore[no-any-return]
        if (
            name in _SCALES
            and node.args
            and method
            and _WRAPPERS.search(
                last_name(node.func.value)  # type: ignore[attr-defined]
            )
        ):
            return self.visit(node.args[0])  # type: ignore[no-any-return]
        if isinstance(node.func, ast.Attribute):  # the function is not an option
            node.func.value = self.visit(node.func.value)
        elif not isinstance(node.func, ast.Name):
            node.func = self.visit(node.func)
        node.args = [self.visit(each) for each in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Return the value of args.NAME."""
        return self._option(node, node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Return the value of config["NAME"]."""
        return self._option(node, key_of(node))

    def _option(self, node: ast.Attribute | ast.Subscript, name: str) -> ast.AST:
        if name and _SIZES.search(name) and isinstance(node.ctx, ast.Load):
            return ast.Constant(1)
        known = name in self.options and is_plain(self.options[name])
        if known and _OPTIONS.search(last_name(node.value)) and isinstance(node.ctx, ast.Load):
            self.used[name] = self.options[name]
            return ast.parse(repr(self.options[name]), mode="eval").body
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        """Return the branch that a CPU in float32 takes, for conditions about the machine."""
        test = ast.unparse(node.test)
        if _MACHINE.search(test):
            negated = bool(re.search(r"\bnot\b(?! None)|is None|== ?(0|False)", test))
            branch = node.body if negated else node.orelse
            found = [self.visit(each) for each in _flat(branch)]
            return [line for each in found for line in (each if isinstance(each, list) else [each])]
        if node.orelse and _MIXES.search(" ".join(map(ast.unparse, node.body))):
            self.mixed = True
            found = [self.visit(each) for each in _flat(node.orelse)]
            return [line for each in found for line in (each if isinstance(each, list) else [each])]
        return self.generic_visit(node)


class Model:
    """Recognises calls of the model in a script.

    Args:
        script: The script.
        callers: The scripts that call its functions.
        name: The name of the model's class, function or variable, if it is known.
        lightning: The class whose `training_step` it is, if any: `self` is the model.
    """

    def __init__(
        self, script: Script, callers: Sequence[Script], name: str, *, lightning: str
    ) -> None:
        last, made = name.rpartition(".")[2], ChainMap(*(s.values for s in (script, *callers)))
        known = {owner for each in (script, *callers) for owner in each.owners}
        within = lightning and last and last != lightning  # the model is self.NAME
        named = {
            owner
            for owner in known
            if owner == last or (owner in made and last in _called_in(made[owner]))
        }
        owners = {owner for owner in known if not _LOSSES.search(owner)}
        self.others = owners - named if named else set[str]()  # other models
        self.names = (named or owners or {"model", "net"}) | (
            {"self"} if lightning and not within else set()
        )
        self.losses: set[str] = set()  # the attributes of the model that are losses of torch
        self.names |= set(_given_attributes(script, lightning)) if within else set()

    def is_owner(self, node: ast.expr) -> bool:
        """Whether an expression is the model, self.model, or model.module."""
        if isinstance(node, ast.Attribute) and node.attr == "module":
            return self.is_owner(node.value)
        return last_name(node) in self.names

    def is_call(self, node: ast.AST) -> bool:
        """Whether a node calls the model's forward."""
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute) and node.func.attr == "forward":
            return self.is_owner(node.func.value)
        return self.is_owner(node.func)

    def is_method(self, node: ast.AST) -> bool:
        """Whether a node is a call of another method of the model, such as model.loss(x)."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        plain = node.func.attr in {"forward", "train", "eval", "parameters", "zero_grad", "log"}
        plain |= node.func.attr in {"named_parameters", "modules", "log_dict", "children"}
        plain |= node.func.attr in self.losses
        return not plain and self.is_owner(node.func.value)


def _given_attributes(script: Script, name: str) -> Iterator[str]:
    """Yield X of self.X = X in the `__init__` of a class that calls self.X or a method of it."""
    calls = (n.func for n in ast.walk(script.classes[name]) if isinstance(n, ast.Call))
    called = {part for func in calls for part in ast.unparse(func).split(".")[1:2]}
    for node in ast.walk(script.classes[name]):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            attribute = node.targets[0].attr
            given = last_name(node.value) and attribute in called
            if given and not _LOSSES.search(attribute):
                yield attribute


def _called_in(node: ast.expr) -> set[str]:
    return {last_name(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}


class Reader(ast.NodeTransformer):
    """Reads the lines of a step in order, and follows the batch and the model's outputs.

    Args:
        model: The model.
        unmoved: Removes moves.
        replaced: Whether calls of the model are replaced by its outputs.
        known: Expressions that are parts of the batch, if the script has no loop over batches.
    """

    def __init__(
        self,
        model: Model,
        unmoved: Unmoved,
        *,
        replaced: bool,
        known: Mapping[str, Entry] | None = None,
    ) -> None:
        self.model, self.unmoved, self.replaced = model, unmoved, replaced
        self.known = dict(known or {})
        self.entries: dict[str, Entry] = {}
        # names for entries that no statement of the step binds
        self.made = {text: entry for text, entry in self.known.items() if text.isidentifier()}
        self.count: int | None = None  # the number of entries of a batch, if it is a tuple
        self.passed: dict[str, list[Entry | None]] = {}  # {outputs: the arguments of the call}
        self.arguments: dict[str, list[ast.expr]] = {}  # the same, as in the script
        self._calls: dict[str, str] = {}  # {call of the model: its outputs}
        self.foreign: dict[str, str] = {}  # {outputs: an argument that another model makes}
        self._generated: set[str] = set()  # variables that other models make
        self._assumed = Line(ast.Pass())  # a parameter of a function that may be the batch
        self._versions: dict[str, int] = {}  # {variable: how often it was assigned}

    def read(self, lines: Sequence[Line]) -> list[Line]:
        """Return the lines with entries in place of expressions of the batch and the outputs."""
        found: list[Line] = []
        for line in lines:
            if line.loop:
                found.append(self._loop(line.node))
                continue
            self.unmoved.used = {}
            made = self.unmoved.visit(_copied(line.node))
            for node in made if isinstance(made, list) else [made]:
                if node is not None:
                    own = self._statement(node)
                    found += [replace(each, options=self.unmoved.used) for each in own]
        last = max((k for k, line in enumerate(found) if line.loop), default=0)
        for line in found[:last]:
            line.outer = True
        return found

    def _loop(self, node: ast.stmt) -> Line:
        if isinstance(node, ast.FunctionDef):
            names = [a.arg for a in node.args.args]
            batch = [names[1]] if node.name == "training_step" and len(names) > 1 else []
            batch += [name for name in names if _WHOLE.search(name) and name not in self._versions]
            own = {name: (BATCH,) for name in batch[:1] if name not in self.model.names}
            self.entries |= own
            self._assumed = Line(ast.Pass(), dict(own), loop=bool(own))
            return self._assumed
        assert isinstance(node, ast.For)
        target, called = node.target, ast.unparse(node.iter)
        if "enumerate(" in called and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            target = target.elts[1]
        if isinstance(node.iter, ast.List | ast.Tuple) and node.iter.elts:  # for phase in ["train"]
            return Line(assigned(node.target, node.iter.elts[0]))
        for each in ast.walk(node.target):
            self.entries.pop(last_name(each), None)
        if _POSITIONS.search(called) or _COUNTERS.search(last_name(node.target)):
            return Line(ast.Pass(), loop=True)
        for name in self._assumed.binds:  # the batch is in the loop, not in a parameter
            if self.entries.get(name) == (BATCH,):
                del self.entries[name]
        self._assumed.binds = {}
        return Line(ast.Pass(), self._bind(target, (BATCH,)), loop=True)

    def _bind(self, target: ast.expr, entry: Entry) -> dict[str, Entry]:
        """Bind the names in a target to an entry or to its entries."""
        found: dict[str, Entry] = {}
        if isinstance(target, ast.Tuple | ast.List):
            starred = [k for k, e in enumerate(target.elts) if isinstance(e, ast.Starred)]
            if entry == (BATCH,) and not starred:
                self.count = len(target.elts)
            for k, each in enumerate(target.elts):
                after = bool(starred) and k > starred[0]
                if not isinstance(each, ast.Starred):
                    found |= self._bind(each, (*entry, k - len(target.elts) if after else k))
        elif isinstance(target, ast.Name):
            found[target.id] = entry
            self._versions[target.id] = self._versions.get(target.id, 0) + 1
        self.entries |= found
        return found

    def _statement(self, node: ast.stmt) -> list[Line]:
        if isinstance(node, ast.Assign):
            pairs = assigned_pairs(node.targets, node.value)
            simple = [(t, v) for t, v in pairs if not isinstance(t, ast.Tuple)]
            several = isinstance(node.value, ast.Tuple) and len(simple) == len(pairs) - 1
            if several:
                return [each for t, v in simple for each in self._assigned(t, v)]
            return self._assigned(node.targets[0], node.value)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            return [Line(node)]
        visited = self.visit(node)
        self._forget(node)
        return [Line(visited)]

    def _forget(self, node: ast.AST) -> None:
        """Note that the names that a node assigns have new values."""
        for name in names_bound(node):
            self.entries.pop(name, None)
            self._versions[name] = self._versions.get(name, 0) + 1

    def _assigned(self, target: ast.expr, value: ast.expr) -> list[Line]:
        named = isinstance(value, ast.Name | ast.Attribute) and self.model.is_owner(value)
        if isinstance(target, ast.Name) and named:  # the parameter of a function
            self.model.names.add(target.id)
            return []
        entry = self.entry(value)
        function = last_name(value.func) if isinstance(value, ast.Call) else ""
        whole = isinstance(value, ast.DictComp | ast.ListComp | ast.GeneratorExp)
        whole |= function in ("tuple", "list", "dict")
        if entry is None and whole:  # batch = {k: v.to(device) for k, v in batch.items()}
            names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
            own = names & self.entries.keys()
            same = last_name(target) in own or isinstance(target, ast.Tuple)
            if same and len(own) == 1 and not _called_in(value) - {"items", "tuple", "list"}:
                entry = self.entries[own.pop()]
        drawn = _BATCHES.search(function) and not self.model.is_method(value)
        if entry is None and drawn and not self._reads_entries(value):
            entry = (BATCH,)
        if entry is not None and isinstance(target, ast.Name | ast.Tuple | ast.List):
            return [Line(assigned(target, value), self._bind(target, entry))]
        if self.model.others & _called_in(value) or self._generated & names_read(value):
            self._generated |= names_bound(target)
        value = self.visit(value)
        self._forget(target)
        if isinstance(target, ast.Name) and isinstance(value, ast.Name) and target.id == value.id:
            return []  # x = x.to(device)
        made = assigned(target, value)
        return [Line(made)]

    def _reads_entries(self, node: ast.expr) -> bool:
        return any(isinstance(n, ast.Name) and n.id in self.entries for n in ast.walk(node))

    def entry(self, node: ast.expr) -> Entry | None:
        """Return the part of the batch or of the outputs that an expression is, or None."""
        if self.known and isinstance(node, ast.Name | ast.Subscript | ast.Attribute):
            found = self.known.get(ast.unparse(node))
            if found is not None:
                return found
        if isinstance(node, ast.Name):
            return self.entries.get(node.id)
        if self.replaced and isinstance(node, ast.Call) and self.model.is_call(node):
            return (self._note(node),)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner, key = self.entry(node.value), node.slice.value
            whole = owner is not None and (len(owner) == 1 or isinstance(key, str))
            return (*owner, key) if owner is not None and whole else None
        if isinstance(node, ast.Tuple | ast.List) and node.elts:  # (x, y) of for x, y in loader
            every = [self.entry(each) for each in node.elts]
            whole = every == [(BATCH, k) for k in range(len(every))]
            return (BATCH,) if whole and len(every) == (self.count or 0) else None
        if isinstance(node, ast.Attribute) and node.attr not in _OF_TENSORS:
            owner = self.entry(node.value)
            return (*owner, f".{node.attr}") if owner is not None and len(owner) == 1 else None
        return None

    def _note(self, call: ast.Call) -> str:
        """Return the name of the outputs of a call of the model, and remember its arguments."""
        text = ast.unparse(call)
        key = f"{text} {[(n, self._versions.get(n)) for n in sorted(names_read(call))]}"
        if key not in self._calls:
            k = len(self._calls) + 1
            self._calls[key] = OUTPUTS if k == 1 else f"{OUTPUTS}{k}"
            passed = [*call.args, *(keyword.value for keyword in call.keywords)]
            starred = any(isinstance(each, ast.Starred) for each in call.args)
            whole = starred or any(keyword.arg is None for keyword in call.keywords)
            made = [self._source(each) for each in passed]
            self.arguments[self._calls[key]] = passed
            self.passed[self._calls[key]] = [(BATCH,)] if whole else made
            for each in passed:
                if self._generated & names_read(each) or self.model.others & _called_in(each):
                    self.foreign[self._calls[key]] = ast.unparse(each)
        return self._calls[key]

    def _source(self, node: ast.expr) -> Entry | None:
        """Return the entry of the batch that x.view(8, -1) is made of."""
        found = self.entry(node)
        while found is None and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
            found = self.entry(node)
        return found

    def _named(self, entry: Entry) -> ast.Name:
        """Return a variable with an entry."""
        known = [name for name, own in (self.entries | self.made).items() if own == entry]
        if not known:
            key = str(entry[-1]).lstrip(".")
            free = key.isidentifier() and key not in self.entries and key not in (BATCH, OUTPUTS)
            name = key if free else "_".join(str(each).strip(".") for each in entry)
            known = [re.sub(r"\W", "_", name) if len(entry) > 1 else entry[0]]
            self.made[known[0]] = entry
        return ast.Name(known[0], ast.Load())

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a call of the model by its outputs."""
        if self.model.is_call(node):
            source = self._note(node)
            if self.replaced:
                return self._named((source,))
        elif self.model.is_method(node):
            self.arguments.setdefault(node.func.attr, list(node.args))  # type: ignore[attr-defined]
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        elif last_name(node.func) not in self.entries:
            node.func = self.visit(node.func)
        node.args = [self.visit(each) for each in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "squeeze":
            owner = node.func.value  # a batch of one keeps the axis of the samples
            if not node.args and not node.keywords:
                axes = (
                    f"({ast.unparse(owner)}).squeeze(tuple(range(1, ({ast.unparse(owner)}).dim())))"
                )
                return ast.parse(axes, mode="eval").body
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Replace a variable with a known part of the batch."""
        entry = self.known.get(node.id) if isinstance(node.ctx, ast.Load) else None
        return node if entry is None else self._named(entry)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace batch.label, and self.NAME by NAME."""
        entry = self.entry(node) if isinstance(node.ctx, ast.Load) else None
        if entry is not None:
            return self._named(entry)
        if last_name(node.value) == "self" and "self" not in self.model.names:
            return ast.Name(node.attr, node.ctx)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Replace batch["label"]."""
        entry = self.entry(node) if isinstance(node.ctx, ast.Load) else None
        return self.generic_visit(node) if entry is None else self._named(entry)


def assigned(target: ast.expr | str, value: ast.expr) -> ast.Assign:
    """Return the statement TARGET = VALUE."""
    name = ast.Name(target, ast.Store()) if isinstance(target, str) else target
    return ast.fix_missing_locations(ast.Assign([name], value))


def _copied(node: ast.stmt) -> ast.stmt:
    return ast.parse(ast.unparse(ast.fix_missing_locations(node))).body[0]


def names_read(node: ast.AST) -> set[str]:
    """Return the names that a statement or an expression reads and does not make."""
    if isinstance(node, ast.For):
        inside = _read_in([*node.body, *node.orelse]) - names_bound(node.target)
        return names_read(node.iter) | inside
    if isinstance(node, ast.If | ast.While):
        return names_read(node.test) | _read_in(node.body) | _read_in(node.orelse)
    if isinstance(node, ast.With):
        made = {n for each in node.items for n in names_bound(each)}
        given = {n for each in node.items for n in names_read(each.context_expr)}
        return given | (_read_in(node.body) - made)
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
    own = {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return read - own - names_bound(node)
    for inner in ast.walk(node):
        if isinstance(inner, ast.comprehension):
            own |= names_bound(inner.target)
    return (read - own) | (names_bound(node) if isinstance(node, ast.AugAssign) else set())


def _read_in(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements read before they assign them."""
    read, made = set[str](), set[str]()
    for node in body:
        read |= names_read(node) - made
        made |= names_bound(node) if isinstance(node, ast.Assign) else set()
    return read


def names_changed(node: ast.stmt) -> set[str]:
    """Return the variables that a statement changes: NAME[0] = 1, NAME.x = 1, NAME.append(1)."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.For | ast.While | ast.If | ast.With):
        return {
            name
            for line in (*node.body, *getattr(node, "orelse", ()))
            for name in names_changed(line)
        }
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        if isinstance(called, ast.Attribute) and _CHANGES.search(called.attr):
            targets = [called]
    found = set()
    for target in targets:
        owner = target
        while isinstance(owner, ast.Attribute | ast.Subscript):
            owner = owner.value
        if owner is not target and isinstance(owner, ast.Name):
            found.add(owner.id)
    return found


def names_bound(node: ast.AST) -> set[str]:
    """Return the names that a statement assigns, defines or imports."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    found = {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        found |= {node.name}
        found |= {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return found


def substituted(node: ast.expr, names: Mapping[str, ast.expr]) -> ast.expr:
    """Return an expression with values in place of names."""
    made: ast.expr = _Names(names).visit(copy_of(node))
    return made


class _Names(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, ast.expr]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name."""
        return self.names.get(node.id, node)
