"""Finds the loss in the syntax trees of training scripts. No script is run."""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradscope.sources.scripts.syntax import (
    LOSSES,
    Script,
    Sources,
    key_of,
    last_name,
    option_of,
    read_scripts,
    unmoved,
)
from gradscope.sources.variables import MOVED

_LOSS_OPTIONS = {"ignore_index", "label_smoothing", "delta", "margin"}
_TRAINED = 100  # how much more a loss counts if backward() is called of it
_REDUCING = {"reduction", "size_average", "reduce"}
# methods and functions that keep the numbers of their first argument
_KEEPING = MOVED | {"cpu", "long", "half", "view", "reshape", "squeeze", "unsqueeze", "flatten"}
_KEEPING |= {"contiguous", "detach", "type", "permute", "transpose", "t", "Variable"}
_KEEPING |= {"tensor", "as_tensor", "from_numpy", "LongTensor", "FloatTensor", "Tensor"}
_SUMMED = {"kl", "ctc"}  # losses of gradscope that are sums over a sample by default
# numbers of samples: 1 for a sample
_COUNTS = re.compile(
    r"^len\(|\.size\(0\)$|\.shape\[0\]$|batch|accum|steps$|^n$|^bs$|world_size", re.I
)
_MODULES = {"torch", "F", "nn", "np", "functional", "autograd", "self"}


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


def reduced_loss(value: ast.expr) -> tuple[ast.expr, list[str]]:
    """Return LOSS of LOSS.mean() and LOSS / n, for n samples, and the names of the reductions."""
    reducers: list[str] = []
    while True:
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
            size = ast.unparse(value.right)
            steps = isinstance(getattr(value.right, "value", None), int) and size not in ("1", "2")
            if not steps and not _COUNTS.search(size):
                return value, reducers
            value = value.left
        elif isinstance(value, ast.Call) and last_name(value.func) in ("mean", "sum"):
            owner = getattr(value.func, "value", None)
            function = owner is None or last_name(owner) in _MODULES
            given = value.args[int(function) :] or value.keywords
            inner = next(iter(value.args), None) if function else owner
            if given or inner is None:
                return value, reducers
            reducers.insert(0, last_name(value.func))
            value = inner
        else:
            return value, reducers


def built_loss(call: ast.Call, values: Mapping[str, ast.expr]) -> ast.Call | None:
    """Return the call with the options of a loss of torch, or None for a different call.

    The loss may be called directly, or by a variable: criterion = nn.CrossEntropyLoss().
    """
    if isinstance(call.func, ast.Call):  # nn.CrossEntropyLoss()(outputs, targets)
        return call.func if last_name(call.func.func) in LOSSES else None
    if last_name(call.func) in LOSSES:
        return None if last_name(call.func)[:1].isupper() else call
    own = unmoved(values.get(last_name(call.func), call.func))
    if isinstance(own, ast.Call) and last_name(own.func) == "partial" and own.args:
        return ast.Call(own.args[0], [], own.keywords) if last_name(own.args[0]) in LOSSES else None
    if isinstance(own, ast.Call):
        return own if last_name(own.func) in LOSSES else None
    return ast.Call(own, [], []) if last_name(own) in LOSSES else None  # loss_fn = F.mse_loss


def options_of(
    call: ast.Call,
    made: ast.Call,
    sources: Sources,
    given: Mapping[str, Any],
    reducers: Sequence[str] = ("mean",),
) -> str | None:
    """Return the options of a loss, as in gradscope's names, or None if one is unknown.

    Args:
        call: The call of the loss.
        made: The call that has its options: `call`, or the call of the loss's class.
        sources: The script.
        given: The arguments that the checkpoint stores.
        reducers: The reductions of the result of the loss, if it has no reduction.
    """
    direct = made is call
    extra = call.args[2:] if direct else [*made.args, *call.args[2:]]
    keywords = [*made.keywords, *(() if direct else call.keywords)]
    if any(getattr(node, "value", node) not in (None, True, False) for node in extra):
        return None
    found, sums = [], False
    for keyword in keywords:
        if keyword.arg in ("input", "target") or getattr(keyword.value, "value", keyword) is None:
            continue
        if keyword.arg in _REDUCING:
            kind = getattr(keyword.value, "value", None)
            sums |= kind in ("sum", "batchmean") or (keyword.arg == "size_average" and not kind)
            if kind == "none" or (keyword.arg == "reduce" and kind is False):
                if len(reducers) != 1:
                    return None
                sums = reducers[0] == "sum"
            continue
        value = sources.constant(keyword.value)
        key = key_of(keyword.value) or last_name(keyword.value)
        plain = given.get(key) if key in given else getattr(value, "value", None)
        if keyword.arg not in _LOSS_OPTIONS or not isinstance(plain, int | float):
            return None
        found.append(f"{keyword.arg}={plain}")
    name = LOSSES.get(last_name(made.func), "")
    if name in _SUMMED and not sums and name != "ctc":
        found.append("per_sample=mean")
    elif sums and name not in _SUMMED:
        found.append("per_sample=sum")
    return f":{','.join(found)}" if found else ""


def read_options(
    scripts: Sequence[Script], given: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """Return the values of options of argparse, and the names of those that are defaults."""
    found: dict[str, Any] = {}
    for script in reversed(scripts):
        options = map(option_of, script.calls.get("add_argument", ()))
        found |= {o.name: o.default for o in options if o.default is not None}
    return found | dict(given), found.keys() - given.keys()


def base_of(node: ast.expr) -> ast.expr:
    """Return the variable in an expression: x of sigmoid(x / 2)."""
    if isinstance(node, ast.Call):
        owner = getattr(node.func, "value", None)
        function = owner is None or last_name(owner) in _MODULES
        inner = next(iter(node.args), None) if function else owner
        return node if inner is None else base_of(inner)
    return node


def is_complete(code: str) -> bool:
    """Whether a module defines all names that it reads, and has no "..."."""
    nodes = list(ast.walk(ast.parse(code)))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            stored |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            stored.add(node.name)
    read = {n.id for n in nodes if isinstance(n, ast.Name)} - stored - {*dir(builtins)}
    return not read and not any(isinstance(n, ast.Constant) and n.value is ... for n in nodes)


def keeps_numbers(node: ast.expr) -> bool:
    """Whether an expression has the numbers of a variable: no arithmetic, no other function."""
    if isinstance(node, ast.Subscript):
        entries = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        return keeps_numbers(node.value) and not entries
    if isinstance(node, ast.Attribute):
        return keeps_numbers(node.value)
    if isinstance(node, ast.Call):
        owner = getattr(node.func, "value", None)
        if last_name(node.func) not in _KEEPING:
            return False
        function = owner is None or last_name(owner) in _MODULES
        inner = next(iter(node.args), None) if function else owner
        return inner is None or keeps_numbers(inner)
    return not isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare | ast.IfExp)


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

        def add(call: ast.Call, built: ast.Call, weight: int, sources: Sources = sources) -> None:
            options = options_of(call, built, sources, given) or ""
            found[LOSSES[last_name(built.func)] + options] += weight

        for called in script.calls.keys() & LOSSES.keys():
            for call in script.calls[called]:
                add(call, call, 1)
        trained = (n for _, value in script.losses for n in ast.walk(value))
        for call in (n for n in trained if isinstance(n, ast.Call)):
            if (built := built_loss(call, script.values)) is not None:
                add(call, built, _TRAINED)
        for value in script.values.values():  # loss_fn = F.cross_entropy, or partial(...)
            of = value.args[0] if isinstance(value, ast.Call) and value.args else value
            partial = isinstance(value, ast.Call) and last_name(value.func) == "partial"
            if last_name(of) in LOSSES and (partial or not isinstance(value, ast.Call)):
                made = ast.Call(of, [], value.keywords if isinstance(value, ast.Call) else [])
                add(made, made, 1)
    return found
