"""Writes the loss of one sample, as a training step in a script computes it. No script is run.

The statements between the model's outputs and `backward()` are copied for a batch of one sample. A
step whose loss is a loss of gradscope gives the name of that loss.
"""

import ast
import builtins
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradscope.core.texts import listed
from gradscope.sources.scripts.losses import (
    base_of,
    built_loss,
    keeps_numbers,
    options_of,
    read_options,
    reduced_loss,
    training_scripts,
)
from gradscope.sources.scripts.steps import (
    BATCH,
    OUTPUTS,
    Entry,
    Line,
    Model,
    Reader,
    Step,
    Unmoved,
    assigned,
    names_bound,
    names_changed,
    names_read,
    steps_of,
    substituted,
)
from gradscope.sources.scripts.syntax import (
    LOSSES,
    Script,
    Sources,
    bound_arguments,
    last_name,
    parameters_of,
    read_scripts,
    unmoved,
)
from gradscope.sources.training import is_main_block

_RESULT = "_result"  # the variable of a step's loss
# functions whose results are written again
_PLAIN = {"torch", "nn", "F", "functional", "math", "np", "numpy", "functools", "partial"}
_PLAIN |= {"dict", "list", "tuple", "len", "float", "int", "range", "sum", "max", "min"}
_LOSS = re.compile(r"loss|crit(erion)?$|_entropy|objective", re.I)
_NEW = re.compile(r"\b(ones|zeros|full|rand\w*|empty|eye|fill_|\w+_like)\(")  # constant targets
_TARGETS = re.compile(r"^(y|t|tgt|gold|truth)\b|target|label|truth|_y$|^y_", re.I)
# layers with weights, and models of packages
_LAYERS = re.compile(
    r"\b(Linear|Conv\dd|ConvTranspose\dd|Embedding|BatchNorm\dd|LSTM|GRU|RNN|Parameter|LayerNorm)\("
)
_PACKAGED = re.compile(
    r"^models\.|\.models\.|hub\.load|create_model|from_pretrained|load_model|LPIPS"
)
_SPLIT = [
    "def samples(value):",
    '    """Split a tensor, or the tensors in a tuple or a dict, into batches of one sample."""',
    "    if isinstance(value, torch.Tensor):",
    "        return value.split(1)",
    "    if isinstance(value, dict):",
    "        return [dict(zip(value, row)) for row in zip(*map(samples, value.values()))]",
    "    return list(zip(*map(samples, value)))",
]


@dataclass(frozen=True)
class SampleLoss:
    """The loss of a training step, for one sample.

    `name` is an equal loss of gradscope, or "". `code` is the module loss.py.
    """

    line: str  # the line of a script
    name: str = ""
    reshaped: bool = False  # whether the step reshapes what it passes to the loss
    code: Sequence[str] = ()
    function: str = "loss"  # the function in the code
    unknown: Sequence[str] = ()  # the names whose values were not found
    notes: Sequence[str] = ()  # what the user should know
    of_inputs: bool = False  # whether the targets are the model's inputs
    keys: tuple[Sequence[str], Sequence[str]] = ((), ())  # the keys of a batch: inputs, targets
    foreign: bool = False  # whether another model makes the inputs
    mixed: bool = False  # whether the script mixes the samples of a batch, as mixup does


def step_loss(
    files: Iterable[Path],
    model: Path | None,
    name: str,
    given: Mapping[str, Any],
    data: Path | None = None,
) -> SampleLoss | None:
    """Return the loss of the training step of a model, or None if no script has such a step.

    Args:
        files: Python files.
        model: The file of the model.
        name: The model's class, function or variable in this file.
        given: The arguments that the checkpoint stores.
        data: The script of the data, if a script makes them. Its step is preferred.
    """
    files = list(files)
    scripts = read_scripts(files, given)
    found: list[tuple[tuple[bool, ...], SampleLoss]] = []
    for script in training_scripts(files, model, given)[0]:
        for step in steps_of(script, scripts):
            others = [script, *(other for other in scripts if other.file != script.file)]
            made = None
            with suppress(TypeError, ValueError, LookupError, AttributeError, RecursionError):
                made = _Writer(step, others, name, given, of_script=data is not None).written()
            if made is not None:  # no script, however unusual, ends the search
                other = data is not None and script.file.resolve() != data.resolve()
                rank = (other, not made.name and bool(made.unknown), made.foreign)
                found.append((rank, made))
    return min(found, key=lambda each: each[0])[1] if found else None


@dataclass
class _Slice:
    """The lines on which the loss depends."""

    kept: list[Line]
    used: dict[str, Entry]  # the variables that are parts of the batch or of the outputs
    free: set[str]  # the remaining names

    @property
    def outputs(self) -> set[str]:
        """The results of calls of the model."""
        return {entry[0] for entry in self.used.values()} - {BATCH}

    @property
    def targets(self) -> list[ast.expr]:
        """The variables, or parts of them, in the arguments of a loss next to the outputs."""
        value, _ = reduced_loss(self.value)
        made = {name: ast.unparse(node) for name, node in self.values.items()}
        calls = [n for n in ast.walk(value) if isinstance(n, ast.Call) and len(n.args) > 1]
        of_outputs = [
            (call, [base_of(a) for a in call.args])
            for call in calls
            if any(last_name(base_of(a)) in self.used for a in call.args)
        ]
        parts = [base for _, bases in of_outputs[:1] for base in bases]
        return [
            base
            for base in parts
            if isinstance(base, ast.Name | ast.Subscript | ast.Attribute)
            and last_name(base) not in self.used
            and not _NEW.search(made.get(last_name(base), ""))
        ]

    @property
    def value(self) -> ast.expr:
        """The loss, with values in place of the variables that depend on the outputs or a batch."""
        derived, lines = {*self.used}, [line.node for line in self.kept if not line.outer]
        for node in lines:
            if not derived.isdisjoint(names_read(node)):
                derived |= names_bound(node)
        found: ast.expr = ast.Name(_RESULT, ast.Load())
        for node in reversed(lines):
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(node, ast.Assign) and isinstance(target, ast.Name):
                if target.id in derived:
                    found = substituted(found, {target.id: node.value})
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                added = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
                found = substituted(found, {node.target.id: added})
        return found

    @property
    def values(self) -> dict[str, ast.expr]:
        """The values of the variables that are assigned in the step."""
        nodes = [line.node for line in self.kept if isinstance(line.node, ast.Assign)]
        return {last_name(node.targets[0]): node.value for node in nodes}


@dataclass
class _Writer:
    step: Step
    scripts: Sequence[Script]  # the step's script first
    name: str  # the model's class, function or variable
    given: Mapping[str, Any]
    of_script: bool  # whether a script makes the data
    notes: list[str] = field(default_factory=list)
    mixed: bool = False

    def written(self) -> SampleLoss | None:
        """Return the loss, or None if the step does not train the model."""
        script = self.step.script
        callers, near = self.step.callers, [script, *self.step.callers]
        model = Model(script, callers, self.name, lightning=self._lightning())
        options, defaults = read_options(self.scripts, self.given)
        model.losses = {name for each in self.scripts for name in each.torch_losses}
        result = Line(assigned(_RESULT, self.step.value))
        lines = self._entered([*self.step.lines, result], model)
        known: dict[str, Entry] = {}
        for _ in range(3):
            moves = Unmoved(options)
            reader = Reader(model, moves, replaced=True, known=known)
            sliced = _sliced(reader.read(lines), reader, near)
            if not known and (known := self._whole(sliced, reader)):
                continue
            target = _mixed(sliced, self.scripts)
            if target is None:
                break
            self.notes.append(
                f"{script.file.name} mixes the samples of a batch: a sample alone has this loss"
            )
            lines, self.mixed = [*lines, Line(assigned(_RESULT, target))], True
        if moves.mixed:
            self.mixed = True
            self.notes.append(
                f"{script.file.name} mixes the samples of some batches: a sample alone has this "
                "loss"
            )
        line = f"{script.file.name}: {self._text()}"
        alone = self._computes_alone(sliced, model)
        if alone or sliced.outputs != {OUTPUTS} or any(map(_is_flat, self._returned())):
            moves = Unmoved(options)
            reader = Reader(model, moves, replaced=False, known=known)
            sliced = _sliced(reader.read(lines), reader, near)
            nodes = [n for kept in sliced.kept for n in ast.walk(kept.node)]
            calls = [n for n in nodes if isinstance(n, ast.Call)]
            if not any(model.is_call(n) or model.is_method(n) for n in calls):
                return None
        read = {k: v for each in sliced.kept for k, v in each.options.items() if k in defaults}
        if read:
            text = listed(f"{k} = {v!r}" for k, v in read.items())
            self.notes.append(f"with {text}, the script's defaults")
        added = [n for s in self.scripts[:1] for n in s.nodes if isinstance(n, ast.AugAssign)]
        counted = {last_name(node.target) for node in added}
        self.notes += [
            f"with {ast.unparse(each.node)}, which the training changes"
            for each in sliced.kept
            if each.outer and isinstance(each.node, ast.Assign) and names_bound(each.node) & counted
        ]
        self.notes += self._alternatives(sliced, defaults)
        return self._module(sliced, reader, model, line)

    def _alternatives(self, sliced: _Slice, defaults: Collection[str]) -> list[str]:
        """Return a note on other losses that options choose, if only their defaults are known."""
        names = {name for each in sliced.kept for name in names_bound(each.node)} | sliced.free
        taken = {ast.unparse(n) for s in self.scripts for n in s.nodes if isinstance(n, ast.Assign)}
        found: list[str] = []
        for file in dict.fromkeys(s.file for s in (self.scripts[0], *self.step.callers)):
            script = Script.read(file)
            for node in script.nodes if script is not None else ():
                if not isinstance(node, ast.If):
                    continue
                option = next(
                    (
                        last_name(n)
                        for n in ast.walk(node.test)
                        if last_name(n) in defaults and isinstance(n, ast.Attribute)
                    ),
                    "",
                )
                lines = [n for n in ast.walk(node) if isinstance(n, ast.Assign)] if option else []
                others = [
                    ast.unparse(n)
                    for n in lines
                    if last_name(n.targets[0]) in names and ast.unparse(n) not in taken
                ]
                if others:
                    found.append(f"a different value of the option {option} has: {others[0]}")
        return list(dict.fromkeys(found))

    def _text(self) -> str:
        """Return the assignment of the loss, as in the script."""
        value = self.step.value
        whole = value.value if isinstance(value, ast.Subscript) else value  # found["loss"]
        name = last_name(whole)
        texts: list[str] = []
        for line in reversed(self.step.lines):
            node = line.node
            if isinstance(node, ast.Assign | ast.AugAssign) and name in names_bound(node):
                texts.insert(0, ast.unparse(node))
                if name not in names_read(node):
                    return "; ".join(texts)
        return f"loss = {ast.unparse(value)}"

    def _lightning(self) -> str:
        """Return the class whose training_step the step is, or ""."""
        node = self.step.script.classes.get(self.step.owner)
        methods = {getattr(each, "name", "") for each in node.body} if node is not None else set()
        return self.step.owner if "training_step" in methods else ""

    def _entered(self, lines: list[Line], model: Model) -> list[Line]:
        """Replace the call of a function that gets the model by the lines of the function."""
        methods = {
            each.name: each
            for script in self.scripts[:1]
            for node in script.classes.values()
            if node.name == self.step.owner
            for each in node.body
            if isinstance(each, ast.FunctionDef)
        }
        functions: dict[str, ast.FunctionDef] = {}
        for script in reversed(self.scripts):
            functions |= script.functions
        nodes = [line.node for line in lines if isinstance(line.node, ast.Assign)]
        aliases = {last_name(n.targets[0]): last_name(n.value) for n in nodes}
        for k in range(len(lines) - 1, -1, -1):
            node = lines[k].node
            call = unmoved(node.value) if isinstance(node, ast.Assign) else None
            if not isinstance(call, ast.Call) or not isinstance(node, ast.Assign):
                continue
            own = isinstance(call.func, ast.Attribute) and last_name(call.func.value) == "self"
            called = last_name(call.func)
            called = called if own else aliases.get(called) or called
            function = (methods if own else functions).get(called)
            passed = any(model.is_owner(each) for each in (*call.args, *_values(call)))
            if function is None or function.name == "forward" or not (own or passed):
                continue
            ends = [n for n in ast.walk(function) if isinstance(n, ast.Return)]
            last = function.body[-1]
            if len(ends) != 1 or ends[0] is not last or not isinstance(last, ast.Return):
                continue
            parameters = parameters_of(function.args, skip=int(own))
            given = {p: v for p, v in parameters.items() if v is not None}
            given |= bound_arguments(call, list(parameters))
            if last.value is None or parameters.keys() - given.keys():
                continue
            inside = [Line(assigned(p, v)) for p, v in given.items() if ast.unparse(v) != p]
            inside += [Line(each) for each in function.body[:-1]]
            inside.append(Line(assigned(node.targets[0], last.value)))
            alias = f"{last_name(call.func)} = {called}"
            before = [line for line in lines[:k] if ast.unparse(line.node) != alias]
            return [*before, *inside, *lines[k + 1 :]]
        return lines

    def _computes_alone(self, sliced: _Slice, model: Model) -> bool:
        """Whether the model computes its loss: in a method, or in forward."""
        nodes = [n for line in sliced.kept for n in ast.walk(line.node)]
        if any(model.is_method(n) for n in nodes):
            return True
        if any(entry[0] == OUTPUTS and entry[-1] == ".loss" for entry in sliced.used.values()):
            return True
        value, _ = reduced_loss(sliced.value)  # loss = model(x, y)
        return isinstance(value, ast.Name) and sliced.used.get(value.id, (BATCH,))[0] != BATCH

    def _module(self, sliced: _Slice, reader: Reader, model: Model, line: str) -> SampleLoss | None:
        """Return the module loss.py for the lines of a loss, and the loss's name."""
        inputs, targets, whole = self._sides(sliced, reader)
        both = {entry for entry in sliced.used.values() if entry[0] == BATCH}
        outputs = [entry for entry in sliced.used.values() if entry[0] == OUTPUTS]
        models = sorted({*model.names} & sliced.free)
        of_model = not reader.replaced or bool(models)
        of_inputs = bool(both) and self.of_script and both <= {*inputs} and len(inputs) == 1
        of_inputs &= not of_model
        of_model |= not both <= {*targets} and not of_inputs
        given = [e for e in next(iter(reader.passed.values()), []) if e is not None]
        of_model |= not {*given} - {(BATCH,)} <= {*inputs}
        if of_model and self.of_script and len(inputs) + len(targets) > 2 and whole is None:
            inputs, targets = [*inputs, *targets], []  # all entries of a sample are inputs
        parts = _Parts(self.scripts, [self.scripts[0], *self.step.callers], model.others)
        for name in sorted(sliced.free - model.names):
            parts.add(name, self.scripts[0])
        own = [each for each in sliced.kept if each.outer]
        parts.take(own, self.scripts)
        unknown = sorted(parts.unknown)
        foreign = [reader.foreign[k] for k in sorted(sliced.outputs) if k in reader.foreign]
        unknown += [f"{text}, which another model makes" for text in foreign]
        places: dict[str, str] = {}
        used = sorted(sliced.used.items(), key=lambda each: (each[1][0] == BATCH, str(each[1])))
        for name, entry in used:
            place = _place(entry, inputs, targets, of_inputs=of_inputs)
            if place is None:
                unknown.append(name)
            else:
                places[name] = place
        sources = {e[0] for each in reader.passed.values() for e in each if e is not None}
        if not both and BATCH not in sources and reader.count is None and not reader.known:
            call, _ = reduced_loss(sliced.value)
            if isinstance(call, ast.Call) and built_loss(call, sliced.values) is not None:
                return None  # a loss of torch: its name and the data say what it is
            unknown.append("the inputs and targets in a batch")
        keys = ([], []) if whole is None else whole
        name, reshaped = self._name(sliced, parts.values, both)
        body = [ast.unparse(each.node) for each in sliced.kept if not each.outer]
        body[-1] = body[-1].replace(f"{_RESULT} = ", "return ", 1)
        arguments = [*models, *places]
        file = self.step.script.file.name
        defined = {line.split()[-1] for line in parts.imports}
        for node in ast.parse("\n".join(parts.lines)).body:
            named = isinstance(node, ast.FunctionDef | ast.ClassDef)
            defined |= {node.name} if named else names_bound(node)  # type: ignore[attr-defined]
        function = "loss" if "loss" not in defined else "loss_of_samples"
        inside = [each.node for each in sliced.kept if not each.outer]
        unknown += sorted(defined & {n for node in inside for n in names_bound(node)})
        one = [f"def one({', '.join(arguments)}):"]
        one.append(f'    """Return the loss of a batch of one sample, as in {file}."""')
        one += [f"    {text}" for each in body for text in each.splitlines()]
        structured = any(isinstance(e, ast.Tuple | ast.List | ast.Dict) for e in self._returned())
        split = "samples({})" if structured and (OUTPUTS,) in outputs else "{}.split(1)"
        rows = [split.format(place) for place in places.values()] or ["..."]
        head = [f"def {function}(outputs, targets):"]
        if of_model:
            head = ["@gradscope.model_loss", f"def {function}(model, inputs, targets):"]
            if outputs:
                taken = [_place(e, inputs, targets, of_inputs=False) or "inputs" for e in given]
                head.append(f"    outputs = model({', '.join(taken) or 'inputs'})")
        head.append(f"    rows = zip({', '.join(rows)}, strict=True)")
        passed = ", ".join([*(["model"] * len(models)), "*row"])
        head.append(f"    return torch.stack([one({passed}) for row in rows]).flatten()")
        imports = ["import torch", *(["import gradscope"] if of_model else []), *parts.imports]
        helper = _SPLIT if "samples(" in "".join(rows) else []
        code = [*dict.fromkeys(imports), *parts.lines, *helper, *one, *head]
        return SampleLoss(
            line,
            name,
            reshaped,
            code,
            function,
            unknown,
            self.notes,
            of_inputs,
            keys,
            bool(foreign),
            self.mixed,
        )

    def _whole(self, sliced: _Slice, reader: Reader) -> dict[str, Entry]:
        """Return the expressions of inputs and targets in a step without a loop over batches.

        The arguments of the model are inputs. The target is passed to the loss.
        """
        known = {entry[0] for entry in (*sliced.used.values(), *reader.entries.values())}
        passed = [node for each in [*reader.arguments.values()][:1] for node in each]
        if BATCH in known or reader.count is not None or not passed:
            return {}
        inputs = [ast.unparse(base_of(node)) for node in passed]
        texts = [ast.unparse(n) for n in sliced.targets]
        if not sliced.used:  # model.loss(x) is passed on with a target
            texts = [name for name in sorted(sliced.free) if _TARGETS.search(name)]
        targets = [text for text in dict.fromkeys(texts) if text not in inputs]
        if len(targets) > 1:
            return {}
        return {text: (BATCH, k) for k, text in enumerate([*inputs, *targets])}

    def _returned(self) -> list[ast.expr]:
        """Return the expressions that the model's forward returns, as far as it is known."""
        last = self.name.rpartition(".")[2]
        made = next((unmoved(s.values[last]) for s in self.scripts if last in s.values), None)
        last = last_name(made.func) if isinstance(made, ast.Call) else last
        for script in self.scripts:
            node = script.classes.get(last)
            for method in node.body if node is not None else ():
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    ends = [n.value for n in ast.walk(method) if isinstance(n, ast.Return)]
                    return [e for e in ends if e is not None]
        return []

    def _sides(
        self, sliced: _Slice, reader: Reader
    ) -> tuple[list[Entry], list[Entry], tuple[list[str], list[str]] | None]:
        """Return the entries of a batch that are inputs and targets, and their keys in a dict."""
        used = [entry for entry in sliced.used.values() if entry[0] == BATCH]
        passed = next(iter(reader.passed.values()), [])
        given = [entry for entry in passed if entry is not None]
        if any(isinstance(entry[-1], str) and entry != (BATCH,) for entry in (*used, *given)):
            targets = [entry for entry in dict.fromkeys(used) if entry not in given]
            keyed = [e for e in (*given, *targets) if len(e) == 2 and not str(e[1]).startswith(".")]
            known = bool(given) and len(keyed) == len(given) + len(targets)
            if not known:
                return given, targets, None
            keys = ([e[1] for e in given], [e[1] for e in targets or dict.fromkeys(used)])
            return given, targets, keys if keys[1] else None
        found = [e[1] for e in (*used, *given) if len(e) > 1 and isinstance(e[1], int)]
        count = reader.count or max([*found, 0]) + 1
        whole = (BATCH,) in used or ((BATCH,) in given and not found)
        if whole:  # for x in loader
            return [(BATCH,)], [], None
        entries: list[Entry] = [(BATCH, k) for k in range(count)]
        taken = 1 if count <= 2 else len(passed) or 1
        taken = count if taken >= count > 2 else taken
        return entries[:taken], entries[taken:], None

    def _name(
        self, sliced: _Slice, known: Mapping[str, ast.expr], batch: Collection[Entry]
    ) -> tuple[str, bool]:
        """Return the name of an equal loss of gradscope, or "", and whether the step reshapes."""
        value = _inlined(sliced.value, self.scripts)
        call, reducers = reduced_loss(value)
        if not isinstance(call, ast.Call):
            return "", False
        arguments = [*call.args, *(k.value for k in call.keywords if k.arg in ("input", "target"))]
        values = {**sliced.values, **known}
        name = last_name(call.func)
        if isinstance(call.func, ast.Attribute):  # model.loss of self.loss = nn.BCELoss()
            owned = (_only_value(name, each, ast.Attribute) for each in self.scripts)
            own = next((value for value in owned if value is not None), None)
            values = values if own is None else {**values, name: own}
        built = built_loss(call, values)
        if built is None or len(arguments) < 2:
            return "", False
        outputs, targets = arguments[:2]
        bases = [base_of(outputs), base_of(targets)]
        entries = [
            sliced.used.get(base.id) if isinstance(base, ast.Name) else None for base in bases
        ]
        plain = entries[0] == (OUTPUTS,) and entries[1] in batch
        if not plain or not (keeps_numbers(outputs) and keeps_numbers(targets)):
            return "", False
        parts = [n for each in arguments[:2] for n in ast.walk(each)]
        if {"mean", "sum", "permute", "transpose", "t"} & _methods(arguments[:2]) or any(
            isinstance(n, ast.Slice) for n in parts
        ):
            return "", False
        sources = Sources(self.scripts[0], self.scripts)
        options = options_of(call, built, sources, self.given, reducers)
        if options is None:
            weighted = any(k.arg == "weight" for k in built.keywords) or built.args
            if weighted and LOSSES[last_name(built.func)] in ("cross_entropy", "nll"):
                self.notes.append(
                    "for a batch of one sample torch divides the weights of classes out; for "
                    f"weighted losses use {LOSSES[last_name(built.func)]}:weight=1;2"
                )
            return "", False
        reshaped = {"view", "reshape", "squeeze", "unsqueeze", "flatten"} & _methods(arguments[:2])
        return LOSSES[last_name(built.func)] + options, bool(reshaped)


def _is_flat(node: ast.expr) -> bool:
    """Whether an output, or one of a tuple, has the positions of all samples on one axis."""
    if isinstance(node, ast.Tuple | ast.List):
        return any(map(_is_flat, node.elts))
    called = node.func if isinstance(node, ast.Call) else None
    shaped = isinstance(called, ast.Attribute) and called.attr in ("view", "reshape")
    sizes = [ast.unparse(each) for each in node.args] if isinstance(node, ast.Call) else []
    return shaped and len(sizes) > 1 and sizes[0] == "-1"


def _values(call: ast.Call) -> list[ast.expr]:
    return [keyword.value for keyword in call.keywords]


def _methods(nodes: Iterable[ast.expr]) -> set[str]:
    calls = (n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Call))
    return {last_name(call.func) for call in calls}


def _place(
    entry: Entry, inputs: list[Entry], targets: list[Entry], *, of_inputs: bool
) -> str | None:
    """Return the expression for an entry in a function of (outputs, targets) or of inputs."""
    if entry[0] == OUTPUTS:
        keys = [key if str(key).startswith(".") else f"[{key!r}]" for key in entry[1:]]
        return OUTPUTS + "".join(keys)
    for side, entries in (("inputs", inputs), ("targets", targets)):
        if entry in entries:
            name = "targets" if of_inputs else side
            return name if len(entries) == 1 else f"{name}[{entries.index(entry)}]"
    return None


def _sliced(lines: Sequence[Line], reader: Reader, scripts: Sequence[Script] = ()) -> _Slice:
    """Return the lines on which the last line depends."""
    found = _Slice([], {}, {_RESULT})
    for line in reversed(lines):
        if line.binds:
            hit = (found.free - reader.made.keys()) & line.binds.keys()
            found.used |= {name: line.binds[name] for name in sorted(hit)}
            found.free -= hit
            continue
        bound = names_bound(line.node) - reader.model.names - reader.model.others
        changed = names_changed(line.node) - reader.model.names
        if isinstance(line.node, ast.Import | ast.ImportFrom):
            continue
        if (found.free - reader.made.keys()).isdisjoint(bound | changed):
            continue
        if isinstance(line.node, ast.FunctionDef | ast.ClassDef):
            if line.node.name not in found.free:
                continue
            bound = {line.node.name}
        importing = _importable(line.node, scripts) if line.outer else None
        if importing is not None:
            line = Line(importing, outer=True)
        found.kept.insert(0, line)
        if isinstance(line.node, ast.Assign | ast.FunctionDef | ast.ClassDef) or importing:
            found.free -= bound
        found.free |= names_read(line.node)
    branches = [line.node for line in found.kept if isinstance(line.node, ast.If)]
    for branch in branches:  # each branch assigns the name
        ends = [
            {n for each in body for n in names_bound(each)} for body in (branch.body, branch.orelse)
        ]
        found.free -= ends[0] & ends[1]
    for name in sorted(found.free & reader.made.keys()):  # parts that the script does not name
        found.used[name] = reader.made[name]
        found.free.discard(name)
    return found


def _importable(node: ast.stmt, scripts: Sequence[Script]) -> ast.ImportFrom | None:
    """Return the import of a global variable whose value is made by other code than torch's.

    Its script may read files and parse arguments, so that the value is not written again.
    """
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return None
    name = node.targets[0].id
    roots = {
        ast.unparse(n.func).partition(".")[0] for n in ast.walk(node) if isinstance(n, ast.Call)
    }
    if roots <= _PLAIN or _LOSS.search(name):
        return None
    for script in scripts:
        top = {last_name(n.targets[0]) for n in script.tree.body if isinstance(n, ast.Assign)}
        if name in top and script.file.stem.isidentifier():
            return ast.ImportFrom(script.file.stem, [ast.alias(name)], 0)
    return None


def _mixed(sliced: _Slice, scripts: Sequence[Script]) -> ast.expr | None:
    """Return C(P, TARGET) for a loss a * C(P, TARGET) + (1 - a) * C(P, OTHER), or None.

    The step mixes the samples of a batch, as mixup and cutmix do.
    """
    value, _ = reduced_loss(_inlined(sliced.value, scripts))
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return None
    sides = [_scaled(value.left), _scaled(value.right)]
    if any(side is None for side in sides):
        return None
    (factor, first), (other, second) = sides  # type: ignore[misc]
    texts = [re.sub(r"[\s().]|(?<=1)\.0?", "", ast.unparse(each)) for each in (factor, other)]
    if texts[1] != f"1-{texts[0]}" and texts[0] != f"1-{texts[1]}":
        return None
    if (
        len(first.args) != 2
        or len(second.args) != 2
        or ast.unparse(first.args[0]) != ast.unparse(second.args[0])
    ):
        return None
    if ast.unparse(first.func) != ast.unparse(second.func):
        return None
    target = next(
        (
            each
            for each in (first.args[1], second.args[1])
            if isinstance(each, ast.Name) and each.id in sliced.used
        ),
        None,
    )
    if target is None:
        names = names_read(first.args[1])
        for line in reversed(sliced.kept):
            if names & names_bound(line.node):
                names |= names_read(line.node)
        batch = [(e, n) for n, e in sliced.used.items() if n in names and e[0] == BATCH]
        target = ast.Name(max(batch, key=lambda each: str(each[0]))[1]) if batch else None
    if target is None:
        return None
    return ast.Call(first.func, [first.args[0], target], first.keywords)


def _scaled(node: ast.expr) -> tuple[ast.expr, ast.Call] | None:
    """Return (A, CALL) of A * CALL or CALL * A, or None."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    for factor, call in ((node.left, node.right), (node.right, node.left)):
        if isinstance(call, ast.Call) and len(call.args) == 2:
            return factor, call
    return None


def _inlined(value: ast.expr, scripts: Sequence[Script], depth: int = 2) -> ast.expr:
    """Return the expression that a call of a short function of a script returns."""
    call, _ = reduced_loss(value)
    if not isinstance(call, ast.Call) or call is not value or depth == 0:
        return value
    for script in scripts:
        function = script.functions.get(last_name(call.func))
        if function is None:
            continue
        body = [n for n in function.body if not isinstance(n, ast.Expr)]
        simple = all(
            isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) for n in body[:-1]
        )
        parameters = parameters_of(function.args)
        given = {k: v for k, v in parameters.items() if v is not None}
        given |= bound_arguments(call, list(parameters))
        end = body[-1] if body else None
        if not simple or not isinstance(end, ast.Return) or end.value is None:
            return value
        if parameters.keys() - given.keys():
            return value
        found = end.value
        for node in reversed(body[:-1]):
            assert isinstance(node, ast.Assign)
            found = substituted(found, {last_name(node.targets[0]): node.value})
        return _inlined(substituted(found, given), scripts, depth - 1)
    return value


class _Parts:
    """The imports and definitions that the lines of a loss need.

    Args:
        scripts: The step's script, and the others.
        near: The step's script, and the scripts that call its functions.
        models: The variables with other models, whose weights are not known.
    """

    def __init__(
        self, scripts: Sequence[Script], near: Sequence[Script], models: Collection[str]
    ) -> None:
        self.scripts, self.near, self.models = scripts, near, models
        self.imports: list[str] = []
        self.lines: list[str] = []  # definitions, then values
        self.values: dict[str, ast.expr] = {}  # the values of variables
        self.unknown: set[str] = set()
        self._seen: set[str] = set()

    def add(self, name: str, script: Script) -> None:
        """Add what defines a name in a script."""
        if name in self._seen or name in vars(builtins):
            return
        self._seen.add(name)
        if name in self.models:
            self.unknown.add(name)
            return
        lines = (_import_of(name, each) for each in (script, *self.near))
        if (line := next(filter(None, lines), None)) is not None:
            self.imports.append(line)
            return
        for other in (script, *(s for s in self.scripts if s.file != script.file)):
            node = other.functions.get(name) or other.classes.get(name)
            if node is not None:
                self._define(name, node, other)
                return
        value = _only_value(name, script) or next(
            (found for s in self.scripts if (found := _only_value(name, s)) is not None), None
        )
        if value is None:
            self.unknown.add(name)
            return
        made = assigned(name, value)
        if (importing := _importable(made, self.near)) is not None:
            self.imports.append(ast.unparse(importing))
            return
        self._assign(made, script)

    def take(self, lines: Sequence[Line], scripts: Sequence[Script]) -> None:
        """Add the statements of a step before its loop."""
        for line in lines:
            bound = names_bound(line.node)
            self._seen |= bound
            node = line.node
            if isinstance(node, ast.ImportFrom):
                self.imports.append(ast.unparse(node))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                self._define(node.name, node, scripts[0])
            else:
                self._assign(node, scripts[0])

    def _define(self, name: str, node: ast.stmt, script: Script) -> None:
        if _imports_safely(script) and node in script.tree.body:
            self.imports.append(f"from {script.file.stem} import {name}")
            return
        self._seen.add(name)
        for read in sorted(names_read(node)):
            self.add(read, script)
        self.lines += ast.unparse(node).splitlines()

    def _assign(self, node: ast.stmt, script: Script) -> None:
        made = Unmoved({}).visit(ast.parse(ast.unparse(ast.fix_missing_locations(node))))
        for each in made.body:
            for read in sorted(names_read(each)):
                self.add(read, script)
            self.lines += ast.unparse(each).splitlines()
            if isinstance(each, ast.Assign):
                self.values[last_name(each.targets[0])] = each.value
                if self._is_model(each.value):
                    self.unknown.add(last_name(each.targets[0]))

    def _is_model(self, value: ast.expr) -> bool:
        """Whether a value is a model with weights, which a loss would not know."""
        for call in (n for n in ast.walk(value) if isinstance(n, ast.Call)):
            if _PACKAGED.search(ast.unparse(call.func)):
                return True
            found = (
                s.classes[last_name(call.func)]
                for s in self.scripts
                if last_name(call.func) in s.classes
            )
            if any(_LAYERS.search(ast.unparse(node)) for node in found):
                return True
        return False


def _imports_safely(script: Script) -> bool:
    """Whether a script only defines and imports, and can be imported by its name."""
    plain = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return script.file.stem.isidentifier() and all(
        isinstance(node, plain)
        or is_main_block(node)
        or isinstance(getattr(node, "value", None), ast.Constant)
        for node in script.tree.body
    )


def _import_of(name: str, script: Script) -> str | None:
    """Return the statement that imports a name in a script, or None."""
    for node in script.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    if isinstance(node, ast.Import):
                        return ast.unparse(ast.Import([alias]))
                    return ast.unparse(ast.ImportFrom(node.module, [alias], node.level))
    return None


def _only_value(name: str, script: Script, kind: type[ast.expr] = ast.expr) -> ast.expr | None:
    """Return the value of a variable that is assigned one value, or None.

    The variable is global, an attribute, or a loss: a local variable may be another variable.
    """
    found: dict[str, ast.expr] = {}
    blocks = [node.body for node in script.tree.body if is_main_block(node)]  # type: ignore[attr-defined]
    top = {id(node) for body in (script.tree.body, *blocks) for node in body}
    for node in script.nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(target, kind) and last_name(target) == name:
            value = unmoved(node.value)
            empty = isinstance(value, ast.Constant) and value.value is None
            called = value.func if isinstance(value, ast.Call) else value
            of_loss = _LOSS.search(name) or _LOSS.search(last_name(called))
            known = id(node) in top or isinstance(target, ast.Attribute) or of_loss
            if last_name(value) != name and not empty and known:
                found[ast.unparse(value)] = value
    return next(iter(found.values())) if len(found) == 1 else None
