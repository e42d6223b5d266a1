"""Finds the model of a checkpoint in the syntax trees of training scripts. No script is run.

A model class names its parts in its `__init__`. The checkpoint's keys begin with these names, so
the class whose parts explain most keys is the model of the checkpoint. The sizes of its tensors
give the values of many arguments of the class.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gradscope.sources.scripts.parts import ModelClass, shapes_below
from gradscope.sources.scripts.stored import StoredArguments
from gradscope.sources.scripts.syntax import (
    Argument,
    Equation,
    Script,
    Shapes,
    Size,
    Sources,
    bound_arguments,
    called_name,
    dotted_name,
    is_plain,
    key_of,
    last_name,
    parameters_of,
    returned_call,
    unmoved,
)
from gradscope.sources.variables import MAIN, Variables

_PREFIX = re.compile(r"(?:module\.|_orig_mod\.)+")  # DataParallel and torch.compile add these
_PRETRAINED = {"pretrained", "weights"}  # the checkpoint replaces these weights
_CLASSES = {"num_classes", "num_labels", "n_classes", "classes"}
_NESTED = 5  # the most levels of modules that are arguments
_LOADING = {"pin_memory", "num_workers", "workers", "verbose", "download"}  # change no number
_BATCH = {"batch_size", "batchsize", "bsz", "n_batch", "batch_sz"}
ONE_SAMPLE = "the model is called with one sample at a time"
_LOADER = ".from_pretrained"
_WRAPPER = 0.5  # the largest fit of a class whose only part may be the model


_IDLE = re.compile(r"drop|seed|init|eps|momentum|device|name|verbose|norm_first", re.I)


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
    random: bool = False  # whether its forward draws random numbers in eval mode too

    @property
    def reference(self) -> str:
        """FILE.py:NAME, or package.module:NAME."""
        return f"{self.package or self.file}:{self.name}"


def defaults_left(found: FoundModel, files: Iterable[Path]) -> dict[str, Any]:
    """Return the numbers and texts that are defaults of a class, unless calls use the defaults.

    The training may have set them, as in `classes[args.model](heads=args.heads)`. No tensor has
    their size.
    """
    script = Script.read(found.file)
    node = None if script is None else script.classes.get(found.name)
    methods = [] if node is None else [n for n in node.body if isinstance(n, ast.FunctionDef)]
    made = next((method for method in methods if method.name == "__init__"), None)
    if made is None:
        return {}
    own = parameters_of(made.args, skip=1)
    scripts = [other for each in files if (other := Script.read(each)) is not None]
    calls = [call for each in scripts for call in each.calls.get(found.name, ())]
    plain = [call for call in calls if not _is_open(call)]
    given = {name for call in plain for name in bound_arguments(call, list(own))}
    known = {name.partition(".")[0] for name in (*found.arguments, *found.unknown)}
    return {
        name: node.value
        for name, node in own.items()
        if isinstance(node, ast.Constant)
        and type(node.value) in (int, str)
        and name not in known
        and (name in given or not plain)
        and not _IDLE.search(name)
    }


def _is_open(call: ast.Call) -> bool:
    """Whether a call has arguments that are not in the script: f(*args), f(**options)."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    )


def is_random(file: Path, name: str, files: Iterable[Path]) -> bool:
    """Whether the class of a variable FILE.py:NAME draws random numbers in forward."""
    script = Script.read(file)
    value = None if script is None else script.values.get(name.rpartition(".")[2])
    made = unmoved(value) if value is not None else None
    if script is None or not isinstance(made, ast.Call):
        return False
    others = [found for each in files if (found := Script.read(each)) is not None]
    sources, own = Sources(script, [script, *others]), last_name(made.func)
    return sources.is_module(own) and _with_modules(sources, own).random


def find_models(
    files: Iterable[Path], shapes: Shapes, given: Mapping[str, Any] | None = None
) -> list[FoundModel]:
    """Return the classes and functions that may build the model of a checkpoint, best first.

    Args:
        files: Python files. They are parsed, not run.
        shapes: The shape of each tensor of the checkpoint, by its key.
        given: The arguments that are stored with the checkpoint.
    """
    scripts = [script for file in files if (script := Script.read(file)) is not None]
    stored = given or {}
    known = {_PREFIX.sub("", key): shape for key, shape in shapes.items()}

    def fitting(shapes: Shapes) -> list[FoundModel]:
        return [
            model
            for script, sources in ((script, Sources(script, scripts)) for script in scripts)
            for name in (*script.classes, *script.functions)
            if (model := _examined(sources, script, name, shapes, stored)) is not None
        ]

    found = fitting(known)
    name, *others = {key.partition(".")[0] for key in known} or {""}
    if not others and not any(model.fit > _WRAPPER for model in found):
        wrappers = [
            ModelClass(Sources(each, scripts), own) for each in scripts for own in each.classes
        ]
        if all(model.only_calls(name) for model in wrappers if name in model.parts):
            found += fitting(shapes_below(known, name))

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


def find_trained(
    files: Iterable[Path], given: Mapping[str, Any] | None = None, shapes: Shapes | None = None
) -> list[FoundModel]:
    """Return the models whose parameters scripts pass to an optimizer.

    A model is a variable at the top level of its script, an object of a class in the files, or the
    result of a package's function.

    Args:
        files: Python files. They are parsed, not run.
        given: The arguments that are stored with the checkpoint.
        shapes: The shape of each tensor of the checkpoint, by its key.
    """
    scripts = [script for file in files if (script := Script.read(file)) is not None]
    local = {part for script in scripts for part in (script.file.stem, script.file.parent.name)}
    given = given or {}
    found = []
    for script in scripts:
        for name, made in [*script.trained, *_wrapped(script, scripts)]:
            why = f"{script.file.name} makes an optimizer for it"
            if (name, made) not in script.trained:
                why = f"{script.file.name} passes it to a module of Lightning"
            if made in script.tree.body:
                found.append(FoundModel(script.file, name, False, 1.0, why, {}, []))
                continue
            sources, value = Sources(script, scripts), unmoved(made.value)
            own = last_name(getattr(value, "func", value))
            dotted = called_name(value, script, sources, given)
            package, last = _split(dotted)
            if sources.is_module(own):
                model = _with_modules(sources, own)
                known, unknown = _given(value, list(model.parameters), sources, given)
                for name in model.given.keys() & {*unknown}:
                    inner, missing = _nested(sources, name, model, {}, given)
                    unknown = [*(each for each in unknown if each != name), *missing]
                    known |= inner
                made_by = FoundModel(sources.file(own), own, True, 1.0, why, known, unknown)
                found.append(replace(made_by, inputs=model.inputs(), random=model.random))
            elif package and package.partition(".")[0] not in {*local, "self", "torch"}:
                names = ["pretrained_model_name_or_path"] if last.endswith(_LOADER) else []
                known, unknown = _given(value, names, sources, given)
                classes = _outputs(shapes or {})
                for name in _CLASSES & {*unknown} if classes else ():
                    known[name] = Argument(classes, "the size of the last layer")
                    unknown.remove(name)
                found.append(
                    FoundModel(script.file, last, False, 1.0, why, known, unknown, package=package)
                )
            else:
                places = Variables(script.tree, script.file).places(name)
                found += [
                    FoundModel(script.file, f"{place}.{name}", False, 1.0, why, {}, [])
                    for place in places
                ]
    return list({model.reference: model for model in reversed(found)}.values())[::-1]


def _wrapped(script: Script, scripts: Sequence[Script]) -> list[tuple[str, ast.Assign]]:
    """Return the variables that a script passes to a class with `training_step`."""
    wrappers = {
        name
        for each in scripts
        for name, node in each.classes.items()
        if "training_step" in {getattr(method, "name", "") for method in node.body}
    }
    calls = (call for name in wrappers for call in script.calls.get(name, ()))
    passed = {last_name(node) for call in calls for node in call.args}
    return [
        (target.id, node)
        for node in script.nodes
        if isinstance(node, ast.Assign) and isinstance(unmoved(node.value), ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in passed
    ]


def find_built(
    files: Iterable[Path], model: FoundModel, data: Path | None = None
) -> FoundModel | None:
    """Return the variable of a script's function that has a model of the class `model`, or None.

    The script of the data is preferred, then scripts that train. If several scripts have a class
    with this name, only scripts that import the file of the model count.

    Args:
        files: Python files. They are parsed, not run.
        model: A class with arguments that are not known.
        data: The script of the data.
    """
    scripts = [script for file in files if (script := Script.read(file)) is not None]
    of_data = None if data is None else data.resolve()
    defined = next((each for each in scripts if each.file == model.file), None)
    if defined is not None and sum(model.name in each.classes for each in scripts) > 1:
        scripts = [each for each in scripts if each is defined or each.imports(defined)]

    def rank(script: Script) -> tuple[bool, bool]:
        return (script.file.resolve() != of_data, not script.losses)

    for script in sorted(scripts, key=rank):
        variables = Variables(script.tree, script.file)
        for name in variables.made_by({model.name}):
            place, _, own = name.partition(".")
            of = "the block of __main__" if place == MAIN else f"{place}()"
            why = f"{of} builds it; only the lines for {own} are run"
            return replace(
                model,
                file=script.file,
                name=name,
                is_class=False,
                why=why,
                arguments={},
                unknown=[],
            )
    return None


def _outputs(shapes: Shapes) -> int:
    """Return the number of outputs of the last linear layer, or 0 without one."""
    of = [shape for key, shape in shapes.items() if key.endswith("weight") and len(shape) == 2]
    return of[-1][0] if of else 0


def _split(dotted: str) -> tuple[str, str]:
    """Split package.module.NAME; NAME includes a class: transformers, AutoModel.from_config."""
    names = dotted.split(".")
    first = next((k for k, name in enumerate(names) if name[:1].isupper()), len(names) - 1)
    return ".".join(names[:first]), ".".join(names[first:])


def _given(
    node: ast.expr, names: Sequence[str], sources: Sources, given: Mapping[str, Any]
) -> tuple[dict[str, Argument], list[str]]:
    """Return a call's known arguments, and the names of the unknown arguments.

    Positional arguments have the parameters `names`.
    """
    known, unknown = {}, []
    if isinstance(node, ast.Call):
        keywords = {k.arg: k.value for k in node.keywords if k.arg is not None}
        for name, expression in (bound_arguments(node, names) | keywords).items():
            if name in _PRETRAINED:
                continue
            value = _stored(given, last_name(expression) or name) or sources.constant(expression)
            if value is None:
                unknown.append(name)
            else:
                known[name] = value
    return known, unknown


def _examined(
    sources: Sources, script: Script, name: str, shapes: Shapes, given: Mapping[str, Any]
) -> FoundModel | None:
    """Return the class or function as a possible model, or None if it cannot build the model."""
    function = script.functions.get(name)
    node = returned_call(function) if function is not None else None
    of_class = name if function is None else ("" if node is None else last_name(node.func))
    if not sources.is_module(of_class):
        return None
    model = _with_modules(sources, of_class)
    if node is not None:
        model = ModelClass(sources, of_class, given=bound_arguments(node, list(model.parameters)))
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


def _of_function(
    sources: Sources, function: ast.FunctionDef, given: Mapping[str, Any]
) -> tuple[dict[str, Argument], list[str]]:
    """Return a function's known arguments, and the names of unknown arguments without default."""
    found, unknown = {}, []
    for name, default in parameters_of(function.args).items():
        value = _stored(given, name, default)
        if value is not None:
            found[name] = value
        elif default is None:
            unknown.append(name)
    return found, unknown


def _arguments(
    sources: Sources, model: ModelClass, shapes: Shapes, given: Mapping[str, Any]
) -> tuple[dict[str, Argument], list[str]]:
    """Return the known arguments of a class, and the names of the arguments to fill in."""
    called = _called(sources, model, given)
    passed = _passed(sources, model) - called.keys()
    equations = list(model.equations(shapes))
    solved = _solved(equations)
    contradicted = _contradicted(equations, solved, model.parameters)
    tensors = model.tensors(shapes)
    configs = model.configs()
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
        of_shapes = solved.get(name)
        if of_shapes is not None and not _is_like(of_shapes.value, default):
            of_shapes = None
        kept = _stored(given, name, default)
        certain = not isinstance(given, StoredArguments) or name in given.of_training
        if kept is not None and of_shapes is not None and not certain:
            kept = None  # the sizes of tensors say more than a file
        value = kept or of_shapes or called.get(name)
        if name == "device" and (value is not None or default is None or name in passed):
            value = Argument("cpu", "the default device of a run")
        if value is None and name in model.keywords:
            value = sources.constant(ast.Name(name))
        if name.lower() in _BATCH and (value is not None or default is None):
            value = Argument(1, ONE_SAMPLE)
        if value is not None:
            found[name] = value
        elif default is None and name in tensors:
            why = "the checkpoint has its values"
            found[f"{name}.factory"] = Argument("torch:zeros", why, names_code=True)
            found[f"{name}.size"] = Argument([*tensors[name]], "the shape in the checkpoint")
        elif default is None or name in contradicted or name in passed:
            unknown.append(name)
    return found, unknown


def _passed(sources: Sources, model: ModelClass) -> set[str]:
    """Return the arguments that each call of a model's class passes."""
    calls = sources.calls(model.name)
    names = [set(bound_arguments(call, list(model.parameters))) for call in calls]
    return set.intersection(*names) - _LOADING if names else set()


def _is_like(value: Any, default: ast.expr | None) -> bool:
    """Whether a value found in branches or names of tensors can be an argument with a default."""
    if not isinstance(value, bool) or default is None:
        return True
    return isinstance(getattr(default, "value", None), bool)


def _contradicted(
    equations: Sequence[Equation],
    solved: Mapping[str, Argument],
    parameters: Mapping[str, ast.expr | None],
) -> set[str]:
    """Return the arguments whose defaults contradict the sizes in the checkpoint."""
    defaults = {
        name: Argument(value, "")
        for name, node in parameters.items()
        if isinstance(value := getattr(node, "value", None), int) and name not in solved
    }
    wrong: set[str] = set()
    for expression, size, _ in equations:
        names = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
        value = _value(expression, {**defaults, **solved})
        if value is not None and isinstance(size, int) and value != size:
            wrong |= names & defaults.keys()
    return wrong


def arguments_of(
    file: Path, name: str, files: Iterable[Path], given: Mapping[str, Any] | None = None
) -> tuple[dict[str, Argument], list[str]]:
    """Return the known arguments of a script's class or function, and the unknown arguments.

    Arguments with a default that no call passes are left out. Entries of a config are CONFIG.KEY.

    Args:
        file: The script.
        name: The class or function at its top level.
        files: Scripts that may call it. They are parsed, not run.
        given: The arguments that are stored with the checkpoint.
    """
    script = Script.read(file)
    if script is None or name not in {*script.classes, *script.functions}:
        return {}, []
    others = [found for each in files if (found := Script.read(each)) is not None]
    sources = Sources(script, [script, *(other for other in others if other is not script)])
    function = script.functions.get(name)
    if function is not None:  # as the __init__ of a class
        own = ast.arg("self")
        arguments = copy(function.args)
        arguments.args = [own, *function.args.args]
        made = ast.FunctionDef("__init__", arguments, function.body, [])
        sources.classes = sources.classes.new_child({name: ast.ClassDef(name, [], [], [made], [])})
    return _arguments(sources, ModelClass(sources, name), {}, given or {})


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


def _stored(
    given: Mapping[str, Any], name: str, default: ast.expr | None = None
) -> Argument | None:
    """Return a stored argument, or None. The value None is no argument if it is the default."""
    value = given.get(name)
    of_default = isinstance(default, ast.Constant) and default.value is None
    if name not in given or not (is_plain(value) or (value is None and not of_default)):
        return None
    where = given.source(name) if isinstance(given, StoredArguments) else "the checkpoint"
    return Argument(value, f"stored in {where}")


def _called(sources: Sources, model: ModelClass, given: Mapping[str, Any]) -> dict[str, Argument]:
    """Return the arguments that a call of a model's class gives as constants or stored values.

    `given` are the stored arguments: Net(width=args.wide) has the stored value of "wide".
    """
    best: dict[str, Argument] = {}
    for call in sources.calls(model.name):
        local, known = sources.local(call), {}
        for name, node in bound_arguments(call, list(model.parameters)).items():
            value = _stored(given, key_of(node) or last_name(node), model.parameters[name])
            value = value or sources.constant(local.get(last_name(node), node))
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
        for argument, node in bound_arguments(call, list(plain.parameters)).items():
            own = node.id if isinstance(node, ast.Name) else ""  # not opt.model
            made = unmoved(local.get(own) or sources.values.get(own, node))
            kind = last_name(made.func) if isinstance(made, ast.Call) else ""
            if isinstance(made, ast.Call) and kind != name and sources.is_module(kind):
                found.setdefault(argument, made)
    for argument, annotation in plain.annotations.items():  # def __init__(self, bert: BERT)
        if argument not in found and sources.is_module(annotation):
            found[argument] = ast.Call(ast.Name(annotation), [], [])
    return ModelClass(sources, name, given=found)


def _nested(
    sources: Sources, name: str, model: ModelClass, shapes: Shapes, given: Mapping[str, Any]
) -> tuple[dict[str, Argument], list[str]]:
    """Return the factory and the known arguments of an argument that is a module, and the rest.

    Both have the argument's name before them: NAME.factory.
    """
    if model.depth > _NESTED:  # classes that take each other
        return {}, [name]
    own = _with_modules(sources, last_name(model.given[name].func))  # type: ignore[attr-defined]
    own = replace(own, depth=model.depth + 1)
    known, unknown = _arguments(sources, own, shapes_below(shapes, model.attribute_of(name)), given)
    reference = f"{sources.file(own.name)}:{own.name}"
    factory = Argument(reference, f"the script passes {own.name}(...)", names_code=True)
    found = {f"{name}.{key}": value for key, value in {"factory": factory, **known}.items()}
    return found, [f"{name}.{key}" for key in unknown]


def _solved(equations: Iterable[Equation]) -> dict[str, Argument]:
    """Solve expressions for their only unknown name, NAME or NAME.ATTRIBUTE."""
    found: dict[str, Argument] = {}
    left = list(equations)
    for _ in range(3):  # a solution may make another expression solvable
        for expression, value, where in left:
            solution = _unknown_in(expression, value, found)
            if solution is not None:
                name, size = solution
                what = "tensors" if isinstance(size, bool | str) else "size"
                found.setdefault(name, Argument(size, f"the {what} of {where}"))
    return found


def _unknown_in(
    node: ast.expr, value: Size, known: Mapping[str, Argument]
) -> tuple[str, Size] | None:
    """Return the only unknown name of an expression and its value, or None if not solvable."""
    name = dotted_name(node)
    if name is not None:
        return name, value
    if not isinstance(node, ast.BinOp) or type(value) is not int:
        return None
    left, right = node.left, node.right
    factor = _value(right, known)
    if factor is None and isinstance(node.op, ast.Sub):  # BASE - NAME
        base = _value(left, known)
        return None if base is None else _unknown_in(right, base - value, known)
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
    if isinstance(node.op, ast.Sub):
        return _unknown_in(left, value + factor, known)
    return None


_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip


def _value(node: ast.expr, known: Mapping[str, Argument]) -> int | None:
    """Return the integer value of an expression of known names, or None."""
    operation = _OPERATIONS.get(type(node.op)) if isinstance(node, ast.BinOp) else None
    if isinstance(node, ast.BinOp) and operation is not None:
        left, right = _value(node.left, known), _value(node.right, known)
        with suppress(ZeroDivisionError, OverflowError):
            unusable = left is None or right is None or (isinstance(node.op, ast.Pow) and right > 9)
            return None if unusable else operation(left, right)  # type: ignore[arg-type]
        return None
    name = dotted_name(node) or ""
    found = known[name].value if name in known else getattr(node, "value", None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None
