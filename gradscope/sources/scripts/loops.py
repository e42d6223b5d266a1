"""Finds the training loop whose loss a run can compute, in the scripts that train a model."""

import ast
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradscope.sources.loops import Loop, loops
from gradscope.sources.scripts.losses import keeps_numbers, training_scripts
from gradscope.sources.scripts.models import FoundModel
from gradscope.sources.scripts.parts import DRAWS
from gradscope.sources.scripts.syntax import Script, last_name
from gradscope.sources.variables import names_in

# methods that change the order or the axes of a tensor
_ORDERS = {"permute", "transpose", "t", "swapaxes", "movedim", "squeeze", "unsqueeze", "flatten"}
# more functions that draw, in the lines of a loop
_DRAWS = {*DRAWS, "dropout", "sample", "uniform", "beta", "choice", "random", "shuffle", "poisson"}


def loss_of_loop(
    files: Iterable[Path],
    model: tuple[Path | None, str],
    data: Path,
    given: Mapping[str, Any],
) -> tuple[Path, Loop] | None:
    """Return the training loop whose loss gradscope can run, and its script, or None.

    Args:
        files: Python files.
        model: The file of the model, and its name.
        data: The script that makes the data; its loops are preferred.
        given: The arguments that the checkpoint stores.
    """
    files = list(files)
    scripts = training_scripts(files, model[0], given)[0]
    every = [script for file in files if (script := Script.read(file)) is not None]
    known = {script.file for script in scripts}
    scripts = [s for s in every if s.file in known or s.file.resolve() == data.resolve()]
    scripts.sort(key=lambda script: script.file.resolve() != data.resolve())
    for script in scripts:
        for loop in _loops(script):
            name = loop.name.partition(".")[0]
            if loop.model == "self" and not _is_a(loop.place.split(".")[-2], model[1], script):
                continue  # training_step of a module that wraps the model
            if loop.place or name not in {*script.functions, *script.classes, *script.imported}:
                return script.file, loop
    return None


def models_of_loops(file: Path) -> list[FoundModel]:
    """Return the variables that training loops of a script train, or of files that it imports."""
    script = Script.read(file)
    every = [] if script is None else _loops(script)
    names = list(dict.fromkeys(loop.origin for loop in every if loop.origin))
    why = f"{file.name} trains it"
    return [FoundModel(file, name, False, 1.0, why, {}, []) for name in names]


def _loops(script: Script) -> list[Loop]:
    """Return the training loops of a script; unusual code has none."""
    with suppress(RecursionError, SyntaxError):
        return loops(script.tree, script.file)
    return []


def _is_a(kind: str, name: str, script: Script) -> bool:
    """Whether a class of a script is another class, or is derived from it."""
    bases = script.classes[kind].bases if kind in script.classes else []
    others = [last_name(base) for base in bases]
    return kind == name or any(_is_a(other, name, script) for other in others if other != kind)


def is_plain(loop: Loop) -> bool:
    """Whether the model gets the inputs of (inputs, targets), or entries of a dict, unchanged."""
    target = loop.target
    if isinstance(target, ast.Tuple) and len(target.elts) != 2:
        return False
    nodes = [n for line in (*loop.body, ast.Expr(loop.value)) for n in ast.walk(line)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == loop.model]
    passed = [a for call in calls for a in (*call.args, *(k.value for k in call.keywords))]
    if not calls or not all(map(_is_unchanged, passed)):
        return False
    names = {name for each in passed for name in names_in(each)}
    for node in sorted(nodes, key=lambda n: getattr(n, "lineno", 0), reverse=True):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        bound = {name for t in targets if isinstance(t, ast.expr) for name in names_in(t)}
        if not isinstance(node, ast.stmt) or names.isdisjoint(bound):
            continue
        value = getattr(node, "value", None)
        parts = value.elts if isinstance(value, ast.Tuple) else [value]
        if not isinstance(node, ast.Assign) or not all(p and _is_unchanged(p) for p in parts):
            return False
        names |= names_in(node.value)
    return True


def _is_unchanged(node: ast.expr) -> bool:
    """Whether an expression has the numbers of a variable, in their order: not x.transpose(1, 2).

    A shape, x.view(-1, 784), is written as a setting.
    """
    called = {last_name(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
    return keeps_numbers(node) and called.isdisjoint(_ORDERS)


def draws(loop: Loop, file: Path) -> bool:
    """Whether the lines of a loop, or functions of its script that they call, draw numbers."""
    script = Script.read(file)
    found, waiting = set[str](), [*loop.body, loop.value]
    functions = dict(script.functions) if script is not None else {}
    while waiting:
        calls = [n for n in ast.walk(waiting.pop()) if isinstance(n, ast.Call)]
        names = {last_name(call.func) for call in calls}
        found |= names
        waiting += [functions.pop(name) for name in names & functions.keys()]
    return not found.isdisjoint(_DRAWS)
