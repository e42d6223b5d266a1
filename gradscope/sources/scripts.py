"""Finds the model of a checkpoint in the syntax trees of training scripts. No script is run.

A model class names its parts in its `__init__`. The checkpoint's keys begin with these names, so
the class whose parts explain most keys is the model of the checkpoint. The sizes of its tensors
give the values of many arguments of the class.
"""

import ast
import re
from argparse import Namespace
from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from gradscope.sources.training import parses_arguments, trains

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
# an expression, its value (a list for [Layer(k) for k in EXPRESSION]), the source's name
Equation = tuple[ast.expr, int | list[int], str]
_PREFIX = re.compile(r"(?:module\.|_orig_mod\.)+")  # DataParallel and torch.compile add these

# torch's layers by name: their arguments, and which axis of the weight has an argument's size
_AXES: dict[str, dict[str, int]] = {
    "Linear": {"in_features": 1, "out_features": 0},
    "LazyLinear": {"out_features": 0},
    "Embedding": {"num_embeddings": 0, "embedding_dim": 1},
    "EmbeddingBag": {"num_embeddings": 0, "embedding_dim": 1},
    "LayerNorm": {"normalized_shape": 0},
    "RMSNorm": {"normalized_shape": 0},
    "GroupNorm": {"num_groups": -1, "num_channels": 0},
    **{f"BatchNorm{d}d": {"num_features": 0} for d in (1, 2, 3)},
    **{f"InstanceNorm{d}d": {"num_features": 0} for d in (1, 2, 3)},
    **{f"Conv{d}d": {"in_channels": -1, "out_channels": 0, "kernel_size": 2} for d in (1, 2, 3)},
    **{
        f"ConvTranspose{d}d": {"in_channels": 0, "out_channels": -1, "kernel_size": 2}
        for d in (1, 2, 3)
    },
    **{
        name: {"input_size": 1, "hidden_size": 2, "num_layers": 3}
        for name in ("RNN", "LSTM", "GRU")
    },
    **{f"{name}Cell": {"input_size": 1, "hidden_size": 2} for name in ("RNN", "LSTM", "GRU")},
    "MultiheadAttention": {"embed_dim": 1, "num_heads": -1},
    "Bilinear": {"in1_features": 1, "in2_features": 2, "out_features": 0},
    "PReLU": {"num_parameters": 0},
}
_RECURRENT = {"RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"}
_TRANSFORMERS: dict[str, tuple[str, ...]] = {
    "Transformer": (
        "d_model", "nhead", "num_encoder_layers", "num_decoder_layers", "dim_feedforward",
    ),
    "TransformerEncoder": ("encoder_layer", "num_layers"),
    "TransformerDecoder": ("decoder_layer", "num_layers"),
    "TransformerEncoderLayer": ("d_model", "nhead", "dim_feedforward"),
    "TransformerDecoderLayer": ("d_model", "nhead", "dim_feedforward"),
}  # fmt: skip
_NESTED = {"MultiheadAttention", *_TRANSFORMERS}
# words in names of layers without parameters
_PLAIN = re.compile(
    r"ReLU\d?$|^(Dropout|AlphaDropout|Tanh|Sigmoid|Softmax|LogSoftmax|Flatten|Unflatten|Identity|"
    r"MaxPool|AvgPool|Adaptive|Softplus|SiLU|GELU|ELU|SELU|CELU|Mish|Hard|Upsample|Pixel|Zero|"
    r"ReflectionPad|ReplicationPad|ConstantPad|.*Loss$)"
)
_MOVED = {"to", "cuda", "eval", "train", "double", "float", "prepare", "compile"}
_MOVED |= {"DataParallel", "DistributedDataParallel"}
_REGISTER = {"register_buffer", "register_parameter", "add_module", "setattr"}
_ADD = {"append", "add_module"}  # methods of Sequential and ModuleList
_COPIED = {"deepcopy", "copy"}  # functions that return a copy of a module
_PRETRAINED = {"pretrained", "weights"}  # the checkpoint replaces these weights
_ARGUMENTS = (
    "model_args", "model_kwargs", "hyper_parameters", "hparams", "model_config", "config", "cfg",
    "args", "opt", "options", "params", "settings",
)  # fmt: skip
_LOSSES = {
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
_DRAWS = {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm"}
_DRAWS |= {"bernoulli", "multinomial", "normal", "normal_", "uniform_", "bernoulli_", "rsample"}
_LOADER = ".from_pretrained"
_WRAPPER = 0.5  # the largest fit of a class whose only part may be the model
_LOSS_OPTIONS = {"ignore_index", "label_smoothing", "delta", "margin"}


@dataclass(frozen=True)
class Argument:
    """The value of an argument, and its source."""

    value: Any
    why: str


@dataclass(frozen=True)
class FoundModel:
    """A class or function of a script that may build the model of a checkpoint."""

    file: Path
    name: str
    is_class: bool
    fit: float  # from 0 to 1: the share of the checkpoint's tensors that its parts explain
    why: str
    # known, by name; CONFIG.NAME within a config; MODULE.factory and MODULE.NAME of a module
    arguments: Mapping[str, Argument]
    unknown: Sequence[str]  # names of arguments that must be given
    package: str = ""  # the installed module that defines it, if the file does not
    inputs: Sequence[str] = ()  # the names of the parameters of its forward
    of_arguments: bool = False  # whether command-line arguments may decide what it is
    random: bool = False  # whether its forward draws random numbers in eval mode too

    @property
    def reference(self) -> str:
        """FILE.py:NAME, or package.module:NAME."""
        return f"{self.package or self.file}:{self.name}"


def find_models(files: Iterable[Path], shapes: Shapes, stored: Any = None) -> list[FoundModel]:
    """Return the classes and functions that may build the model of a checkpoint, best first.

    Args:
        files: Python files. They are parsed, not run.
        shapes: The shape of each tensor of the checkpoint, by its key.
        stored: The whole checkpoint. The model's arguments may be in it.
    """
    scripts = [script for file in files if (script := Script.read(file)) is not None]
    known = {_PREFIX.sub("", key): shape for key, shape in shapes.items()}
    given = stored_arguments(stored)

    def fitting(shapes: Shapes) -> list[FoundModel]:
        return [
            model
            for script, sources in ((script, Sources(script, scripts)) for script in scripts)
            for name in (*script.classes, *script.functions)
            if (model := _examined(sources, script, name, shapes, given)) is not None
        ]

    found = fitting(known)
    name, *others = {key.partition(".")[0] for key in known} or {""}
    if not others and not any(model.fit > _WRAPPER for model in found):
        wrappers = [
            ModelClass(Sources(each, scripts), own) for each in scripts for own in each.classes
        ]
        if all(model.only_calls(name) for model in wrappers if name in model.parts):
            found += fitting(_below(known, name))

    def rank(model: FoundModel) -> tuple[float, bool, bool, bool]:
        # a function without arguments passes the arguments of its class; the arguments of a class
        # say what to fill in
        unknown = bool(model.unknown)
        return (
            -round(model.fit, 2),
            unknown,
            bool(model.arguments) != unknown,
            model.is_class != unknown,
        )

    return sorted(found, key=rank)


def find_trained(files: Iterable[Path], stored: Any = None) -> list[FoundModel]:
    """Return the models whose parameters scripts pass to an optimizer.

    A model is a variable at the top level of its script, an object of a class in the files, or the
    result of a package's function.

    Args:
        files: Python files. They are parsed, not run.
        stored: The whole checkpoint. The model's arguments may be in it.
    """
    scripts = [script for file in files if (script := Script.read(file)) is not None]
    local = {part for script in scripts for part in (script.file.stem, script.file.parent.name)}
    given = stored_arguments(stored)
    if isinstance(stored, Mapping):
        given |= {k: v for k, v in stored.items() if isinstance(k, str) and isinstance(v, str)}
    found = []
    for script in scripts:
        for name, made in script.trained:
            why = f"{script.file.name} makes an optimizer for it"
            if made in script.tree.body:
                parses = parses_arguments(script.tree)
                found.append(
                    FoundModel(script.file, name, False, 1.0, why, {}, [], of_arguments=parses)
                )
                continue
            sources = Sources(script, scripts)
            own = _tail(getattr(made.value, "func", made.value))
            dotted = _called_name(made.value, script, sources, given)
            package, last = _split(dotted)
            if sources.is_module(own):
                model = _with_modules(sources, own)
                known, unknown = _given(made.value, list(model.parameters), sources, given)
                for name in model.given.keys() & {*unknown}:
                    inner, missing = _nested(sources, name, model, {}, given)
                    unknown = [*(each for each in unknown if each != name), *missing]
                    known |= inner
                made_by = FoundModel(sources.file(own), own, True, 1.0, why, known, unknown)
                found.append(replace(made_by, inputs=model.inputs(), random=model.random))
            elif package and package.partition(".")[0] not in {*local, "self", "torch"}:
                names = ["pretrained_model_name_or_path"] if last.endswith(_LOADER) else []
                known, unknown = _given(made.value, names, sources, given)
                found.append(
                    FoundModel(script.file, last, False, 1.0, why, known, unknown, package=package)
                )
    return list({model.reference: model for model in reversed(found)}.values())[::-1]


def _called_name(
    node: ast.expr, script: "Script", sources: "Sources", given: Mapping[str, Any]
) -> str:
    """Return the dotted name of a function of a package that an expression calls, or "".

    Examples are `models.__dict__[args.arch]()` and `getattr(models, args.arch)()`.
    """
    if not isinstance(node, ast.Call):
        return ""
    called: ast.expr = node.func
    key: ast.expr | None = None
    if isinstance(called, ast.Subscript) and _tail(called.value) == "__dict__":
        key, called = called.slice, getattr(called.value, "value", called)
    elif isinstance(called, ast.Call) and _tail(called.func) == "getattr" and len(called.args) > 1:
        key, called = called.args[1], called.args[0]
    names = [] if key is None else [_named_constant(key, sources, given)]
    while isinstance(called, ast.Attribute):
        names.append(called.attr)
        called = called.value
    first = script.imported.get(called.id, "") if isinstance(called, ast.Name) else ""
    return ".".join([first, *reversed(names)]) if first and all(names) else ""


def _split(dotted: str) -> tuple[str, str]:
    """Split package.module.NAME; NAME includes a class: transformers, AutoModel.from_config."""
    names = dotted.split(".")
    first = next((k for k, name in enumerate(names) if name[:1].isupper()), len(names) - 1)
    return ".".join(names[:first]), ".".join(names[first:])


def _named_constant(node: ast.expr, sources: "Sources", given: Mapping[str, Any]) -> str:
    found = given.get(_tail(node) or _key(node)) or getattr(sources.constant(node), "value", None)
    return found if isinstance(found, str) else ""


def _given(
    node: ast.expr, names: Sequence[str], sources: "Sources", given: Mapping[str, Any]
) -> tuple[dict[str, Argument], list[str]]:
    """Return a call's known arguments, and the names of the unknown arguments.

    Positional arguments have the parameters `names`.
    """
    known, unknown = {}, []
    if isinstance(node, ast.Call):
        keywords = {k.arg: k.value for k in node.keywords if k.arg is not None}
        for name, expression in (_bound(node, names) | keywords).items():
            if name in _PRETRAINED:
                continue
            value = _stored(given, _tail(expression) or name) or sources.constant(expression)
            if value is None:
                unknown.append(name)
            else:
                known[name] = value
    return known, unknown


def stored_arguments(content: Any) -> dict[str, Any]:
    """Return the arguments of a model that a checkpoint stores with its weights."""
    found: dict[str, Any] = {}
    if isinstance(content, Mapping):
        parsed = [vars(value) for value in content.values() if isinstance(value, Namespace)]
        for value in (*parsed, *(content.get(name) for name in reversed(_ARGUMENTS))):
            if isinstance(value, Mapping):
                found |= {k: v for k, v in value.items() if isinstance(k, str)}
    return found


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
                and _tail(each.func.value) in script.owners
                and each.func.attr not in {"forward", *torch_losses}
            ]
            forward = None if methods else _forward_of(value, script, scripts)
            if forward is not None:  # loss = model(x, y)
                methods = [value]  # type: ignore[list-item]
            torchs = not _LOSSES.keys().isdisjoint(_tail(each.func) for each in called)
            if methods and (not torchs or _is_method(methods[0].func, script, scripts)):
                place = f"{script.file.name}: {name} = {line}"
                given = ["x[None]", "y[None]"][: len(methods[0].args)]
                reduced = None if forward is None else _reduced_by(forward, torch_losses)
                if reduced:
                    both = ", ".join(["inputs", "targets"][: len(given)])
                    whole = f"return model({both}).flatten(1).mean(1)"
                    return [f'model.{reduced}.reduction = "none"', whole], place
                own = "model" if forward is not None else f"model.{_tail(methods[0].func)}"
                own += f"({', '.join(given)})"
                each = ast.unparse(value).replace(ast.unparse(methods[0]), own)
                of = "x, y in zip(inputs, targets)" if "y[None]" in each else "x in inputs"
                return [f"return torch.stack([{each} for {of}])"], place
    return [], ""


def _is_method(node: ast.expr, script: "Script", scripts: Sequence["Script"]) -> bool:
    """Whether an expression is MODEL.METHOD of a local class, as model.encode."""
    sources, owner = Sources(script, scripts), getattr(node, "value", node)
    made = _unmoved(script.values.get(_tail(owner), owner))
    own = ModelClass(sources, _tail(made.func) if isinstance(made, ast.Call) else "")
    return isinstance(node, ast.Attribute) and own.method(node.attr) is not None


def _forward_of(
    node: ast.expr, script: "Script", scripts: Sequence["Script"]
) -> ast.FunctionDef | None:
    """Return the forward of a local model if the expression is a call of this model."""
    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(called, ast.Name) or called.id not in script.owners:
        return None
    sources = Sources(script, scripts)
    made = _unmoved(script.values.get(called.id, called))
    name = _tail(made.func) if isinstance(made, ast.Call) else ""
    known = sources.is_module(name) and not _is_loss(name)
    return ModelClass(sources, name).method("forward") if known else None


def _is_loss(name: str) -> bool:
    return name.lower().endswith(("loss", "criterion"))


def _reduced_by(forward: ast.FunctionDef, torch_losses: Collection[str]) -> str:
    """Return NAME if forward returns self.NAME(...), a loss of torch, else ""."""
    value = getattr(forward.body[-1], "value", None)
    dotted = _dotted(value.func) or "" if isinstance(value, ast.Call) else ""
    owner, _, name = dotted.partition(".")
    return name if owner == "self" and name in torch_losses else ""


def _with_outputs(loss: ast.expr, script: "Script") -> ast.expr:
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
            and _tail(called.value) in script.owners
            and called.attr not in ("forward", "module")
        ):
            made[_tail(node)] = value
    others = [node.id for node in loss.args if isinstance(node, ast.Name) and node.id not in made]
    if made and len(others) == 1:
        made[others[0]] = ast.parse("y[None]", mode="eval").body
    found: ast.expr = _Substituted(made).visit(_copied(loss))
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
                built = made.get(_tail(call.func))  # criterion = FocalLoss(2)
                while isinstance(built, ast.Call) and _tail(built.func) in _MOVED:
                    built = getattr(built.func, "value", None)
                own = _tail(built.func if isinstance(built, ast.Call) else call.func)
                if isinstance(built, ast.Call) and not own:  # losses.__dict__[args.loss]()
                    own = _called_name(built, script, Sources(script, scripts), {}).split(".")[-1]
                place = places.get(own)
                owner = _tail(call.func) in script.owners and not _is_loss(own)
                if place is None or (own in place.classes and owner):
                    continue  # not a script's loss, or a model that returns its loss
                if _returns_torch_loss(place.functions.get(own) or place.classes[own]):
                    continue
                line = f"{script.file.name}: {name} = {ast.unparse(value)}"
                if place.trains or len(call.args) != 2 or call.keywords:  # its import may train
                    names = {_tail(inner) for each in call.args for inner in ast.walk(each)}
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
            if isinstance(call, ast.Call) and _tail(call.func) in script.owners and call.args:
                target = node.targets[0]  # type: ignore[attr-defined]
                first = target.elts[0] if isinstance(target, ast.Tuple) else target
                passed[_tail(first)] = _tail(call.args[0])
        for name, value in script.losses:
            for call in _terms(value):
                ends = [_tail(node) for node in call.args[:2]]
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
    made = {_tail(n.targets[0]): n.value for n in nodes if isinstance(n, ast.Assign)}
    for found in (n.value for n in nodes if isinstance(n, ast.Return)):
        value = found.elts[0] if isinstance(found, ast.Tuple) and found.elts else found
        for _ in range(3):  # loss.mean(), and the variable or attribute loss
            if isinstance(value, ast.Call) and _tail(value.func) in ("mean", "sum"):
                value = getattr(value.func, "value", None)
            if value is not None and (known := made.get(_tail(value))) is not None:
                value = known
            elif isinstance(value, ast.Call) and _tail(value.func) in made:
                value = made[_tail(value.func)]
        if isinstance(value, ast.Call) and _tail(value.func) in _LOSSES:
            return True
    return False


def _training(files: Iterable[Path], model: Path | None) -> tuple[list["Script"], list["Script"]]:
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


def _losses(scripts: Iterable["Script"]) -> Counter[str]:
    return Counter(
        _LOSSES[called] + _options(call)
        for script in scripts
        for called in script.calls.keys() & _LOSSES.keys()
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
                found.setdefault(_tail(node.func), []).append(node)
        return found

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The constants at the top level, and the defaults of options of argparse."""
        found: dict[str, Any] = {}
        top = set(self.tree.body)
        for call in self.calls.get("add_argument", ()):
            found |= _option(call)
        for node in self.nodes:  # for example config.width = 64
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(node, ast.Assign) and (
                node in top
                if isinstance(target, ast.Name)
                else isinstance(target, ast.Attribute) and _tail(target.value) != "self"
            ):
                with suppress(ValueError):
                    found[_tail(node.targets[0])] = ast.literal_eval(node.value)
                    continue
            if isinstance(node, ast.Assign) and _dotted(node.value) is None:
                name = _tail(node.targets[0])  # args.sizes = args.sizes.split(",")
                own = name in map(_tail, ast.walk(node.value))
                if own and isinstance(found.get(name), str):
                    del found[name]
        return found

    @cached_property
    def values(self) -> dict[str, ast.expr]:
        """The last value of each variable and attribute, by its last name.

        model = model.cuda() is not a new value.
        """
        assigned = (node for node in self.nodes if isinstance(node, ast.Assign))
        pairs = ((_tail(node.targets[0]), node.value) for node in assigned)
        return {name: value for name, value in pairs if name not in ("", _tail(_unmoved(value)))}

    @cached_property
    def local(self) -> dict[int, dict[str, ast.expr]]:
        """{id of a call: the variables of the functions around it, if assigned once}."""
        found: dict[int, dict[str, ast.expr]] = {}
        for function in self.nodes:
            if not isinstance(function, ast.FunctionDef):
                continue
            nodes = list(ast.walk(function))
            assigned = (n for n in nodes if isinstance(n, ast.Assign))
            every = [(_tail(t), value) for n in assigned for t, value in _pairs(n.targets, n.value)]
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
            and _tail(node.value.func) in _LOSSES
        }

    @cached_property
    def owners(self) -> set[str]:
        """The variables with a call of `parameters()`."""
        return {
            _tail(call.func.value)
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
            and isinstance(node.value, ast.Call)
            and _tail(node.value.func) not in _MOVED
        ]

    @cached_property
    def trains(self) -> bool:
        """Whether it passes a model's parameters on, calls `backward()` or is Lightning's."""
        return bool(self.trained) or trains(self.tree)

    @cached_property
    def losses(self) -> list[tuple[str, ast.expr]]:
        """The variables with a call of `backward()`, and the values assigned to them."""
        names = {
            _tail(node.func.value)
            for node in self.calls.get("backward", ())
            if isinstance(node.func, ast.Attribute)
        }
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                target = node.targets[0]  # loss, correct = compute(outputs, targets)
                first = target.elts[0] if isinstance(target, ast.Tuple) else target
                if (name := _tail(first)) in names:
                    part = node.value  # loss = raw_loss
                    part = self.values.get(part.id, part) if isinstance(part, ast.Name) else part
                    found.append((name, part))
        return found

    @cached_property
    def sums(self) -> bool:
        """Whether it calls backward() of a variable that is a sum of terms."""
        names = {name for name, _ in self.losses}
        return any(
            isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
            for _, value in self.losses
        ) or any(
            isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Add) and _tail(n.target) in names
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
        bases = [_tail(base) for base in node.bases]
        return any(
            base in ("Module", "LightningModule", "PreTrainedModel", "Sequential")
            or self.is_module(base, depth + 1)
            for base in bases
        )

    def constant(self, node: ast.expr) -> Argument | None:
        """Return the value of an expression: a literal, a constant, or the default of an option."""
        with suppress(ValueError):
            value = ast.literal_eval(node)
            return Argument(value, "the value in the script") if _is_plain(value) else None
        name = _tail(node) or _key(node)  # width, args.width and config["width"]
        value = self.constants.get(name)
        named = name and _is_plain(value)
        return Argument(value, "the script's default; no tensor confirms it") if named else None

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
                        why = f"the default of {name}; no tensor confirms it"
                        best[f.target.id] = Argument(value.value, why)
        return best


def _option(call: ast.Call) -> dict[str, Any]:
    """Return {destination: default} of a call of add_argument."""
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    long = next((t for t in texts if t.startswith("--")), texts[0] if texts else "")
    named = {k.arg: k.value for k in call.keywords}
    name = getattr(named.get("dest"), "value", None) or long.lstrip("-").replace("-", "_")
    action = getattr(named.get("action"), "value", None)
    with suppress(ValueError, KeyError):
        return {name: ast.literal_eval(named["default"])}
    return {name: action == "store_false"} if action in ("store_true", "store_false") else {}


@dataclass(frozen=True)
class Part:
    """A part of a model that an `__init__` makes."""

    kind: str  # a layer of torch; "module", "indexed", "named", "parameter", "plain" or "unknown"
    call: ast.Call | None = None
    parts: Mapping[str, "Part"] = field(default_factory=dict)
    repeated: Sequence["Part"] = ()  # the kinds of entries in a list of variable length
    count: ast.expr | None = None  # the number of entries
    over: ast.comprehension | None = None  # the loop that makes the entries
    name: str = ""  # the class's name


_UNKNOWN = Part("unknown")


@dataclass(frozen=True, eq=False)
class ModelClass:
    """A class of modules with the parts that its `__init__` makes."""

    sources: Sources
    name: str
    depth: int = 0
    given: Mapping[str, ast.expr] = field(default_factory=dict)  # arguments of its `__init__`

    @cached_property
    def _lines(self) -> tuple[list[ast.ClassDef], ast.arguments | None]:
        """The class with its local bases, and the parameters of its `__init__`."""
        line: list[ast.ClassDef] = []
        waiting = [self.name]
        while waiting:
            node = self.sources.classes.get(waiting.pop(0))
            if node is not None and node not in line:
                line.append(node)
                waiting += [_tail(base) for base in node.bases]
        for node in line:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return line, method.args
        return line, None

    @property
    def parameters(self) -> dict[str, ast.expr | None]:
        """The parameters of `__init__` without self, and the keys of **kwargs, with defaults."""
        arguments = self._lines[1]
        if arguments is None:
            return {}
        return _parameters(arguments, skip=1) | dict.fromkeys(self.keywords)

    @cached_property
    def keywords(self) -> list[str]:
        """The keys of the **kwargs of `__init__` that the class reads, as kwargs["width"]."""
        line, arguments = self._lines
        if arguments is None or arguments.kwarg is None:
            return []
        nodes = [n for node in line for n in ast.walk(node) if isinstance(n, ast.Subscript)]
        return [key for n in nodes if _tail(n.value) == arguments.kwarg.arg and (key := _key(n))]

    @cached_property
    def names(self) -> dict[str, ast.expr]:
        """The values assigned in methods to variables and to self.NAME, except parameters.

        A value that is computed from the variable itself is left out: layers = Sequential(*layers).
        The value of a loop's variable is the first entry.
        """
        found: dict[str, ast.expr] = {}
        for target, value in self._assignments():
            key = target.id if isinstance(target, ast.Name) else f"self.{target.attr}"
            own = (n for n in ast.walk(value) if isinstance(n, ast.Name | ast.Attribute))
            if key not in self.parameters and key not in map(_dotted, own):
                found.setdefault(key, value)
        for loop in (inner for line in self._lines[0] for inner in ast.walk(line)):
            if isinstance(loop, ast.For):
                entry = _entries(loop.iter, found)[0]
                targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
                if entry is not None and _tail(targets[-1]):
                    found.setdefault(_tail(targets[-1]), entry)
        return found

    @cached_property
    def parts(self) -> dict[str, list[Part]]:
        """The parts by attribute name; an attribute has several parts if branches differ.

        A name that is made in a loop has "*" for what changes: layer_* is a list of the layers.
        """
        found: dict[str, list[Part]] = {}
        for target, value in self._assignments():
            if isinstance(target, ast.Attribute):
                found.setdefault(target.attr, []).append(self.part(value))
        added: dict[str, list[Part]] = {}  # to the list self.NAME, with any names
        nodes = [inner for line in self._lines[0] for inner in ast.walk(line)]
        loops = {
            id(node): loop for loop in nodes if isinstance(loop, ast.For) for node in ast.walk(loop)
        }
        for node in nodes:
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = _tail(node.func)
            owner = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0]
            if called in _ADD and _dotted(owner) == f"self.{_tail(owner)}":
                added.setdefault(_tail(owner), []).append(self.part(node.args[-1]))
            elif called in _REGISTER and _tail(owner) == "self":
                name = _pattern(node.args[-2] if len(node.args) > 1 else node.args[0])
                made = self.part(node.args[-1])
                if called.startswith("register"):
                    made = Part("parameter")
                if "*" in name:
                    loop = loops.get(id(node))
                    count = _entries(loop.iter, self.names)[1] if loop is not None else None
                    made = Part("indexed", repeated=[made], count=count)
                if name.strip("*"):
                    found.setdefault(name, []).append(made)
        for name, entries in added.items():
            parts = found.get(name, [])
            if any(part.kind == "indexed" and not (part.parts or part.repeated) for part in parts):
                found[name] = [Part("indexed", repeated=entries)]
        return found

    def _assignments(self) -> Iterator[tuple[ast.Name | ast.Attribute, ast.expr]]:
        for node in self._lines[0]:
            for method in node.body:
                if not (isinstance(method, ast.FunctionDef) and method.name != "forward"):
                    continue
                for inner in ast.walk(method):
                    if isinstance(inner, ast.Assign):
                        targets, value = inner.targets, inner.value
                    elif isinstance(inner, ast.AnnAssign) and inner.value is not None:
                        targets, value = [inner.target], inner.value
                    else:
                        continue
                    for target, each in _pairs(targets, value):
                        own = isinstance(target, ast.Attribute) and _tail(target.value) == "self"
                        if isinstance(target, ast.Name) or own:
                            yield target, each  # type: ignore[misc]

    def part(self, node: ast.expr) -> Part:
        """Return the part that an expression makes."""
        node = _unmoved(node)
        if isinstance(node, ast.IfExp):
            return self.part(node.body)
        if (own := _dotted(node)) is not None:
            value = self.given.get(own) or self.names.get(own)
            if value is None or own in self._open:  # a variable may be made from itself
                return _UNKNOWN
            self._open.add(own)
            found = self.part(value)
            self._open.remove(own)
            return found
        if not isinstance(node, ast.Call):
            return Part("plain") if isinstance(node, ast.Constant) else _UNKNOWN
        called = node.func
        if isinstance(called, ast.Name):
            called = self.given.get(called.id, called)
        name = _tail(called)
        local = isinstance(called, ast.Name) and self.sources.is_module(name)
        if not local and (name in _AXES or name in _NESTED):
            return Part(name, node)
        if name == "Parameter":
            return Part("parameter", node)
        if name in _COPIED and node.args:
            return self.part(node.args[0])
        if name in ("Sequential", "ModuleList"):
            return self._list(node)
        if name == "ModuleDict":
            return self._dict(node)
        if self.sources.is_module(name) and self.depth < 8:
            return Part("module", node, name=name)
        method = self.method(name) if _dotted(called) == f"self.{name}" else None
        if method is not None:
            return self._made_by(method, node)
        function = self.sources.functions.get(name) if self.depth < 8 else None
        made = None if function is None else _returned(function)
        if function is not None and made is not None and _tail(made.func) != name:
            passed = _bound(node, list(_parameters(function.args)))
            return self.part(_Substituted(passed).visit(_copied(made)))
        return Part("plain") if _PLAIN.search(name) else _UNKNOWN

    def method(self, name: str) -> ast.FunctionDef | None:
        """Return a method, or None."""
        methods = (
            m for node in self._lines[0] for m in node.body if isinstance(m, ast.FunctionDef)
        )
        return next((method for method in methods if method.name == name), None)

    def inputs(self) -> list[str]:
        """Return the names of the parameters of forward."""
        forward = self.method("forward")
        return [] if forward is None else list(_parameters(forward.args, skip=1))

    @property
    def random(self) -> bool:
        """Whether forward, or a method that it calls, draws random numbers in eval mode too."""
        waiting, seen = ["forward"], {"forward"}
        while waiting:
            method = self.method(waiting.pop())
            nodes = [] if method is None else _in_eval(method)
            called = [node.func for node in nodes if isinstance(node, ast.Call)]
            own = {_tail(name) for name in called if _dotted(name) == f"self.{_tail(name)}"}
            if not _DRAWS.isdisjoint({*map(_tail, called)} - own):
                return True
            waiting += own - seen
            seen |= own
        return False

    def attribute_of(self, argument: str) -> str:
        """Return the attribute of self to which `__init__` assigns an argument."""
        for target, value in self._assignments():
            if isinstance(target, ast.Attribute) and _dotted(_unmoved(value)) == argument:
                return target.attr
        return argument

    def only_calls(self, part: str) -> bool:
        """Whether forward, if there is one, only returns self.PART(...)."""
        forward = self.method("forward")
        last = None if forward is None else forward.body[-1]
        called = last.value if isinstance(last, ast.Return) else None
        return forward is None or (
            len([node for node in forward.body if not isinstance(node, ast.Expr)]) == 1
            and isinstance(called, ast.Call)
            and _dotted(called.func) == f"self.{part}"
        )

    def _made_by(self, method: ast.FunctionDef, call: ast.Call) -> Part:
        """Return the part of a method that appends modules to a list."""
        appended = [
            inner.args[0]
            for inner in ast.walk(method)
            if isinstance(inner, ast.Call) and _tail(inner.func) == "append" and inner.args
        ]
        passed = _bound(call, list(_parameters(method.args, skip=1)))
        passed = {k: self.given.get(_tail(v), v) for k, v in passed.items()}
        entries = [_Substituted(passed).visit(_copied(node)) for node in appended]
        if not entries:
            return _UNKNOWN
        count = next((v for v in passed.values() if isinstance(v, ast.Subscript)), None)
        return Part("indexed", repeated=[self.part(node) for node in entries], count=count)

    def _list(self, node: ast.Call) -> Part:
        entries = list(node.args)
        if len(entries) == 1 and isinstance(entries[0], ast.Starred):
            entries = [entries[0].value]
        if len(entries) == 1 and (own := _dotted(entries[0])) is not None:
            entries = [self.given.get(own) or self.names.get(own, entries[0])]
        if len(entries) == 1 and isinstance(entries[0], ast.ListComp | ast.GeneratorExp):
            count, over = _entries(entries[0], self.names)[1], entries[0].generators[0]
            made = [self.part(entries[0].elt)]
            return Part("indexed", repeated=made, count=count, over=over)
        if len(entries) == 1 and isinstance(entries[0], ast.List | ast.Tuple):
            entries = list(entries[0].elts)
        first = entries[0] if len(entries) == 1 else None
        if isinstance(first, ast.Call) and _tail(first.func) == "OrderedDict":
            return self._dict(first)
        if any(isinstance(e, ast.Starred | ast.Name | ast.BinOp) for e in entries):
            return Part("indexed", repeated=[_UNKNOWN])
        return Part("indexed", parts={str(k): self.part(e) for k, e in enumerate(entries)})

    def _dict(self, node: ast.Call) -> Part:
        found: dict[str, Part] = {k.arg: self.part(k.value) for k in node.keywords if k.arg}
        for entry in node.args:
            if isinstance(entry, ast.Call) and _tail(entry.func) in ("dict", "OrderedDict"):
                return self._dict(entry)
            pairs: list[tuple[ast.expr | None, ast.expr]] = []
            if isinstance(entry, ast.Dict):
                pairs = list(zip(entry.keys, entry.values, strict=True))
            elif isinstance(entry, ast.List | ast.Tuple):
                pairs = [
                    (e.elts[0], e.elts[1])
                    for e in entry.elts
                    if isinstance(e, ast.Tuple) and len(e.elts) == 2
                ]
            for key, value in pairs:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    found[key.value] = self.part(value)
        return Part("named", parts=found) if found else _UNKNOWN

    def below(self, part: Part) -> "ModelClass":
        """Return the class of a part that is a module of a local class."""
        if id(part) not in self._below:
            found = ModelClass(self.sources, part.name, self.depth + 1)
            if part.call is not None:
                passed = _bound(part.call, list(found.parameters))
                outer = {k: _Outer().visit(self.resolved(v)) for k, v in passed.items()}
                found = ModelClass(self.sources, part.name, self.depth + 1, outer)
            self._below[id(part)] = found, part
        return self._below[id(part)][0]

    @cached_property
    def _open(self) -> set[str]:
        return set()  # the variables whose parts are being made

    @cached_property
    def _below(self) -> dict[int, tuple["ModelClass", Part]]:
        return {}  # {id: the class of a part, and the part}

    def alternatives(self, name: str) -> Sequence[Part]:
        """Return the parts that an attribute may have."""
        patterns = (v for k, v in self.parts.items() if "*" in k and fnmatchcase(name, k))
        return self.parts.get(name) or next(patterns, ())

    def explained(self, key: Sequence[str], shape: Shape, part: Part | None = None) -> float:
        """Return how well the parts explain a key: 1, 0.5 (with an unknown part), or 0."""
        if part is None:
            exact = key[0] in self.parts  # a pattern is a list with the whole names as indices
            below = key[1:] if exact else key
            found = self.alternatives(key[0])
            return max((self.explained(below, shape, a) for a in found), default=0.0)
        if part.kind == "unknown":
            return 0.5
        if part.kind == "module":
            return self.below(part).explained(key, shape) if key else 0.0
        if part.kind in ("indexed", "named"):
            if not key:
                return 0.0
            inner = part.repeated or [part.parts[name] for name in key[:1] if name in part.parts]
            return max((self.explained(key[1:], shape, one) for one in inner), default=0.0)
        if part.kind == "parameter":
            return float(not key)
        if part.kind in _NESTED:
            return 1.0 if key else 0.0
        if part.kind not in _AXES or len(key) != 1:
            return 0.0
        return float(all(_agrees(node, size) for node, size in sizes(part, {key[0]: shape})))

    def equations(self, shapes: Shapes, depth: int = 0) -> Iterator[Equation]:
        """Yield (expression of the parameters of `__init__`, its value, the source's name)."""
        for name, alternatives in self.parts.items():
            own = _below(shapes, name)
            if "*" in name:
                own = {k: v for k, v in shapes.items() if fnmatchcase(k.partition(".")[0], name)}

            def fit(part: Part, own: Shapes = own) -> float:
                return sum(self.explained(k.split("."), v, part) for k, v in own.items() if k)

            part = max(alternatives, key=fit)
            yield from (
                (self.resolved(e), v, w) for e, v, w in self._of_part(part, own, name, depth)
            )

    def _of_part(self, part: Part, shapes: Shapes, where: str, depth: int) -> Iterator[Equation]:
        if part.kind == "module" and depth < 6 and part.call is not None:
            other = self.below(part)
            none = ast.Constant(None)  # an argument without a value has no known size
            given = {k: default or none for k, default in other.parameters.items()}
            given |= _bound(part.call, list(given))
            for expression, value, place in other.equations(shapes, depth + 1):
                found = _Substituted(given).visit(_copied(expression))
                yield _Outer(leave=True).visit(found), value, f"{where}.{place}"
        elif part.kind in ("indexed", "named"):
            indices = {key.partition(".")[0] for key in shapes}
            if part.count is not None and indices:
                numbers = all(k.isdigit() for k in indices)  # entries without tensors count too
                count = max(map(int, indices)) + 1 if numbers else len(indices)
                yield part.count, count, f"{where} (its length)"
            if part.over is not None and isinstance(part.over.target, ast.Name):
                values: list[int] = []  # of NAME in [Layer(k) for k in NAME]
                for index in sorted(indices, key=lambda k: k.zfill(9)):
                    own = self._of_part(part.repeated[0], _below(shapes, index), where, depth)
                    known = [v for e, v, _ in own if _dotted(e) == part.over.target.id]
                    values += [v for v in known[:1] if isinstance(v, int)]
                if len(values) == len(indices) > 0:
                    yield part.over.iter, values, where
            first = min(indices, default="0")
            parts = part.parts or ({first: part.repeated[0]} if part.repeated else {})
            for name, inner in parts.items():
                yield from self._of_part(inner, _below(shapes, name), f"{where}.{name}", depth)
        else:
            yield from ((node, size, where) for node, size in sizes(part, shapes))

    def share_of_counts(self, shapes: Shapes) -> float:
        """Return the share of lists with the same number of entries in class and checkpoint."""
        found = [1.0]
        for name, alternatives in self.parts.items():
            indices = {key.partition(".")[0] for key in _below(shapes, name)}
            for part in alternatives:
                count = None if part.count is None else _entry(part.count, self.given)
                if count is not None and indices:
                    found.append(float(count == len(indices)))
        return sum(found) / len(found)

    def resolved(self, expression: ast.expr) -> ast.expr:
        """Replace variables of `__init__` by their assigned values."""
        found = expression
        for _ in range(4):
            found = _Substituted(self.names).visit(_copied(found))
        return found

    def configs(self) -> dict[str, set[str]]:
        """Return {parameter: the names of its attributes that the class or its parts read}."""
        return self._configs(frozenset())

    def _configs(self, seen: frozenset[str]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        parameters = set(self.parameters)
        nodes = [inner for line in self._lines[0] for inner in ast.walk(line)]
        methods = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            key = _key(node)
            read = _tail(node.value) if isinstance(node, ast.Attribute | ast.Subscript) else ""
            if key and read in parameters and id(node) not in methods:
                found.setdefault(read, set()).add(key)
            name = _tail(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name not in {*seen, self.name}:
                if not self.sources.is_module(name):
                    continue
                other = ModelClass(self.sources, name, self.depth + 1)
                given = _bound(node, list(other.parameters))
                for inner, attributes in other._configs(seen | {self.name}).items():
                    passed = _tail(given[inner]) if inner in given else ""
                    if passed in parameters:
                        found.setdefault(passed, set()).update(attributes)
        return found


def _pairs(targets: Sequence[ast.expr], value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return an assignment's (target, value) pairs, also of a, b = 1, 2."""
    pairs = [(target, value) for target in targets]
    for target, each in pairs:
        if isinstance(target, ast.Tuple) and isinstance(each, ast.Tuple):
            pairs += zip(target.elts, each.elts, strict=False)
    return pairs


def _in_eval(node: ast.AST) -> list[ast.AST]:
    """Return the nodes of a method without the branches `if self.training`."""
    found: list[ast.AST] = []
    waiting = [node]
    while waiting:
        each = waiting.pop()
        found.append(each)
        if isinstance(each, ast.If | ast.IfExp) and _tail(each.test) == "training":
            waiting += each.orelse if isinstance(each.orelse, list) else [each.orelse]
        else:
            waiting += ast.iter_child_nodes(each)
    return found


def _entries(
    node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0
) -> tuple[ast.expr | None, ast.expr | None]:
    """Return the first entry of a list expression and its number of entries, as far as known."""
    node = names.get(_dotted(node) or "", node)
    if isinstance(node, ast.List | ast.Tuple):
        return next(iter(node.elts), None), ast.Constant(len(node.elts))
    if depth < 4 and isinstance(node, ast.ListComp | ast.GeneratorExp):
        return node.elt, _entries(node.generators[0].iter, names, depth + 1)[1]
    if depth < 4 and isinstance(node, ast.Call) and node.args:
        if _tail(node.func) == "range":
            return None, node.args[min(len(node.args) - 1, 1)]
        if _tail(node.func) in ("enumerate", "reversed", "list", "ModuleList"):
            return _entries(node.args[0], names, depth + 1)
    return None, None


def _pattern(node: ast.expr) -> str:
    """Return a text with "*" for what a format, an f-string, % or + puts into it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_pattern, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _pattern(node.left) + _pattern(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return re.sub(r"%[-+ #0-9.]*[a-z]", "*", _pattern(node.left))
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and called.attr == "format":
        return re.sub(r"\{[^}]*\}", "*", _pattern(called.value))
    return "*"


def sizes(part: Part, shapes: Shapes) -> Iterator[tuple[ast.expr, int]]:
    """Yield (argument of a layer, its size), derived from the layer's tensors {name: shape}."""
    if part.call is None:
        return
    if part.kind == "parameter" and () not in shapes.values() and "" in shapes:
        made = next(iter(part.call.args), None)
        if isinstance(made, ast.Call):
            arguments = list(made.args) or [k.value for k in made.keywords if k.arg == "size"]
            if len(arguments) == 1 and isinstance(arguments[0], ast.Tuple | ast.List):
                arguments = list(arguments[0].elts)
            if len(arguments) == len(shapes[""]):
                yield from zip(arguments, shapes[""], strict=True)
        return
    axes = _AXES.get(part.kind, {})
    given = _bound(part.call, list(axes) or _TRANSFORMERS.get(part.kind, ()))
    for name, node in given.items():
        size = _size(part.kind, axes.get(name, -1), name, shapes)
        if size is not None and isinstance(node, ast.Tuple):  # the sides of a kernel
            yield from zip(node.elts, shapes.get("weight", ())[2:], strict=False)
        elif size is not None:
            yield node, size


def _size(kind: str, axis: int, name: str, shapes: Shapes) -> int | None:
    """Return the size of a layer's argument, derived from the layer's tensors, or None."""
    if kind in _TRANSFORMERS:
        return _size_of_transformer(name, shapes)
    if kind in _RECURRENT:
        hidden = next((s for k, s in shapes.items() if k.startswith("weight_hh")), None)
        first = next((s for k, s in shapes.items() if k in ("weight_ih_l0", "weight_ih")), None)
        layers = {k for k in shapes if re.fullmatch(r"weight_ih_l\d+", k)}
        if name == "num_layers":
            return len(layers) or None
        if name == "hidden_size":
            return None if hidden is None else hidden[1]
        return None if first is None else first[1]
    weight = shapes.get("in_proj_weight" if kind == "MultiheadAttention" else "weight")
    if weight is None:
        bias = shapes.get("bias")  # the bias has the size of the outputs
        return bias[0] if bias and axis == 0 and not kind.startswith("ConvT") else None
    return weight[axis] if 0 <= axis < len(weight) else None


def _size_of_transformer(name: str, shapes: Shapes) -> int | None:
    """Return the size of an argument of torch's transformers, derived from tensors, or None."""
    if name in ("d_model", "dim_feedforward"):
        first = next((s for k, s in shapes.items() if k.endswith("linear1.weight")), None)
        return None if first is None else first[name == "d_model"]
    side = re.fullmatch(r"num_(?:(encoder|decoder)_)?layers", name)
    if side is None:
        return None
    start = f"{side[1]}.layers." if side[1] else "layers."
    return len({key[len(start) :].partition(".")[0] for key in shapes if key.startswith(start)})


def _agrees(node: ast.expr, size: int) -> bool:
    """Whether an argument can have this size: a literal must have the same value."""
    with suppress(ValueError):
        value = ast.literal_eval(node)
        return not isinstance(value, int) or value == size
    return True


def _examined(
    sources: Sources, script: Script, name: str, shapes: Shapes, given: Mapping[str, Any]
) -> FoundModel | None:
    """Return the class or function as a possible model, or None if it cannot build the model."""
    function = script.functions.get(name)
    node = _returned(function) if function is not None else None
    of_class = name if function is None else ("" if node is None else _tail(node.func))
    if not sources.is_module(of_class):
        return None
    model = _with_modules(sources, of_class)
    if node is not None:
        model = ModelClass(sources, of_class, given=_bound(node, list(model.parameters)))
    keys = {key: tuple(key.split(".")) for key in shapes}
    explained = [model.explained(parts, shapes[key]) for key, parts in keys.items()]
    first = {parts[0] for parts in keys.values()}
    expected = [
        name
        for name, alternatives in model.parts.items()
        if not any(part.kind in ("plain", "unknown") for part in alternatives)
    ]
    if not explained or not any(explained):
        return None
    met = sum(any(fnmatchcase(f, k) for f in first) for k in expected) / max(len(expected), 1)
    met = met if expected else 0.5
    fit = sum(explained) / len(explained) * (1 + met) / 2 * model.share_of_counts(shapes)
    whole = sum(value > 0 for value in explained)
    why = f"its parts explain {whole} of {len(explained)} tensors of the checkpoint"
    if function is not None:
        arguments, unknown = _of_function(sources, function, given)
    else:
        arguments, unknown = _arguments(sources, model, shapes, given)
    found = FoundModel(script.file, name, function is None, fit, why, arguments, unknown)
    return replace(found, inputs=model.inputs(), random=model.random)


def _entry(node: ast.expr, given: Mapping[str, ast.expr]) -> int | None:
    """Return the integer NAME, or NAME[K] for a list of integers NAME in `given`, or None."""
    with suppress(ValueError, TypeError, IndexError, KeyError):
        if isinstance(node, ast.Subscript):
            found = ast.literal_eval(given[_tail(node.value)])[ast.literal_eval(node.slice)]
        else:
            found = ast.literal_eval(given[_tail(node)])
        return found if isinstance(found, int) else None
    return None


def _returned(function: ast.FunctionDef) -> ast.Call | None:
    """Return the call whose result a function returns, or None if there is no such call."""
    made: dict[str, ast.Call] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    made.setdefault(target.id, node.value)
    for node in ast.walk(function):
        if isinstance(node, ast.Return):
            value = node.value
            if isinstance(value, ast.Name):
                value = made.get(value.id)
            while isinstance(value, ast.Call) and _tail(value.func) in _MOVED:
                value = value.func.value if isinstance(value.func, ast.Attribute) else None
                value = made.get(value.id) if isinstance(value, ast.Name) else value
            if isinstance(value, ast.Call):
                return value
    return None


def _of_function(
    sources: Sources, function: ast.FunctionDef, given: Mapping[str, Any]
) -> tuple[dict[str, Argument], list[str]]:
    """Return a function's known arguments, and the names of unknown arguments without default."""
    found, unknown = {}, []
    for name, default in _parameters(function.args).items():
        if name in given and _is_plain(given[name]):
            found[name] = Argument(given[name], "stored in the checkpoint")
        elif default is None:
            unknown.append(name)
    return found, unknown


def _arguments(
    sources: Sources, model: ModelClass, shapes: Shapes, given: Mapping[str, Any]
) -> tuple[dict[str, Argument], list[str]]:
    """Return the known arguments of a class, and the names of the arguments to fill in."""
    solved = _solved(model.equations(shapes))
    configs = model.configs()
    called = _called(sources, model, given)
    found: dict[str, Argument] = {}
    unknown: list[str] = []
    for name, default in model.parameters.items():
        if name in model.given:
            own, missing = _nested(sources, name, model, shapes, given)
            found |= own
            unknown += missing
            continue
        if configs.get(name) and default is None and name not in solved:
            own, missing = _config(sources, name, configs[name], solved, given)
            found |= {f"{name}.{key}": value for key, value in own.items()}
            unknown += [f"{name}.{key}" for key in missing]
            continue
        value = _stored(given, name) or solved.get(name) or called.get(name)
        if name == "device" and (value is not None or default is None):
            value = Argument("cpu", "the default device of a run")
        if value is None and name in model.keywords:
            value = sources.constant(ast.Name(name))
        if value is not None:
            found[name] = value
        elif default is None:
            unknown.append(name)
    return found, unknown


def _config(
    sources: Sources,
    name: str,
    attributes: set[str],
    solved: Mapping[str, Argument],
    given: Mapping[str, Any],
) -> tuple[dict[str, Argument], list[str]]:
    """Return the known entries of a config, and the names of entries that are read but unknown."""
    defaults = sources.fields(attributes)
    found: dict[str, Argument] = {}
    for key in sorted(attributes | defaults.keys()):
        value = _stored(given, key) or solved.get(f"{name}.{key}") or defaults.get(key)
        if value is None:
            value = sources.constant(ast.Name(key))
        if value is not None:
            found[key] = value
    return found, sorted(attributes - found.keys())


def _stored(given: Mapping[str, Any], name: str) -> Argument | None:
    if name in given and _is_plain(given[name]):
        return Argument(given[name], "stored in the checkpoint")
    return None


def _is_plain(value: Any) -> bool:
    """Whether a value can be written in a run file."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)


def _called(sources: Sources, model: ModelClass, given: Mapping[str, Any]) -> dict[str, Argument]:
    """Return the arguments that a call of a model's class gives as constants or stored values.

    `given` are the stored arguments: Net(width=args.wide) has the stored value of "wide".
    """
    best: dict[str, Argument] = {}
    for call in sources.calls(model.name):
        local, known = sources.local(call), {}
        for name, node in _bound(call, list(model.parameters)).items():
            value = _stored(given, _key(node) or _tail(node))
            value = value or sources.constant(local.get(_tail(node), node))
            if value is not None:
                known[name] = value
        best = max(best, known, key=len)
    return best


def _with_modules(sources: Sources, name: str) -> ModelClass:
    """Return a class with the modules that a script passes to it as arguments."""
    plain = ModelClass(sources, name)
    found: dict[str, ast.expr] = {}
    for call in sources.calls(name):
        local = sources.local(call)
        for argument, node in _bound(call, list(plain.parameters)).items():
            made = _unmoved(local.get(_tail(node)) or sources.values.get(_tail(node), node))
            if isinstance(made, ast.Call) and sources.is_module(_tail(made.func)):
                found.setdefault(argument, made)
    return ModelClass(sources, name, given=found)


def _nested(
    sources: Sources, name: str, model: ModelClass, shapes: Shapes, given: Mapping[str, Any]
) -> tuple[dict[str, Argument], list[str]]:
    """Return the factory and the known arguments of an argument that is a module, and the rest.

    Both have the argument's name before them: NAME.factory.
    """
    own = _with_modules(sources, _tail(model.given[name].func))  # type: ignore[attr-defined]
    known, unknown = _arguments(sources, own, _below(shapes, model.attribute_of(name)), given)
    factory = Argument(f"{sources.file(own.name)}:{own.name}", f"the script passes {own.name}(...)")
    found = {f"{name}.{key}": value for key, value in {"factory": factory, **known}.items()}
    return found, [f"{name}.{key}" for key in unknown]


def _unmoved(node: ast.expr) -> ast.expr:
    """Return MODEL of MODEL.to(device) and MODEL.cuda()."""
    while (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _MOVED
    ):
        node = node.func.value
    return node


def _solved(equations: Iterable[Equation]) -> dict[str, Argument]:
    """Solve expressions for their only unknown name, NAME or NAME.ATTRIBUTE."""
    found: dict[str, Argument] = {}
    left = list(equations)
    for _ in range(3):  # a solution may make another expression solvable
        for expression, value, where in left:
            solution = _unknown_in(expression, value, found)
            if solution is not None:
                name, size = solution
                found.setdefault(name, Argument(size, f"the size of {where}"))
    return found


def _unknown_in(
    node: ast.expr, value: int | list[int], known: Mapping[str, Argument]
) -> tuple[str, int | list[int]] | None:
    """Return the only unknown name of an expression and its value, or None if not solvable."""
    name = _dotted(node)
    if name is not None:
        return name, value
    if not isinstance(node, ast.BinOp) or isinstance(value, list):
        return None
    left, right = node.left, node.right
    factor = _value(right, known)
    if factor is None and isinstance(node.op, ast.Mult | ast.Add):
        left, right, factor = right, left, _value(left, known)
    if factor is None or factor < 1:
        return None
    if isinstance(node.op, ast.Mult) and value % factor == 0:
        return _unknown_in(left, value // factor, known)
    if isinstance(node.op, ast.FloorDiv):
        return _unknown_in(left, value * factor, known)
    if isinstance(node.op, ast.Pow) and round(value ** (1 / factor)) ** factor == value:
        return _unknown_in(left, round(value ** (1 / factor)), known)
    if isinstance(node.op, ast.Add) and value > factor:
        return _unknown_in(left, value - factor, known)
    return None


def _value(node: ast.expr, known: Mapping[str, Argument]) -> int | None:
    """Return the value of an integer or of a known name, or None."""
    name = _dotted(node) or ""
    found = known[name].value if name in known else getattr(node, "value", None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _parameters(arguments: ast.arguments, skip: int = 0) -> dict[str, ast.expr | None]:
    """Return {parameter: default} without *args and **kwargs."""
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    defaults: list[ast.expr | None] = [None] * (len(names) - len(arguments.defaults))
    found = dict(zip(names, [*defaults, *arguments.defaults], strict=True))
    found = dict(list(found.items())[skip:])
    return found | {
        a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }


def _bound(call: ast.Call, names: Sequence[str]) -> dict[str, ast.expr]:
    """Return {parameter: expression} for the parameters `names` of a call."""
    if any(isinstance(a, ast.Starred) for a in call.args):
        return {}
    found = dict(zip(names, call.args, strict=False))
    return found | {k.arg: k.value for k in call.keywords if k.arg in names and k.arg is not None}


def _below(shapes: Shapes, name: str) -> dict[str, Shape]:
    """Return the shapes of the keys below a name; the tensor with exactly this name has key ""."""
    start = f"{name}."
    found = {key[len(start) :]: shape for key, shape in shapes.items() if key.startswith(start)}
    return found | ({"": shapes[name]} if name in shapes else {})


def _tail(node: ast.AST) -> str:
    """Return the last part of a dotted name, or "" for a different expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _dotted(node: ast.expr) -> str | None:
    """Return NAME, or NAME.KEY for NAME.KEY and NAME["KEY"], or None for a different expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{key}" if (key := _key(node)) else None
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return None


def _key(node: ast.AST) -> str:
    """Return KEY of NAME.KEY and NAME["KEY"], or "" for a different expression."""
    if isinstance(node, ast.Subscript):
        value = getattr(node.slice, "value", None)
        return value if isinstance(value, str) else ""
    return node.attr if isinstance(node, ast.Attribute) else ""


def _copied(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


class _Outer(ast.NodeTransformer):
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


class _Substituted(ast.NodeTransformer):
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
