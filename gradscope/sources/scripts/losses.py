"""Finds the loss in the syntax trees of training scripts. No script is run."""

import ast
import builtins
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradscope.sources.scripts.parts import ModelClass
from gradscope.sources.scripts.syntax import (
    LOSSES,
    Script,
    Sources,
    Substituted,
    called_name,
    copy_of,
    dotted_name,
    key_of,
    last_name,
    read_scripts,
    unmoved,
)
from gradscope.sources.variables import MOVED

_LOSS_OPTIONS = {"ignore_index", "label_smoothing", "delta", "margin"}
_TRAINED = 100  # how much more a loss counts if backward() is called of it
_REDUCING = {"reduction", "size_average", "reduce"}  # options that do not change a sample's loss
# methods and functions that keep the numbers of their first argument
_KEEPING = MOVED | {"cpu", "long", "half", "view", "reshape", "squeeze", "unsqueeze", "flatten"}
_KEEPING |= {"contiguous", "detach", "type", "permute", "transpose", "t", "Variable"}
_KEEPING |= {"mean", "sum"}  # of losses
_KEEPING |= {"tensor", "as_tensor", "from_numpy", "LongTensor", "FloatTensor", "Tensor"}
_MODULES = {"torch", "F", "nn", "np", "functional", "autograd", "self"}
_CHANGING = {
    "sigmoid",
    "softmax",
    "log_softmax",
    "tanh",
    "exp",
    "log",
    "normalize",
    "clamp",
    "relu",
}


def losses_called(
    files: Iterable[Path], model: Path | None = None, given: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the torch losses that scripts call, by gradscope's names, most frequent first.

    A name includes options: "cross_entropy:ignore_index=-1". If scripts that train call losses,
    the remaining scripts do not count. If scripts train the model of the file `model`, scripts that
    train other models do not count.

    Args:
        files: Python files.
        model: The file of the model.
        given: The arguments that the checkpoint stores: label_smoothing=args.smoothing.
    """
    training, others = training_scripts(files, model, given)
    counts = _losses(training, given or {}) or _losses(others, given or {})
    counts = Counter({k: n for k, n in counts.items() if n >= _TRAINED}) or counts
    return sorted(counts, key=lambda name: (-counts[name], ":" not in name, name))


def loss_expression(
    files: Iterable[Path], model: Path | None, given: Mapping[str, Any]
) -> tuple[list[str], str]:
    """Return code for a loss of torch that is not LOSS(outputs, targets), and the script's line.

    Examples are 0.5 * F.mse_loss(out, y), a loss with weights of classes, and a loss of scaled
    targets. The code is a function of (outputs, targets), or [] if there is no such loss.
    """
    files = list(files)
    scripts = read_scripts(files, given)
    for script in training_scripts(files, model, given)[0]:
        sources = Sources(script, scripts)
        for name, value in script.losses:
            calls = [n for n in ast.walk(value) if isinstance(n, ast.Call) and _built(n, script)]
            added = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub)
            if added or len(calls) != 1 or len(calls[0].args) < 2:
                continue
            (call,), local = calls, sources.local(calls[0])
            whole = _undivided(value) is call
            options = _options_of(call, script, sources, given)
            outputs, targets = (_followed(node, local) for node in call.args[:2])
            same = keeps_numbers(outputs, _CHANGING) and keeps_numbers(targets)
            entry = _entry(_base(outputs), script)
            if whole and same and options is not None and entry is None:
                continue
            line = f"{script.file.name}: {name} = {ast.unparse(value)}"
            made = _one_sample(value, call, outputs, targets, script)
            head = ["import torch", "from torch import nn", "from torch.nn import functional as F"]
            first = [] if entry is None else [f"    outputs = outputs[{entry}]"]
            body = ["def loss(outputs, targets):", *first, f"    return torch.stack([{made}"]
            used = {n.id for n in ast.walk(ast.parse("\n".join(body))) if isinstance(n, ast.Name)}
            if mine := sorted(used & script.top):
                head.append(f"from {script.file.stem} import {', '.join(mine)}")
            return [*head, *body], line
    return [], ""


def _entry(output: ast.expr, script: Script) -> int | None:
    """Return k if an output is entry k of a tuple that the model returns, or None.

    Examples are `encoded, decoded = model(x)`, and `out = model(x)[0]`.
    """
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(output, ast.Name):
            continue
        target, value = node.targets[0], node.value
        if isinstance(value, ast.Subscript) and last_name(target) == output.id:
            if _calls_model(value.value, script) and isinstance(value.slice, ast.Constant):
                return value.slice.value if isinstance(value.slice.value, int) else None
        elif isinstance(target, ast.Tuple) and _calls_model(value, script):
            names = [last_name(each) for each in target.elts]
            if output.id in names:
                return names.index(output.id)
    return None


def _calls_model(node: ast.expr, script: Script) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in script.owners


def _one_sample(
    value: ast.expr, call: ast.Call, outputs: ast.expr, targets: ast.expr, script: Script
) -> str:
    """Return the expression of a loss for the output o and the target t of one sample."""
    arguments: list[ast.expr] = []
    for node, name in ((outputs, "o"), (targets, "t")):
        text = ast.unparse(node)
        arguments.append(ast.parse(text.replace(ast.unparse(_base(node)), name)).body[0].value)  # type: ignore[attr-defined]
    own = script.values.get(last_name(call.func))
    called = call.func if own is None or last_name(call.func) in LOSSES else unmoved(own)
    made = ast.Call(called, [*arguments, *call.args[2:]], call.keywords)
    text = ast.unparse(value).replace(ast.unparse(call), ast.unparse(made))
    return f"{text} for o, t in zip(outputs.split(1), targets.split(1))])"


def _base(node: ast.expr) -> ast.expr:
    """Return the variable in an expression, or the call of a model: x of sigmoid(x / 2)."""
    if isinstance(node, ast.BinOp):
        names = {n.id for n in ast.walk(node.left) if isinstance(n, ast.Name)} - _MODULES
        return _base(node.left if names else node.right)
    if isinstance(node, ast.Subscript | ast.UnaryOp):
        return _base(node.value if isinstance(node, ast.Subscript) else node.operand)
    if isinstance(node, ast.Call):
        owner, known = getattr(node.func, "value", None), {*_KEEPING, *_CHANGING}
        if last_name(node.func) in known:
            function = owner is None or last_name(owner) in _MODULES
            inner = next(iter(node.args), None) if function else owner
            return node if inner is None else _base(inner)
        return _base(node.args[0]) if len(node.args) == 1 and owner is not None else node
    return node


def is_complete(code: str) -> bool:
    """Whether a module defines all names that it reads, and has no "..."."""
    nodes = list(ast.walk(ast.parse(code)))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            stored |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            stored.add(node.name)
    read = {n.id for n in nodes if isinstance(n, ast.Name)} - stored - {*dir(builtins)}
    return not read and not any(isinstance(n, ast.Constant) and n.value is ... for n in nodes)


def _undivided(value: ast.expr) -> ast.expr:
    """Return LOSS of LOSS.mean(), and of LOSS / n, for n steps of accumulation or n samples."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        scaled = isinstance(getattr(value.right, "value", None), float)
        value = value if scaled else value.left
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr not in ("mean", "sum"):
            break
        value = value.func.value
    return value


def _built(call: ast.Call, script: Script) -> ast.Call | None:
    """Return the call with the options of a loss of torch, or None for a different call.

    The loss may be called directly, or by a variable: criterion = nn.CrossEntropyLoss().
    """
    if last_name(call.func) in LOSSES:
        return None if last_name(call.func)[:1].isupper() else call
    own = unmoved(script.values.get(last_name(call.func), call.func))
    if isinstance(own, ast.Call) and last_name(own.func) == "partial" and own.args:
        return ast.Call(own.args[0], [], own.keywords) if last_name(own.args[0]) in LOSSES else None
    if isinstance(own, ast.Call):
        return own if last_name(own.func) in LOSSES else None
    return ast.Call(own, [], []) if last_name(own) in LOSSES else None  # loss_fn = F.mse_loss


def _options_of(
    call: ast.Call, script: Script, sources: Sources, given: Mapping[str, Any]
) -> str | None:
    """Return the options of a call of a loss, as in gradscope's names, or None if one is unknown.

    They may be options of the loss's class.
    """
    made = _built(call, script) or call
    direct = made is call
    extra = call.args[2:] if direct else [*made.args, *call.args[2:]]
    keywords = [*made.keywords, *(() if direct else call.keywords)]
    if any(getattr(node, "value", node) not in (None, True, False) for node in extra):
        return None
    found = []
    for keyword in keywords:
        if keyword.arg in _REDUCING or getattr(keyword.value, "value", keyword) is None:
            continue
        value = sources.constant(keyword.value)
        key = key_of(keyword.value) or last_name(keyword.value)
        plain = given.get(key) if key in given else getattr(value, "value", None)
        if keyword.arg not in _LOSS_OPTIONS or not isinstance(plain, int | float):
            return None
        found.append(f"{keyword.arg}={plain}")
    return f":{','.join(found)}" if found else ""


def _followed(node: ast.expr, local: Mapping[str, ast.expr]) -> ast.expr:
    """Replace a variable by its value, unless it is the result of a function: out = model(x)."""
    for _ in range(4):
        value = local.get(node.id) if isinstance(node, ast.Name) else None
        called = value.func if isinstance(value, ast.Call) else None
        known = last_name(called or node) in {*_KEEPING, *_CHANGING}
        if value is None or (isinstance(called, ast.Name) and not known):
            return node
        read = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} - _MODULES
        if not read:
            return node  # y = torch.zeros(8)
        name, node = last_name(node), value
        if name in read:
            return value  # y = y.view(-1)
    return node


def keeps_numbers(node: ast.expr, changing: Collection[str] | None = None) -> bool:
    """Whether an expression has the numbers of a variable: no arithmetic, no other function.

    With `changing`, all other functions keep the numbers: they are models.
    """
    if isinstance(node, ast.Subscript):
        entries = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        return keeps_numbers(node.value, changing) and not entries
    if isinstance(node, ast.Attribute):
        return keeps_numbers(node.value, changing)
    if isinstance(node, ast.Call):
        owner, called = getattr(node.func, "value", None), last_name(node.func)
        if called not in _KEEPING:
            return changing is not None and called not in changing
        function = owner is None or last_name(owner) in _MODULES
        inner = next(iter(node.args), None) if function else owner
        return inner is None or keeps_numbers(inner, changing)
    return not isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare | ast.IfExp)


def loss_method(
    files: Iterable[Path], model: Path | None, given: Mapping[str, Any] | None = None
) -> tuple[list[str], str]:
    """Return code for a loss that a method of the model computes, and the script's line.

    The code is the body of a function of (model, inputs, targets). Its last line is
    "return torch.stack([-model.log_prob(x[None]).mean() for x in inputs])" for the line
    "train.py: loss = -model.log_prob(batch).mean()". The method may be forward. Without such a
    loss, the code is [].
    """
    files = list(files)
    scripts = read_scripts(files, given)
    torch_losses = {name for script in scripts for name in script.torch_losses}
    for script in training_scripts(files, model, given)[0]:
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
                if any(isinstance(node, ast.Starred) for node in methods[0].args):
                    return ["return ..."], place
                passed = ["x[None]", "y[None]"][: len(methods[0].args)]
                reduced = None if forward is None else _reduced_by(forward, torch_losses)
                if reduced:
                    both = ", ".join(["inputs", "targets"][: len(passed)])
                    whole = f"return model({both}).flatten(1).mean(1)"
                    return [f'model.{reduced}.reduction = "none"', whole], place
                own = "model" if forward is not None else f"model.{last_name(methods[0].func)}"
                own += f"({', '.join(passed)})"
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


def own_loss(
    files: Iterable[Path], model: Path | None, given: Mapping[str, Any] | None = None
) -> tuple[list[str], str]:
    """Return code for a loss that is a script's own function or class, and the script's line.

    The code is a function of (outputs, targets), or () if it cannot be written. If the loss takes
    parts of the model, the code is the first lines of a function of (model, inputs, targets). A
    function that returns a loss of torch is not an own loss.
    """
    files = list(files)
    scripts = read_scripts(files, given)
    places = {name: s for s in reversed(scripts) for name in (*s.functions, *s.classes)}
    for script in training_scripts(files, model, given)[0]:
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
    for script in training_scripts(files, model)[0]:
        passed: dict[str, str] = {}  # {output of the model: its input}
        for node in script.nodes:
            call = node.value if isinstance(node, ast.Assign) else None
            of_model = isinstance(call, ast.Call) and last_name(call.func) in script.owners
            if of_model and isinstance(call, ast.Call) and len(call.args) == 1:
                target = node.targets[0]  # type: ignore[attr-defined]
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    passed[last_name(each)] = _source(call.args[0], script)
        for name, value in script.losses:
            for call in _terms(value):
                ends = call.args[:2]
                source = _source(ends[1], script) if len(ends) == 2 else ""
                if source and passed.get(last_name(ends[0])) == source:
                    return f"{script.file.name}: {name} = {ast.unparse(value)}"
    return ""


def _source(node: ast.expr, script: Script) -> str:
    """Return the variable x of y = x.view(-1, 784), batch["x"], or "" for other expressions."""
    for _ in range(3):
        if isinstance(entry := unmoved(node), ast.Subscript) and key_of(entry):
            return ast.unparse(entry)
        base = _base(node) if keeps_numbers(node) else None
        if not isinstance(base, ast.Name):
            return ""
        name, node = base.id, script.values.get(base.id, base)
        if not keeps_numbers(node) or not isinstance(_base(node), ast.Name):
            return name
    return name


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


def training_scripts(
    files: Iterable[Path], model: Path | None, given: Mapping[str, Any] | None = None
) -> tuple[list[Script], list[Script]]:
    """Return the scripts that train, and the scripts that do not.

    If scripts train the model of the file `model`, scripts that train other models are left out.
    """
    scripts = read_scripts(files, given)
    training = [script for script in scripts if script.trains]
    of = [script for script in scripts if script.file == model]
    own = [s for s in training if s.file == model or any(map(s.imports, of))]
    return own or training, [script for script in scripts if script not in training]


def loss_is_summed(
    files: Iterable[Path], model: Path | None, given: Mapping[str, Any] | None = None
) -> bool:
    """Whether a script that trains the model calls backward() of a sum of several terms."""
    return any(script.sums for script in training_scripts(files, model, given)[0])


def _losses(scripts: Sequence[Script], given: Mapping[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for script in scripts:
        sources = Sources(script, scripts)
        for called in script.calls.keys() & LOSSES.keys():
            for call in script.calls[called]:
                found[LOSSES[called] + (_options_of(call, script, sources, given) or "")] += 1
        trained = (n for _, value in script.losses for n in ast.walk(value))
        for call in (n for n in trained if isinstance(n, ast.Call)):
            if (built := _built(call, script)) is not None:
                options = _options_of(call, script, sources, given) or ""
                found[LOSSES[last_name(built.func)] + options] += _TRAINED
        for value in script.values.values():  # loss_fn = F.cross_entropy, or partial(...)
            of = value.args[0] if isinstance(value, ast.Call) and value.args else value
            partial = isinstance(value, ast.Call) and last_name(value.func) == "partial"
            if last_name(of) in LOSSES and (partial or not isinstance(value, ast.Call)):
                made = value if isinstance(value, ast.Call) else ast.Call(value, [], [])
                made = ast.Call(of, [], made.keywords)
                found[
                    LOSSES[last_name(of)] + (_options_of(made, script, sources, given) or "")
                ] += 1
    return found
