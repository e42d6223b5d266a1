"""Finds the loss in the syntax trees of training scripts. No script is run."""

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from gradscope.sources.scripts.parts import ModelClass
from gradscope.sources.scripts.syntax import (
    LOSSES,
    MOVED,
    Script,
    Sources,
    Substituted,
    called_name,
    copy_of,
    dotted_name,
    last_name,
    unmoved,
)

_LOSS_OPTIONS = {"ignore_index", "label_smoothing", "delta", "margin"}


def losses_called(files: Iterable[Path], model: Path | None = None) -> list[str]:
    """Return the torch losses that scripts call, by gradscope's names, most frequent first.

    A name includes constant options: "cross_entropy:ignore_index=-1". If scripts that train call
    losses, the remaining scripts do not count. If scripts train the model of the file `model`,
    scripts that train other models do not count.
    """
    training, others = _training(files, model)
    counts = _losses(training) or _losses(others)
    return sorted(counts, key=lambda name: (-counts[name], ":" not in name, name))


def loss_method(files: Iterable[Path], model: Path | None) -> tuple[list[str], str]:
    """Return code for a loss that a method of the model computes, and the script's line.

    The code is the body of a function of (model, inputs, targets). Its last line is
    "return torch.stack([-model.log_prob(x[None]).mean() for x in inputs])" for the line
    "train.py: loss = -model.log_prob(batch).mean()". The method may be forward. Without such a
    loss, the code is [].
    """
    files = list(files)
    scripts = [script for file in files if (script := Script.read(file)) is not None]
    torch_losses = {name for script in scripts for name in script.torch_losses}
    for script in _training(files, model)[0]:
        for name, value in script.losses:
            line, value = ast.unparse(value), _with_outputs(value, script)
            called = [inner for inner in ast.walk(value) if isinstance(inner, ast.Call)]
            methods = [
                each
                for each in called
                if isinstance(each.func, ast.Attribute)
                and last_name(each.func.value) in script.owners
                and each.func.attr not in {"forward", *torch_losses}
            ]
            forward = None if methods else _forward_of(value, script, scripts)
            if forward is not None:  # loss = model(x, y)
                methods = [value]  # type: ignore[list-item]
            torchs = not LOSSES.keys().isdisjoint(last_name(each.func) for each in called)
            if methods and (not torchs or _is_method(methods[0].func, script, scripts)):
                place = f"{script.file.name}: {name} = {line}"
                given = ["x[None]", "y[None]"][: len(methods[0].args)]
                reduced = None if forward is None else _reduced_by(forward, torch_losses)
                if reduced:
                    both = ", ".join(["inputs", "targets"][: len(given)])
                    whole = f"return model({both}).flatten(1).mean(1)"
                    return [f'model.{reduced}.reduction = "none"', whole], place
                own = "model" if forward is not None else f"model.{last_name(methods[0].func)}"
                own += f"({', '.join(given)})"
                each = ast.unparse(value).replace(ast.unparse(methods[0]), own)
                of = "x, y in zip(inputs, targets)" if "y[None]" in each else "x in inputs"
                return [f"return torch.stack([{each} for {of}])"], place
    return [], ""


def _is_method(node: ast.expr, script: Script, scripts: Sequence[Script]) -> bool:
    """Whether an expression is MODEL.METHOD of a local class, as model.encode."""
    sources, owner = Sources(script, scripts), getattr(node, "value", node)
    made = unmoved(script.values.get(last_name(owner), owner))
    own = ModelClass(sources, last_name(made.func) if isinstance(made, ast.Call) else "")
    return isinstance(node, ast.Attribute) and own.method(node.attr) is not None


def _forward_of(
    node: ast.expr, script: Script, scripts: Sequence[Script]
) -> ast.FunctionDef | None:
    """Return the forward of a local model if the expression is a call of this model."""
    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(called, ast.Name) or called.id not in script.owners:
        return None
    sources = Sources(script, scripts)
    made = unmoved(script.values.get(called.id, called))
    name = last_name(made.func) if isinstance(made, ast.Call) else ""
    known = sources.is_module(name) and not _is_loss(name)
    return ModelClass(sources, name).method("forward") if known else None


def _is_loss(name: str) -> bool:
    return name.lower().endswith(("loss", "criterion"))


def _reduced_by(forward: ast.FunctionDef, torch_losses: Collection[str]) -> str:
    """Return NAME if forward returns self.NAME(...), a loss of torch, else ""."""
    value = getattr(forward.body[-1], "value", None)
    dotted = dotted_name(value.func) or "" if isinstance(value, ast.Call) else ""
    owner, _, name = dotted.partition(".")
    return name if owner == "self" and name in torch_losses else ""


def _with_outputs(loss: ast.expr, script: Script) -> ast.expr:
    """Replace the outputs in LOSS(OUTPUTS, TARGETS) by the model's method that computes them."""
    if not isinstance(loss, ast.Call):
        return loss
    made: dict[str, ast.expr] = {}
    for node in loss.args:
        value = script.values.get(node.id, node) if isinstance(node, ast.Name) else node
        value = value.orelse if isinstance(value, ast.IfExp) else value
        called = value.func if isinstance(value, ast.Call) else None
        if (
            isinstance(called, ast.Attribute)
            and last_name(called.value) in script.owners
            and called.attr not in ("forward", "module")
        ):
            made[last_name(node)] = value
    others = [node.id for node in loss.args if isinstance(node, ast.Name) and node.id not in made]
    if made and len(others) == 1:
        made[others[0]] = ast.parse("y[None]", mode="eval").body
    found: ast.expr = Substituted(made).visit(copy_of(loss))
    return found


def own_loss(files: Iterable[Path], model: Path | None) -> tuple[list[str], str]:
    """Return code for a loss that is a script's own function or class, and the script's line.

    The code is a function of (outputs, targets), or () if it cannot be written. If the loss takes
    parts of the model, the code is the first lines of a function of (model, inputs, targets). A
    function that returns a loss of torch is not an own loss.
    """
    files = list(files)
    scripts = [script for file in files if (script := Script.read(file)) is not None]
    places = {name: s for s in reversed(scripts) for name in (*s.functions, *s.classes)}
    for script in _training(files, model)[0]:
        made = script.values
        for name, value in script.losses:
            for call in _terms(value):
                built = made.get(last_name(call.func))  # criterion = FocalLoss(2)
                while isinstance(built, ast.Call) and last_name(built.func) in MOVED:
                    built = getattr(built.func, "value", None)
                own = last_name(built.func if isinstance(built, ast.Call) else call.func)
                if isinstance(built, ast.Call) and not own:  # losses.__dict__[args.loss]()
                    own = called_name(built, script, Sources(script, scripts), {}).split(".")[-1]
                place = places.get(own)
                owner = last_name(call.func) in script.owners and not _is_loss(own)
                if place is None or (own in place.classes and owner):
                    continue  # not a script's loss, or a model that returns its loss
                if _returns_torch_loss(place.functions.get(own) or place.classes[own]):
                    continue
                line = f"{script.file.name}: {name} = {ast.unparse(value)}"
                if place.trains or len(call.args) != 2 or call.keywords:  # its import may train
                    names = {last_name(inner) for each in call.args for inner in ast.walk(each)}
                    of_model = ["import gradscope", "@gradscope.model_loss"]
                    of_model += ["def loss(model, inputs, targets):", "    return ..."]
                    code = [] if names.isdisjoint(script.owners) else of_model
                    return code, f"{line}, with {own} of {place.file.name}"
                lines = ["import torch", f"from {place.file.stem} import {own}"]
                if isinstance(built, ast.Call):
                    taken = ast.unparse(built).removeprefix(ast.unparse(built.func))
                    lines.append(f"criterion = {own}{taken}")
                    own = "criterion"
                each = f"{own}(o[None], t[None])"
                lines.append("def loss(outputs, targets):")
                lines.append(f"    rows = [{each} for o, t in zip(outputs, targets)]")
                return [*lines, "    return torch.stack(rows)"], line
    return [], ""


def reconstruction(files: Iterable[Path], model: Path | None) -> str:
    """Return the line of a loss whose target is the model's input, or "".

    An example is "train.py: loss = criterion(output, x)" after `output = model(x)`.
    """
    for script in _training(files, model)[0]:
        passed: dict[str, str] = {}  # {output of the model: its input}
        for node in script.nodes:
            call = node.value if isinstance(node, ast.Assign) else None
            if isinstance(call, ast.Call) and last_name(call.func) in script.owners and call.args:
                target = node.targets[0]  # type: ignore[attr-defined]
                first = target.elts[0] if isinstance(target, ast.Tuple) else target
                passed[last_name(first)] = last_name(call.args[0])
        for name, value in script.losses:
            for call in _terms(value):
                ends = [last_name(node) for node in call.args[:2]]
                if len(ends) == 2 and ends[1] and passed.get(ends[0]) == ends[1]:
                    return f"{script.file.name}: {name} = {ast.unparse(value)}"
    return ""


def _terms(node: ast.expr) -> list[ast.Call]:
    """Return the calls whose values, or means or sums of their values, a loss adds."""
    if isinstance(node, ast.BinOp):
        return [*_terms(node.left), *_terms(node.right)]
    if not isinstance(node, ast.Call):
        return []
    reduced = isinstance(node.func, ast.Attribute) and node.func.attr in ("mean", "sum")
    return _terms(node.func.value) if reduced else [node]  # type: ignore[attr-defined]


def _returns_torch_loss(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a function, or the forward of a class, returns the value of a loss of torch."""
    nodes = list(ast.walk(node))
    made = {last_name(n.targets[0]): n.value for n in nodes if isinstance(n, ast.Assign)}
    for found in (n.value for n in nodes if isinstance(n, ast.Return)):
        value = found.elts[0] if isinstance(found, ast.Tuple) and found.elts else found
        for _ in range(3):  # loss.mean(), and the variable or attribute loss
            if isinstance(value, ast.Call) and last_name(value.func) in ("mean", "sum"):
                value = getattr(value.func, "value", None)
            if value is not None and (known := made.get(last_name(value))) is not None:
                value = known
            elif isinstance(value, ast.Call) and last_name(value.func) in made:
                value = made[last_name(value.func)]
        if isinstance(value, ast.Call) and last_name(value.func) in LOSSES:
            return True
    return False


def _training(files: Iterable[Path], model: Path | None) -> tuple[list[Script], list[Script]]:
    """Return the scripts that train, and the scripts that do not.

    If scripts train the model of the file `model`, scripts that train other models are left out.
    """
    scripts = [script for file in files if (script := Script.read(file)) is not None]
    training = [script for script in scripts if script.trains]
    of = [script for script in scripts if script.file == model]
    own = [s for s in training if s.file == model or any(map(s.imports, of))]
    return own or training, [script for script in scripts if script not in training]


def loss_is_summed(files: Iterable[Path]) -> bool:
    """Whether a script calls backward() of a sum of several terms."""
    scripts = [script for file in files if (script := Script.read(file)) is not None]
    return any(script.sums for script in scripts)


def _losses(scripts: Iterable[Script]) -> Counter[str]:
    return Counter(
        LOSSES[called] + _options(call)
        for script in scripts
        for called in script.calls.keys() & LOSSES.keys()
        for call in script.calls[called]
    )


def _options(call: ast.Call) -> str:
    """Return the constant options of a loss: ":label_smoothing=0.1", or ""."""
    found = []
    for keyword in call.keywords:
        with suppress(ValueError):
            if keyword.arg in _LOSS_OPTIONS:
                found.append(f"{keyword.arg}={ast.literal_eval(keyword.value)}")
    return f":{','.join(found)}" if found else ""
