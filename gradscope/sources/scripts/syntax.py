"""Parsed scripts: their classes, functions, constants, calls and variables. No script is run."""

import ast
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from gradscope.sources.training import is_main_block, trains
from gradscope.sources.variables import MOVED

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
NOT_PROVED = "no tensor confirms it"
DEFAULT = f"the script's default; {NOT_PROVED}"
Size = int | str | list[int]  # or a flag, or a choice
# an expression, its value (a list for [Layer(k) for k in EXPRESSION]), the source's name
Equation = tuple[ast.expr, Size, str]
# modules of torch, Lightning and transformers that scripts subclass
_BASES = {"Module", "LightningModule", "PreTrainedModel"} | {
    name
    for name, kind in vars(nn).items()
    if isinstance(kind, type) and issubclass(kind, nn.Module)
}
# the names of torch's losses, and gradscope's names
LOSSES = {
    "cross_entropy": "cross_entropy", "CrossEntropyLoss": "cross_entropy",
    "nll_loss": "nll", "NLLLoss": "nll",
    "binary_cross_entropy": "bce", "BCELoss": "bce",
    "binary_cross_entropy_with_logits": "bce_with_logits", "BCEWithLogitsLoss": "bce_with_logits",
    "mse_loss": "mse", "MSELoss": "mse", "l1_loss": "l1", "L1Loss": "l1",
    "huber_loss": "huber", "HuberLoss": "huber", "smooth_l1_loss": "huber", "SmoothL1Loss": "huber",
    "kl_div": "kl", "KLDivLoss": "kl", "poisson_nll_loss": "poisson_nll",
    "PoissonNLLLoss": "poisson_nll", "gaussian_nll_loss": "gaussian_nll",
    "GaussianNLLLoss": "gaussian_nll", "triplet_margin_loss": "triplet",
    "TripletMarginLoss": "triplet", "ctc_loss": "ctc", "CTCLoss": "ctc",
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """The value of an argument, and its source."""

    value: Any
    why: str
    names_code: bool = False  # whether it is a reference to code, from a script


def called_name(
    node: ast.expr, script: "Script", sources: "Sources", given: Mapping[str, Any]
) -> str:
    """Return the dotted name of a function of a package that an expression calls, or "".

    Examples are `models.__dict__[args.arch]()` and `getattr(models, args.arch)()`.
    """
    if not isinstance(node, ast.Call):
        return ""
    called: ast.expr = node.func
    key: ast.expr | None = None
    if isinstance(called, ast.Subscript) and last_name(called.value) == "__dict__":
        key, called = called.slice, getattr(called.value, "value", called)
    elif (
        isinstance(called, ast.Call)
        and last_name(called.func) == "getattr"
        and len(called.args) > 1
    ):
        key, called = called.args[1], called.args[0]
    names = [] if key is None else [_named_constant(key, sources, given)]
    while isinstance(called, ast.Attribute):
        names.append(called.attr)
        called = called.value
    first = script.imported.get(called.id, "") if isinstance(called, ast.Name) else ""
    return ".".join([first, *reversed(names)]) if first and all(names) else ""


def _named_constant(node: ast.expr, sources: "Sources", given: Mapping[str, Any]) -> str:
    found = given.get(last_name(node) or key_of(node)) or getattr(
        sources.constant(node), "value", None
    )
    return found if isinstance(found, str) else ""


@dataclass(frozen=True, eq=False)
class Script:
    """A Python file: its classes, functions, and the constants at its top level."""

    file: Path
    tree: ast.Module

    @classmethod
    def read(cls, file: Path) -> "Script | None":
        """Return the parsed file, or None if it is not Python. An unchanged file is parsed once."""
        try:
            found = file.stat()
            return _parsed(file, found.st_ino, found.st_mtime_ns)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes at the top level, by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """The functions at the top level, by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    @cached_property
    def calls(self) -> dict[str, list[ast.Call]]:
        """The calls, by the last name of the called function."""
        found: dict[str, list[ast.Call]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Call):
                found.setdefault(last_name(node.func), []).append(node)
        return found

    @cached_property
    def top(self) -> set[str]:
        """The names that the top level assigns or defines."""
        found = {*self.classes, *self.functions}
        for node in self.tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) and not is_main_block(node):
                names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
                found |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
        return found

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The constants at the top level, and the defaults of options of argparse."""
        found: dict[str, Any] = {}
        top = set(self.tree.body)
        for call in self.calls.get("add_argument", ()):
            option = option_of(call)
            if option.default is not None or any(k.arg == "default" for k in call.keywords):
                found[option.name] = option.default
        for node in self.nodes:  # for example config.width = 64
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(node, ast.Assign) and (
                node in top
                if isinstance(target, ast.Name)
                else isinstance(target, ast.Attribute) and last_name(target.value) != "self"
            ):
                with suppress(ValueError):
                    found[last_name(node.targets[0])] = ast.literal_eval(node.value)
                    continue
            if isinstance(node, ast.Assign) and dotted_name(node.value) is None:
                name = last_name(node.targets[0])  # args.sizes = args.sizes.split(",")
                read = {dotted_name(n) for n in ast.walk(node.value) if isinstance(n, ast.expr)}
                own = dotted_name(node.targets[0]) in read
                if name and own and isinstance(found.get(name), str):
                    del found[name]
        return found

    @cached_property
    def values(self) -> dict[str, ast.expr]:
        """The last value of each variable and attribute, by its last name.

        model = model.cuda() is not a new value.
        """
        assigned = (node for node in self.nodes if isinstance(node, ast.Assign))
        pairs = ((last_name(node.targets[0]), node.value) for node in assigned)
        return {name: value for name, value in pairs if name not in ("", last_name(unmoved(value)))}

    @cached_property
    def local(self) -> dict[int, dict[str, ast.expr]]:
        """{id of a call: the variables of the functions around it, if assigned once}."""
        found: dict[int, dict[str, ast.expr]] = {}
        for function in self.nodes:
            if not isinstance(function, ast.FunctionDef):
                continue
            nodes = list(ast.walk(function))
            assigned = (n for n in nodes if isinstance(n, ast.Assign))
            every = [
                (last_name(t), value)
                for n in assigned
                for t, value in assigned_pairs(n.targets, n.value)
            ]
            counts = Counter(name for name, _ in every)
            own = {name: value for name, value in every if name and counts[name] == 1}
            for node in nodes:  # inner functions come later
                if isinstance(node, ast.Call):
                    found[id(node)] = found.get(id(node), {}) | own
        return found

    @cached_property
    def torch_losses(self) -> set[str]:
        """The attributes to which a loss of torch is assigned: self.NAME = nn.BCELoss()."""
        return {
            node.targets[0].attr
            for node in self.nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Attribute)
            and isinstance(node.value, ast.Call)
            and last_name(node.value.func) in LOSSES
        }

    @cached_property
    def owners(self) -> set[str]:
        """The variables with a call of `parameters()`."""
        return {
            last_name(call.func.value)
            for call in self.calls.get("parameters", ())
            if isinstance(call.func, ast.Attribute)
        }

    @cached_property
    def trained(self) -> list[tuple[str, ast.Assign]]:
        """The variables with a call of `parameters()`, and their assignments."""
        return [
            (node.targets[0].id, node)
            for node in self.nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in self.owners
            and isinstance(made := unmoved(node.value), ast.Call)
            and last_name(made.func) not in MOVED
        ]

    @cached_property
    def trains(self) -> bool:
        """Whether it passes a model's parameters on, calls `backward()` or is Lightning's."""
        return bool(self.trained) or trains(self.tree)

    @cached_property
    def losses(self) -> list[tuple[str, ast.expr]]:
        """The variables with a call of `backward()`, and the values assigned to them.

        What `training_step` of Lightning returns is also a loss.
        """
        names = {
            last_name(node.func.value)
            for node in self.calls.get("backward", ())
            if isinstance(node.func, ast.Attribute)
        }
        found: list[tuple[str, ast.expr]] = []
        for value in self._returned:
            if isinstance(value, ast.Name):
                names.add(value.id)
            elif isinstance(value, ast.Call | ast.BinOp):
                found.append(("loss", value))
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                target = node.targets[0]  # loss, correct = compute(outputs, targets)
                first = target.elts[0] if isinstance(target, ast.Tuple) else target
                if (name := last_name(first)) in names:
                    part = node.value  # loss = raw_loss
                    part = self.values.get(part.id, part) if isinstance(part, ast.Name) else part
                    found.append((name, part))
        return found

    @cached_property
    def _returned(self) -> list[ast.expr]:
        """What `training_step` returns: LOSS, or LOSS of {"loss": LOSS} and LOSS["loss"]."""
        steps = (n for n in self.nodes if getattr(n, "name", "") == "training_step")
        lines = (n for step in steps for n in ast.walk(step))
        found = []
        for value in (n.value for n in lines if isinstance(n, ast.Return) and n.value is not None):
            if isinstance(value, ast.Dict):
                pairs = zip(value.keys, value.values, strict=True)
                found += [v for k, v in pairs if getattr(k, "value", None) == "loss"]
            else:
                found.append(value.value if isinstance(value, ast.Subscript) else value)
        return found

    @cached_property
    def sums(self) -> bool:
        """Whether it calls backward() of a variable that is a sum of terms."""
        names = {name for name, _ in self.losses}
        return any(
            isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
            for _, value in self.losses
        ) or any(
            isinstance(n, ast.AugAssign)
            and isinstance(n.op, ast.Add)
            and last_name(n.target) in names
            for n in self.nodes
        )

    @cached_property
    def imported(self) -> dict[str, str]:
        """The full dotted name of each imported name."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {a.asname or a.name: a.name for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                place = node.module or ""
                found |= {a.asname or a.name: f"{place}.{a.name}".strip(".") for a in node.names}
        return found

    def imports(self, other: "Script") -> bool:
        """Whether this script imports from the script `other`, judged by the file's name."""
        names = {part for dotted in self.imported.values() for part in dotted.split(".")}
        return other.file.stem in names


@lru_cache(maxsize=512)
def _parsed(file: Path, _inode: int, _changed: int) -> Script:
    return Script(file, ast.parse(file.read_bytes()))


def read_scripts(files: Iterable[Path], given: Mapping[str, Any] | None = None) -> list[Script]:
    """Return the scripts in files, without the branches that stored arguments do not take.

    An example is `if args.l1: criterion = nn.L1Loss()` with l1=False in `given`, or as the default
    of the option --l1.
    """
    found = [script for file in files if (script := Script.read(file)) is not None]
    known = {
        option.name: option.default
        for script in found
        for option in map(option_of, script.calls.get("add_argument", ()))
        if option.default is not None
    } | dict(given or {})
    if not known:
        return found
    taken = [(script, _Taken(known)) for script in found]
    trees = [(script, branches.visit(script.tree), branches) for script, branches in taken]
    return [
        replace(script, tree=tree) if branches.changed else script
        for script, tree, branches in trees
    ]


class _Taken(ast.NodeTransformer):
    """Replaces `if` statements with a known condition by the branch that is taken."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known, self.changed = known, False

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Copy a node before it is changed: parsed scripts are shared."""
        if not any(isinstance(inner, ast.If) for inner in ast.walk(node)):
            return node
        own = copy(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(own, name, list(value))
        return super().generic_visit(own)

    def visit_If(self, node: ast.If) -> Any:
        """Return the statements of the branch, or the whole statement."""
        value = self._value(node.test)
        if value is None:
            return self.generic_visit(node)
        self.changed = True
        branch = node.body if value else node.orelse
        found = [self.visit(line) for line in branch] or [ast.copy_location(ast.Pass(), node)]
        return [line for each in found for line in (each if isinstance(each, list) else [each])]

    def _value(self, test: ast.expr) -> bool | None:
        """Return whether a condition of options holds, or None if it is not known."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._value(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            name, other = last_name(test.left), test.comparators[0]
            equal = isinstance(test.ops[0], ast.Eq | ast.NotEq) and isinstance(other, ast.Constant)
            if not equal or not self._is_option(test.left):
                return None
            same = self.known[name] == other.value  # type: ignore[attr-defined]
            return bool(same == isinstance(test.ops[0], ast.Eq))
        return bool(self.known[last_name(test)]) if self._is_option(test) else None

    def _is_option(self, node: ast.expr) -> bool:
        """Whether an expression is args.NAME with a known value."""
        named = isinstance(node, ast.Attribute) and last_name(node.value) != "self"
        return named and last_name(node) in self.known


class Sources:
    """A script and the scripts next to it: classes by name, constants, options of argparse.

    A name in the script hides the same name in other scripts. Names in scripts that it imports hide
    the same names in the rest.
    """

    def __init__(self, own: Script, scripts: Sequence[Script]) -> None:
        order = sorted(scripts, key=lambda other: (other is not own, not own.imports(other)))
        self.classes = ChainMap(*(script.classes for script in order))
        self.functions = ChainMap(*(script.functions for script in order))
        self.constants = ChainMap(*(script.constants for script in order))
        self.values = ChainMap(*(script.values for script in order))
        self._scripts = scripts

    def calls(self, name: str) -> list[ast.Call]:
        """Return the calls of a class or function in all scripts."""
        return [call for script in self._scripts for call in script.calls.get(name, ())]

    def local(self, call: ast.Call) -> dict[str, ast.expr]:
        """Return the variables of the functions around a call, if they are assigned once."""
        return next((found for s in self._scripts if (found := s.local.get(id(call)))), {})

    def file(self, name: str) -> Path:
        """Return the file of a class."""
        return next(s.file for s in self._scripts if self.classes[name] in s.tree.body)

    def is_module(self, name: str, depth: int = 0) -> bool:
        """Whether a class is a torch.nn.Module, judged by its bases."""
        node = self.classes.get(name)
        if node is None or depth > 8:
            return False
        bases = [last_name(base) for base in node.bases]
        return any(base in _BASES or self.is_module(base, depth + 1) for base in bases)

    def constant(self, node: ast.expr) -> Argument | None:
        """Return the value of an expression: a literal, a constant, or the default of an option."""
        with suppress(ValueError):
            value = ast.literal_eval(node)
            return Argument(value, "the value in the script") if is_plain(value) else None
        name = last_name(node) or key_of(node)  # width, args.width and config["width"]
        value = self.constants.get(name)
        named = name and is_plain(value)
        return Argument(value, DEFAULT) if named else None

    def fields(self, names: set[str]) -> dict[str, Argument]:
        """Return the defaults of the class with the most annotated fields among `names`."""
        best: dict[str, Argument] = {}
        covered = 0
        for name, node in self.classes.items():
            fields = [f for f in node.body if isinstance(f, ast.AnnAssign)]
            own = {f.target.id for f in fields if isinstance(f.target, ast.Name)}
            if len(own & names) > covered:
                covered, best = len(own & names), {}
                for f in fields:
                    value = None if f.value is None else self.constant(f.value)
                    if value is not None and isinstance(f.target, ast.Name):
                        why = f"the default of {name}; {NOT_PROVED}"
                        best[f.target.id] = Argument(value.value, why)
        return best


class Option(NamedTuple):
    """An option of argparse."""

    flag: str  # "" if positional
    name: str
    default: Any  # None if unknown
    required: bool
    switch: bool  # whether its flag takes no value


def option_of(call: ast.Call) -> Option:
    """Return the option of a call of add_argument."""
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    long = next((t for t in texts if t.startswith("--")), texts[0] if texts else "")
    named = {k.arg: k.value for k in call.keywords}
    name = getattr(named.get("dest"), "value", None) or long.lstrip("-").replace("-", "_")
    action = getattr(named.get("action"), "value", None)
    flag = long if long.startswith("-") else ""
    default = None
    with suppress(ValueError, KeyError):
        default = ast.literal_eval(named["default"])
    switch = action in ("store_true", "store_false")
    if default is None and switch:
        default = action == "store_false"
    optional = getattr(named.get("nargs"), "value", None) in ("?", "*") or "default" in named
    required = getattr(named.get("required"), "value", not flag and not optional)
    return Option(flag, name, default, bool(required), switch)


def assigned_pairs(targets: Sequence[ast.expr], value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return an assignment's (target, value) pairs, also of a, b = 1, 2."""
    pairs = [(target, value) for target in targets]
    for target, each in pairs:
        if isinstance(target, ast.Tuple) and isinstance(each, ast.Tuple):
            pairs += zip(target.elts, each.elts, strict=False)
    return pairs


def nodes_in_eval(node: ast.AST) -> list[ast.AST]:
    """Return the nodes of a method without the branches `if self.training`."""
    found: list[ast.AST] = []
    waiting = [node]
    while waiting:
        each = waiting.pop()
        found.append(each)
        if isinstance(each, ast.If | ast.IfExp) and last_name(each.test) == "training":
            waiting += each.orelse if isinstance(each.orelse, list) else [each.orelse]
        else:
            waiting += ast.iter_child_nodes(each)
    return found


def returned_call(function: ast.FunctionDef) -> ast.Call | None:
    """Return the call whose result a function returns, or None if there is no such call."""
    made: dict[str, ast.Call] = {}
    for node in ast.walk(function):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            value = unmoved(node.value)  # type: ignore[attr-defined]
            if isinstance(target, ast.Name) and isinstance(value, ast.Call):
                made.setdefault(target.id, value)  # not x = x.cuda()
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            value = unmoved(node.value)
            found = made.get(value.id) if isinstance(value, ast.Name) else value
            if isinstance(found, ast.Call):
                return found
    return None


def is_plain(value: Any) -> bool:
    """Whether a value can be written in a run file."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str)


def unmoved(node: ast.expr) -> ast.expr:
    """Return MODEL of MODEL.to(device) and MODEL.cuda()."""
    while (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MOVED
    ):
        node = node.func.value
    return node


def parameters_of(arguments: ast.arguments, skip: int = 0) -> dict[str, ast.expr | None]:
    """Return {parameter: default} without *args and **kwargs."""
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    defaults: list[ast.expr | None] = [None] * (len(names) - len(arguments.defaults))
    found = dict(zip(names, [*defaults, *arguments.defaults], strict=True))
    found = dict(list(found.items())[skip:])
    return found | {
        a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }


def bound_arguments(call: ast.Call, names: Sequence[str]) -> dict[str, ast.expr]:
    """Return {parameter: expression} for the parameters `names` of a call."""
    if any(isinstance(a, ast.Starred) for a in call.args):
        return {}
    found = dict(zip(names, call.args, strict=False))
    return found | {k.arg: k.value for k in call.keywords if k.arg in names and k.arg is not None}


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name, or "" for a different expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted_name(node: ast.expr) -> str | None:
    """Return NAME, or NAME.KEY for NAME.KEY and NAME["KEY"], or None for a different expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{key}" if (key := key_of(node)) else None
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return None


def key_of(node: ast.AST) -> str:
    """Return KEY of NAME.KEY and NAME["KEY"], or "" for a different expression."""
    if isinstance(node, ast.Subscript):
        value = getattr(node.slice, "value", None)
        return value if isinstance(value, str) else ""
    return node.attr if isinstance(node, ast.Attribute) else ""


def copy_of(node: ast.expr) -> ast.expr:
    """Return a copy of an expression."""
    return ast.parse(ast.unparse(node), mode="eval").body


class OuterNames(ast.NodeTransformer):
    """Marks the variables of a calling class in the arguments that it passes, or unmarks them."""

    mark = "outer__"

    def __init__(self, *, leave: bool = False) -> None:
        self.leave = leave

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Mark the arguments, not the called function."""
        node.args = [self.visit(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Mark a variable."""
        name = node.id.removeprefix(self.mark) if self.leave else self.mark + node.id
        return ast.Name(name, node.ctx)


class Substituted(ast.NodeTransformer):
    """Replaces names and self.NAME by expressions."""

    def __init__(self, names: Mapping[str, ast.expr]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name."""
        return self.names.get(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace self.NAME, or the name in NAME.ATTRIBUTE."""
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return self.names.get(f"self.{node.attr}", node)
        return self.generic_visit(node)
