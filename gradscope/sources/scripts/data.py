"""Finds the data sets and loaders that training scripts make. No script is run."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from gradscope.core.texts import listed
from gradscope.errors import DatasetError
from gradscope.sources.scripts.losses import keeps_numbers, training_scripts
from gradscope.sources.scripts.syntax import Script, assigned_pairs, key_of, last_name, unmoved
from gradscope.sources.variables import MAIN, Variables

_MAKERS = {"DataLoader", "TensorDataset", "ImageFolder", "Subset", "random_split", "load_dataset"}
_SHOWN = 4  # the most references to list in a message


def reference_of(
    file: Path, name: str, files: Iterable[Path], kind: str = "data"
) -> tuple[str, str]:
    """Return FILE.py:NAME for an object of a script, and "" or the reason for another name.

    A variable of a function is FUNCTION.NAME. Then only the lines for the variable are run.

    Args:
        file: The script.
        name: The name that the user gave.
        files: The scripts near the data, for the message.
        kind: What the object is, "data" or "model".

    Raises:
        DatasetError: The script does not make data with this name.
    """
    script = Script.read(file)
    place, _, last = name.rpartition(".")
    if script is None or (place and not _is_unknown(script, place, last)):
        return f"{file}:{name}", ""
    top = {*script.top, *script.imported}
    names, line = arrays_of_batch(script, name) if kind == "data" else ([], "")
    for each, why in ((",".join(names), f"; {line}"), (name, "")) if names else ((name, ""),):
        if "*" in top or top.issuperset(each.split(",")):
            return f"{file}:{each}", why.removeprefix("; ")
        for place in Variables(script.tree, file).places(each):
            of = 'the block if __name__ == "__main__"' if place == MAIN else f"{place}()"
            what, its = ("variables", "their") if "," in each else ("a variable", "its")
            told = f"{what} of {of}, of which only {its} lines are run{why}"
            return f"{file}:{place}.{each}", told
    known = loaders([file, *files]) if kind == "data" else []
    raise DatasetError(
        f"there is no {name!r} at the top level of the script, and no variable {name!r} of a "
        "function that can be computed without training",
        where=str(file),
        remedy=f"Give one of {listed(known, _SHOWN)}."
        if known
        else "Name a function: FILE.py:NAME.",
    )


def _is_unknown(script: Script, place: str, name: str) -> bool:
    """Whether FUNCTION.NAME, or CLASS.METHOD.NAME, is no variable that can be computed."""
    first, _, method = place.partition(".")
    inside = place in script.functions or (bool(method) and first in script.classes)
    return inside and Variables(script.tree, script.file).statements(place, name) is None


def loaders(files: Iterable[Path]) -> list[str]:
    """Return FILE.py:NAME for the data sets and loaders that scripts make, loaders first."""
    scripts = [script for file in files if (script := Script.read(file)) is not None]
    own = {name for script in scripts for name in script.classes if _is_dataset(script, name)}
    found: dict[str, bool] = {}
    for script in scripts:
        for calls, named in (
            ({"DataLoader"}, "loader$"),
            (_MAKERS | own, "dataset|(train|test)set"),
        ):
            top = [
                target.id
                for node in script.tree.body
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
                for target in node.targets
                if isinstance(target, ast.Name)
                and (last_name(node.value.func) in calls or re.search(named, target.id))
            ]
            names = [*top, *Variables(script.tree, script.file).made_by(calls, named)]
            found |= {f"{script.file}:{name}": True for name in names}
    return list(found)


def arrays_of_batch(script: Script, name: str) -> tuple[list[str], str]:
    """Return the variables that a script gives to its model and its loss, and their lines.

    An example is ["x", "y"] for `criterion(model(x), y)`, also for batches x[rows], y[rows]. The
    result is [] if `name` is no variable among them, or if the loss has no variable of data.
    """
    loops = [node for node in script.nodes if isinstance(node, ast.For | ast.While)]
    inside = {id(node) for loop in loops for node in ast.walk(loop)}
    stored = (n for n in script.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    of_loops = {node.id for node in stored if id(node) in inside}
    pairs = [
        pair
        for node in script.nodes
        if isinstance(node, ast.Assign)
        for pair in assigned_pairs(node.targets, node.value)
    ]
    pairs += [pair for loop in loops if isinstance(loop, ast.For) for pair in _zipped(loop)]
    outputs: set[str] = set()
    for target, value in pairs * 2:  # outputs of outputs
        read = {last_name(n.func) for n in ast.walk(value) if isinstance(n, ast.Call)}
        read |= {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} & outputs
        if read & (script.owners | outputs):
            outputs |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)} - {"_"}
    values = {last_name(target): value for target, value in pairs}

    def variable(node: ast.expr) -> str:
        for _ in range(_SHOWN):
            own = _variable_of(node, script) if keeps_numbers(node) else ""
            if own in outputs or own not in of_loops or own not in values:
                break
            node = values[own]
        return "" if own in outputs | of_loops else own

    for call in (n for each in script.owners for n in script.calls.get(each, ()) if n.args):
        inputs = [variable(node) for node in call.args]
        if not all(inputs):
            continue
        for of, value in script.losses:
            calls = [n for n in ast.walk(value) if isinstance(n, ast.Call) and n is not call]
            given = (variable(node) for n in calls for node in n.args)
            targets = [each for each in dict.fromkeys(given) if each and each not in inputs]
            if targets and name in {*inputs, *targets}:
                line = f"{ast.unparse(call)} and {of} = {ast.unparse(value)}"
                return [*inputs, *targets], f"{script.file.name}: {line}"
    return [], ""


def _zipped(loop: ast.For) -> list[tuple[ast.expr, ast.expr]]:
    """Return the pairs (variable, array) of `for x, y in zip(xs, ys)`, also in enumerate(...)."""
    target, value = loop.target, loop.iter
    if isinstance(value, ast.Call) and last_name(value.func) == "enumerate" and value.args:
        target = target.elts[-1] if isinstance(target, ast.Tuple) else target
        value = value.args[0]
    of_zip = isinstance(value, ast.Call) and last_name(value.func) == "zip"
    arrays = value.args if of_zip else []  # type: ignore[attr-defined]
    names = target.elts if isinstance(target, ast.Tuple) else []
    return [*zip(names, arrays, strict=True)] if len(names) == len(arrays) else []


def _variable_of(node: ast.expr, script: Script) -> str:
    """Return x of Variable(x[rows]).cuda() and of torch.tensor([x]), or ""."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Call):
            owner = getattr(node.func, "value", None)
            function = owner is None or last_name(owner) in script.imported
            inner = next(iter(node.args), None) if function else owner
            if inner is None:
                return ""
            node = inner
        elif isinstance(node, ast.Subscript) and not key_of(node):
            node = node.value
        elif isinstance(node, ast.List) and len(node.elts) == 1:
            node = node.elts[0]
        else:
            return ""
    return node.id


def changed_batch(files: Iterable[Path], model: Path | None) -> str:
    """Return the line of a script that changes the inputs of a batch before the model, or "".

    An example is "train.py: image = image / 255 - 0.5" in the loop with `model(image)`. The scripts
    are those that train the model of the file `model`.
    """
    for script in training_scripts(files, model)[0]:
        loops = [node for node in script.nodes if isinstance(node, ast.For)]
        for nodes in (list(ast.walk(loop)) for loop in loops if script.trains):
            calls = [n for n in nodes if isinstance(n, ast.Call) and n.args]
            given = [n.args[0] for n in calls if last_name(n.func) in script.owners]
            names = {n.id for node in given for n in ast.walk(node) if isinstance(n, ast.Name)}
            for node in (n for n in nodes if isinstance(n, ast.Assign)):
                name = last_name(node.targets[0])
                read = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
                if name in names & read and not keeps_numbers(node.value):
                    return f"{script.file.name}: {ast.unparse(node)}"
            for passed in (node for node in given if isinstance(node, ast.BinOp)):
                return f"{script.file.name}: the model is called with {ast.unparse(passed)}"
    return ""


def reshaped_batch(files: Iterable[Path], model: Path | None) -> tuple[list[int], str]:
    """Return the shape of a sample to which a script reshapes its inputs, and the script's line.

    An example is [784] for x.view(-1, 28 * 28), which is passed to the model. Without such a line,
    the shape is [].
    """
    for script in training_scripts(files, model)[0]:
        values = {
            last_name(n.targets[0]): n.value for n in script.nodes if isinstance(n, ast.Assign)
        }
        calls = [n for name in script.owners for n in script.calls.get(name, ()) if n.args]
        for node in (call.args[0] for call in calls):
            made = unmoved(values.get(node.id, node) if isinstance(node, ast.Name) else node)
            called = made.func if isinstance(made, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in ("view", "reshape"):
                sizes = [_size(size) for size in made.args[1:]]  # type: ignore[attr-defined]
                if sizes and all(size is not None and size > 0 for size in sizes):
                    line = f"{script.file.name}: {ast.unparse(made)}"
                    return [size for size in sizes if size is not None], line
    return [], ""


def keys_of_batch(
    files: Iterable[Path], model: Path | None, name: str
) -> tuple[list[str] | dict[str, str], list[str]]:
    """Return the keys of a batch that a script passes to the model, and the keys for its loss.

    An example is (["image"], ["label"]) for model(batch["image"]) and criterion(output, y) after
    y = batch["label"].to(device). For model(batch), the inputs are {KEY: KEY} with the keys that
    forward reads. Without keys, both are [].

    Args:
        files: The scripts.
        model: The file of the model.
        name: The name of the model in the file.
    """
    read = _keys_read(model, name)
    for script in training_scripts(files, model)[0]:
        calls = [n for name in script.owners for n in script.calls.get(name, ()) if n.args]
        for call in calls:
            inputs = [_key(node, script) for node in call.args]
            losses = [n for value in _values_of_loss(script) for n in ast.walk(value)]
            given = [a for n in losses if isinstance(n, ast.Call) for a in n.args]
            targets = [key for key in (_key(node, script) for node in given) if key]
            if all(inputs) and targets and not call.keywords:
                return inputs, list(dict.fromkeys(targets))
            if len(inputs) == 1 and read and targets and not call.keywords:
                return {key: key for key in read}, list(dict.fromkeys(targets))
    return [], []


def _values_of_loss(script: Script) -> list[ast.expr]:
    """Return the values of losses, and of the variables in them: nll, kl = f(...), nll + kl."""
    found = [value for _, value in script.losses]
    names = {n.id for value in found for n in ast.walk(value) if isinstance(n, ast.Name)}
    for node in script.nodes:
        called = node.value.func if isinstance(getattr(node, "value", None), ast.Call) else None  # type: ignore[attr-defined]
        if isinstance(node, ast.Assign) and last_name(called or node) not in script.owners:
            parts = (n for target in node.targets for n in ast.walk(target))
            if any(isinstance(n, ast.Name) and n.id in names for n in parts):
                found.append(node.value)
    return found


def _keys_read(model: Path | None, name: str) -> list[str]:
    """Return the keys that a model's forward(self, batch) reads, [] without such a forward."""
    script = None if model is None else Script.read(model)
    classes = {} if script is None else script.classes
    chosen = [classes[name]] if name in classes else classes.values()
    for node in (n for own in chosen for n in own.body):
        if isinstance(node, ast.FunctionDef) and node.name == "forward" and len(node.args.args) > 1:
            batch = node.args.args[1].arg
            reads = (n for n in ast.walk(node) if isinstance(n, ast.Subscript))
            found = [key_of(n) for n in reads if last_name(n.value) == batch]
            if keys := [key for key in dict.fromkeys(found) if key]:
                return keys
    return []


def _key(node: ast.expr, script: Script) -> str:
    """Return KEY of NAME["KEY"], also if it is moved or the value of a variable, or ""."""
    node = unmoved(node)
    if isinstance(node, ast.Name):
        node = unmoved(script.values.get(node.id, node))
    return key_of(node) if isinstance(node, ast.Subscript) else ""


def _size(node: ast.expr) -> int | None:
    """Return the value of an integer or of a product of integers, or None."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _size(node.left), _size(node.right)
        return None if left is None or right is None else left * right
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def transforms_of(files: Iterable[Path]) -> set[str]:
    """Return the names of torchvision's transforms that scripts call."""
    found = {"ToTensor", "Normalize", "Resize", "CenterCrop", "RandomCrop", "RandomResizedCrop"}
    scripts = [script for file in files if (script := Script.read(file)) is not None]
    return found & {name for script in scripts for name in script.calls}


def _is_dataset(script: Script, name: str) -> bool:
    bases = [last_name(base) for base in script.classes[name].bases]
    return any(base.endswith("Dataset") for base in bases)
