"""The parts that a model's class makes, and the sizes that a checkpoint gives them."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

from gradscope.core.texts import listed
from gradscope.sources.scripts.lists import Added, Entries, added_entries, entries_of
from gradscope.sources.scripts.syntax import (
    Equation,
    OuterNames,
    Shape,
    Shapes,
    Size,
    Sources,
    Substituted,
    assigned_pairs,
    bound_arguments,
    copy_of,
    dotted_name,
    key_of,
    last_name,
    nodes_in_eval,
    parameters_of,
    returned_call,
    unmoved,
)

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
_GROUPS = 7  # the position of `groups` among the arguments of a convolution, or before
_FLAGS = {"bias": "bias", "bidirectional": "_reverse"}  # {option: a part of its tensors' names}
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
_REGISTER = {"register_buffer", "register_parameter", "add_module", "setattr"}
_COPIED = {"deepcopy", "copy"}  # functions that return a copy of a module
# functions whose results are random
DRAWS = {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm"}
DRAWS |= {"bernoulli", "multinomial", "normal", "normal_", "uniform_", "bernoulli_", "rsample"}


@dataclass(frozen=True)
class Part:
    """A part of a model that an `__init__` makes."""

    kind: str  # a layer of torch; "module", "indexed", "named", "parameter", "plain" or "unknown"
    call: ast.Call | None = None
    parts: Mapping[str, "Part"] = field(default_factory=dict)
    repeated: Sequence["Part"] = ()  # the kinds of entries in a list of variable length
    count: ast.expr | None = None  # the number of entries
    over: ast.comprehension | None = None  # the loop that makes the entries
    last: Sequence["Part"] = ()  # the entries after the loop, which are also in `repeated`
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
                waiting += [last_name(base) for base in node.bases]
        for node in line:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return line, method.args
        return line, None

    @property
    def parameters(self) -> dict[str, ast.expr | None]:
        """The parameters of `__init__` without self, and the keys of **kwargs, with defaults."""
        line, arguments = self._lines
        if arguments is None:  # class Head(nn.Linear) without __init__
            bases = [last_name(base) for node in line for base in node.bases]
            kind = next((base for base in bases if base in _AXES), "")
            return dict.fromkeys(_AXES.get(kind, ()))
        return parameters_of(arguments, skip=1) | dict.fromkeys(self.keywords)

    @property
    def annotations(self) -> dict[str, str]:
        """The names of the classes that annotate the parameters of `__init__`."""
        arguments = self._lines[1]
        every = () if arguments is None else (*arguments.args, *arguments.kwonlyargs)
        return {a.arg: last_name(a.annotation) for a in every if a.annotation is not None}

    @cached_property
    def keywords(self) -> list[str]:
        """The keys of the **kwargs of `__init__` that the class reads, as kwargs["width"]."""
        line, arguments = self._lines
        if arguments is None or arguments.kwarg is None:
            return []
        makers = [m for node in line for m in node.body if getattr(m, "name", "") == "__init__"]
        nodes = [n for maker in makers for n in ast.walk(maker) if isinstance(n, ast.Subscript)]
        return [
            key for n in nodes if last_name(n.value) == arguments.kwarg.arg and (key := key_of(n))
        ]

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
            if key not in self.parameters and key not in map(dotted_name, own):
                found.setdefault(key, value)
        for loop in (inner for line in self._lines[0] for inner in ast.walk(line)):
            if isinstance(loop, ast.For):
                entry = _first(loop.iter, found)
                targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
                if entry is not None and last_name(targets[-1]):
                    found.setdefault(last_name(targets[-1]), entry)
        return found

    @cached_property
    def parts(self) -> dict[str, list[Part]]:
        """The parts by attribute name; an attribute has several parts if branches differ.

        A name that is made in a loop has "*" for what changes: layer_* is a list of the layers.
        """
        found: dict[str, list[Part]] = {}
        for target, value in self._assignments():
            if isinstance(target, ast.Attribute):
                found.setdefault(target.attr, []).append(self._assigned(target.attr, value))
        nodes = [inner for line in self._lines[0] for inner in ast.walk(line)]
        loops = {
            id(node): loop for loop in nodes if isinstance(loop, ast.For) for node in ast.walk(loop)
        }
        for node in nodes:
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = last_name(node.func)
            owner = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0]
            if called in _REGISTER and last_name(owner) == "self":
                name = _pattern(node.args[-2] if len(node.args) > 1 else node.args[0])
                made = self.part(node.args[-1])
                if called.startswith("register"):
                    made = Part("parameter")
                if "*" in name:
                    loop = loops.get(id(node))
                    count = _length(loop.iter, self.names) if loop is not None else None
                    made = Part("indexed", repeated=[made], count=count)
                if name.strip("*"):
                    found.setdefault(name, []).append(made)
        return found

    def _assigned(self, name: str, value: ast.expr) -> Part:
        """Return the part of self.NAME = VALUE, with what methods add to it if it is a list."""
        made = self.part(value)
        added = self._added.get(f"self.{name}")
        if made.kind == "indexed" and added and isinstance(value, ast.Call):
            return self._list(value, added)
        return made

    @cached_property
    def _added(self) -> Added:
        methods = [
            m for node in self._lines[0] for m in node.body if isinstance(m, ast.FunctionDef)
        ]
        return added_entries(methods)

    @cached_property
    def layer(self) -> Part:
        """The layer of torch that is a base of the class, with the arguments of its `__init__`.

        An example is the part of nn.Sequential(*layers) in a class with this base, whose
        `__init__` calls super().__init__(*layers).
        """
        line, arguments = self._lines
        bases = [(node, last_name(base)) for node in line for base in node.bases]
        for node, kind in bases:
            if kind in self.sources.classes or kind not in {*_AXES, *_NESTED, "Sequential"}:
                continue
            if arguments is None:
                return self.part(ast.Call(ast.Name(kind), [*map(ast.Name, self.parameters)], []))
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and last_name(call.func) == "__init__":
                    owner = getattr(call.func, "value", call)  # super(), or nn.Linear with self
                    given = call.args[last_name(owner) == kind :]
                    return self.part(ast.Call(ast.Name(kind), given, call.keywords))
        return Part("plain")

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
                    for target, each in assigned_pairs(targets, value):
                        own = (
                            isinstance(target, ast.Attribute) and last_name(target.value) == "self"
                        )
                        if isinstance(target, ast.Name) or own:
                            yield target, each  # type: ignore[misc]

    def part(self, node: ast.expr) -> Part:
        """Return the part that an expression makes."""
        node = unmoved(node)
        if isinstance(node, ast.IfExp):
            return self.part(node.body)
        if (own := dotted_name(node)) is not None:
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
        name = last_name(called)
        owner = (dotted_name(called) or "").partition(".")[0]
        local = owner not in ("torch", "nn") and self.sources.is_module(name)
        if not local and (name in _AXES or name in _NESTED):
            return Part(name, node)
        if (
            name == "from_pretrained"
            and (kind := last_name(getattr(called, "value", called))) in _AXES
        ):
            return Part(kind)
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
        method = self.method(name) if dotted_name(called) == f"self.{name}" else None
        if method is not None:
            return self._made_by(method, node)
        function = self.sources.functions.get(name) if self.depth < 8 else None
        made = None if function is None else returned_call(function)
        if function is not None and made is not None and last_name(made.func) != name:
            passed = bound_arguments(node, list(parameters_of(function.args)))
            return self.part(Substituted(passed).visit(copy_of(made)))
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
        return [] if forward is None else list(parameters_of(forward.args, skip=1))

    @property
    def random(self) -> bool:
        """Whether forward, or a method that it calls, draws random numbers in eval mode too."""
        waiting, seen = ["forward"], {"forward"}
        while waiting:
            method = self.method(waiting.pop())
            nodes = [] if method is None else nodes_in_eval(method)
            called = [node.func for node in nodes if isinstance(node, ast.Call)]
            own = {
                last_name(name) for name in called if dotted_name(name) == f"self.{last_name(name)}"
            }
            if not DRAWS.isdisjoint({*map(last_name, called)} - own):
                return True
            waiting += own - seen
            seen |= own
        return False

    def attribute_of(self, argument: str) -> str:
        """Return the attribute of self to which `__init__` assigns an argument."""
        for target, value in self._assignments():
            if isinstance(target, ast.Attribute) and dotted_name(unmoved(value)) == argument:
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
            and dotted_name(called.func) == f"self.{part}"
        )

    def _made_by(self, method: ast.FunctionDef, call: ast.Call) -> Part:
        """Return the part of a method that appends modules to a list."""
        appended = [
            inner.args[0]
            for inner in ast.walk(method)
            if isinstance(inner, ast.Call) and last_name(inner.func) == "append" and inner.args
        ]
        passed = bound_arguments(call, list(parameters_of(method.args, skip=1)))
        passed = {k: self.given.get(last_name(v), v) for k, v in passed.items()}
        entries = [Substituted(passed).visit(copy_of(node)) for node in appended]
        if not entries:
            return _UNKNOWN
        count = next((v for v in passed.values() if isinstance(v, ast.Subscript)), None)
        return Part("indexed", repeated=[self.part(node) for node in entries], count=count)

    def _list(self, node: ast.Call, added: Sequence[Entries] = ()) -> Part:
        """Return the part of Sequential(...) or ModuleList(...); `added` is added afterwards."""
        names = {**self.names, **self.given}
        entries = [*entries_of(node, names, self._added), *added]
        first = entries[0].nodes[0] if entries else None
        if isinstance(first, ast.Call) and last_name(first.func) == "OrderedDict":
            return self._dict(first)
        fixed = next(
            (k for k, e in enumerate(entries) if e.loop is not None or not e.certain), len(entries)
        )
        leading = [self.part(n) for e in entries[:fixed] for n in e.nodes]
        rest = entries[fixed:]
        parts = {str(k): part for k, part in enumerate(leading)}
        repeated = [
            _UNKNOWN if isinstance(n, ast.Starred) else self.part(n) for e in rest for n in e.nodes
        ]
        loops = [e for e in rest if e.loop is not None]
        if len(loops) != 1 or not all(e.certain for e in rest):
            return Part("indexed", parts=parts, repeated=repeated)
        over, each = loops[0].loop, len(loops[0].nodes)
        assert over is not None
        last = repeated[each:]  # after the loop
        silent = 0  # entries without tensors at the end
        for part in reversed([*leading, *repeated]):
            if part.kind != "plain":
                break
            silent += 1
        count = _length(over.iter, names)
        if count is not None and not any(map(_is_length, ast.walk(count))):
            count = ast.BinOp(ast.Constant(each), ast.Mult(), count) if each > 1 else count
            other = len(leading) + len(last) - silent
            operation = ast.Add() if other > 0 else ast.Sub()
            count = ast.BinOp(count, operation, ast.Constant(abs(other))) if other else count
        return Part("indexed", None, parts, repeated, count, over, last=last)

    def _dict(self, node: ast.Call) -> Part:
        found: dict[str, Part] = {k.arg: self.part(k.value) for k in node.keywords if k.arg}
        for entry in node.args:
            if isinstance(entry, ast.Call) and last_name(entry.func) in ("dict", "OrderedDict"):
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
                passed = bound_arguments(part.call, list(found.parameters))
                outer = {k: OuterNames().visit(self.resolved(v)) for k, v in passed.items()}
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
            of_base = self.explained(key, shape, self.layer)
            return max((self.explained(below, shape, a) for a in found), default=of_base)
        if part.kind == "unknown":
            return 0.5
        if part.kind == "module":
            return self.below(part).explained(key, shape) if key else 0.0
        if part.kind in ("indexed", "named"):
            if not key:
                return 0.0
            inner = [part.parts[key[0]]] if key[0] in part.parts else part.repeated
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
        base = {k: v for k, v in shapes.items() if not self.alternatives(k.partition(".")[0])}
        if base:
            found = self._of_part(self.layer, base, self.name, depth)
            yield from ((self.resolved(e), v, w) for e, v, w in found)
        yield from self._of_branches(shapes)
        for name, alternatives in self.parts.items():
            own = shapes_below(shapes, name)
            if "*" in name:
                own = {k: v for k, v in shapes.items() if fnmatchcase(k.partition(".")[0], name)}

            part = max(alternatives, key=lambda p, own=own: self._fit(p, own))  # type: ignore[misc]
            yield from (
                (self.resolved(e), v, w) for e, v, w in self._of_part(part, own, name, depth)
            )

    def _of_loop(
        self, part: Part, indices: Sequence[str], shapes: Shapes, where: str, depth: int
    ) -> Iterator[Equation]:
        """Yield (list, its integers) for the list that a loop reads: one entry, or two, a time.

        Examples are [Layer(k) for k in LIST], and Layer(a, b) for a, b in zip(LIST, LIST[1:]).
        """
        assert part.over is not None
        over, target = part.over.iter, part.over.target
        found: list[dict[str, Size]] = []
        for index in indices:
            below = shapes_below(shapes, index)
            best = max(part.repeated, key=lambda p, below=below: self._fit(p, below))  # type: ignore[misc]
            own = self._of_part(best, below, where, depth)
            found.append({ast.unparse(expression): value for expression, value, _ in own})
        first, second, read = ast.unparse(target), "", over
        ranged = isinstance(over, ast.Call) and last_name(over.func) in ("zip", "range")
        if ranged and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            first, second = map(ast.unparse, target.elts)
            read = over.args[0]  # type: ignore[attr-defined]
            read = read.value if isinstance(read, ast.Subscript) else read
        elif ranged:
            lengths = [n for n in ast.walk(over) if isinstance(n, ast.Call) and _is_length(n)]
            if not lengths:
                return
            read, name = lengths[0].args[0], ast.unparse(lengths[0].args[0])
            first, second = f"{name}[{first}]", f"{name}[{first} + 1]"
        elif not isinstance(target, ast.Name):
            return
        last = second or first
        values = [own[last] for own in found if isinstance(own.get(last), int)]
        if second and found and first in found[0]:
            values.insert(0, found[0][first])
        if values and len(values) == len(found) + bool(second):
            yield read, values, where  # type: ignore[misc]

    def _of_branches(self, shapes: Shapes) -> Iterator[Equation]:
        """Yield (argument, value) for `if ARGUMENT:` whose branches make different parts.

        One branch must explain the tensors, and the other branch must not.
        """
        nodes = (inner for line in self._lines[0] for inner in ast.walk(line))
        for node in (each for each in nodes if isinstance(each, ast.If)):
            choice = _choice(node.test)
            if choice is None:
                continue
            sides = [self._made_in(node.body, shapes), self._made_in(node.orelse, shapes)]
            met = [
                all(share == 1 for share in side.values())
                and not any(shapes_below(shapes, name) for name in other.keys() - side.keys())
                for side, other in (sides, sides[::-1])
            ]
            name, yes, no = choice
            taken = yes if met[0] else no
            if met[0] != met[1] and taken is not None:
                made = listed(sorted({*sides[0], *sides[1]}))
                yield self.resolved(name), taken, made

    def _made_in(self, body: Sequence[ast.stmt], shapes: Shapes) -> dict[str, float]:
        """Return {attribute: the share of its tensors that its part explains} of a branch."""
        found: dict[str, float] = {}
        for line in (each for each in body if isinstance(each, ast.Assign)):
            for target in line.targets:
                if isinstance(target, ast.Attribute) and last_name(target.value) == "self":
                    part = self._assigned(target.attr, line.value)
                    below = shapes_below(shapes, target.attr)
                    if part.kind not in ("plain", "unknown"):
                        found[target.attr] = self._fit(part, below) / max(len(below), 1)
        return found

    def _fit(self, part: Part, shapes: Shapes) -> float:
        """Return how many tensors below a part it explains."""
        keys = {k: k.split(".") if k else [] for k in shapes}
        return sum(self.explained(keys[k], shape, part) for k, shape in shapes.items())

    def _of_part(self, part: Part, shapes: Shapes, where: str, depth: int) -> Iterator[Equation]:
        if part.kind == "module" and depth < 6 and part.call is not None:
            other = self.below(part)
            none = ast.Constant(None)  # an argument without a value has no known size
            given = {k: default or none for k, default in other.parameters.items()}
            given |= bound_arguments(part.call, list(given))
            for expression, value, place in other.equations(shapes, depth + 1):
                found = Substituted(given).visit(copy_of(expression))
                yield OuterNames(leave=True).visit(found), value, f"{where}.{place}"
        elif part.kind in ("indexed", "named"):
            indices = {key.partition(".")[0] for key in shapes}
            if part.count is not None and indices:
                numbers = all(k.isdigit() for k in indices)  # entries without tensors count too
                count = max(map(int, indices)) + 1 if numbers else len(indices)
                yield part.count, count, f"{where} (its length)"
            ordered = sorted(indices - part.parts.keys(), key=lambda k: k.zfill(9))
            after = [p for p in part.last if p.kind != "plain"]
            if part.over is not None:
                repeated = ordered[: len(ordered) - len(after)]
                yield from self._of_loop(part, repeated, shapes, where, depth)
            chosen = dict(part.parts)
            if ordered and part.repeated:
                below = shapes_below(shapes, ordered[0])
                chosen[ordered[0]] = max(part.repeated, key=lambda p: self._fit(p, below))
            if after and len(ordered) > 1:
                chosen[ordered[-1]] = after[-1]
            for name, inner in chosen.items():
                yield from self._of_part(
                    inner, shapes_below(shapes, name), f"{where}.{name}", depth
                )
        else:
            for node, value in (*sizes(part, shapes), *_flags(part, shapes)):
                yield node, value, where

    def tensors(self, shapes: Shapes) -> dict[str, Shape]:
        """Return the shapes of arguments that are tensors, such as pretrained embeddings.

        They are values of weights, arguments of from_pretrained, or buffers.
        """
        found: dict[str, Shape] = {}
        for target, value in self._every_assignment():
            owner, name = dotted_name(getattr(target, "value", target)) or "", ""
            if isinstance(value, ast.Call) and last_name(value.func) == "from_pretrained":
                name = f"{last_name(target)}.weight"
            elif isinstance(target, ast.Attribute) and owner.startswith("self."):
                parts = ast.unparse(target).removesuffix(".data").split(".")
                name = ".".join(parts[1:])
            while isinstance(value, ast.Call) and value.args:  # nn.Parameter(torch.tensor(NAME))
                value = value.args[0]
            argument = last_name(value)
            if argument in self.parameters and name in shapes:
                found[argument] = shapes[name]
        return found

    def _every_assignment(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        nodes = [inner for line in self._lines[0] for inner in ast.walk(line)]
        for node in nodes:
            if isinstance(node, ast.Assign):
                yield node.targets[0], node.value
            elif isinstance(node, ast.Call) and last_name(node.func) == "copy_" and node.args:
                yield getattr(node.func, "value", node), node.args[0]

    def share_of_counts(self, shapes: Shapes) -> float:
        """Return the share of lists with the same number of entries in class and checkpoint."""
        found = [1.0]
        for name, alternatives in self.parts.items():
            indices = {key.partition(".")[0] for key in shapes_below(shapes, name)}
            for part in alternatives:
                count = None if part.count is None else entry_of(part.count, self.given)
                if count is not None and indices:
                    found.append(float(count == len(indices)))
        return sum(found) / len(found)

    def resolved(self, expression: ast.expr) -> ast.expr:
        """Replace variables of `__init__` by their assigned values."""
        found = expression
        for _ in range(4):
            found = Substituted(self.names).visit(copy_of(found))
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
            key = key_of(node)
            read = last_name(node.value) if isinstance(node, ast.Attribute | ast.Subscript) else ""
            if key and read in parameters and id(node) not in methods:
                found.setdefault(read, set()).add(key)
            name = last_name(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name not in {*seen, self.name}:
                if not self.sources.is_module(name):
                    continue
                other = ModelClass(self.sources, name, self.depth + 1)
                given = bound_arguments(node, list(other.parameters))
                for inner, attributes in other._configs(seen | {self.name}).items():
                    passed = last_name(given[inner]) if inner in given else ""
                    if passed in parameters:
                        found.setdefault(passed, set()).update(attributes)
        return found


def _choice(test: ast.expr) -> tuple[ast.expr, Size | None, Size | None] | None:
    """Return an argument, and its values if a condition is true and if it is false.

    The values of `NAME == "relu"` are "relu" and None. Here None is an unknown value.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        found = _choice(test.operand)
        return None if found is None else (found[0], found[2], found[1])
    if dotted_name(test) is not None:
        return test, True, False
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and dotted_name(test.left):
        value = getattr(test.comparators[0], "value", None)
        if isinstance(value, bool | int | str) and isinstance(test.ops[0], ast.Eq | ast.Is):
            return test.left, value, not value if isinstance(value, bool) else None
    return None


def _is_length(node: ast.AST) -> bool:
    """Whether an expression is len(LIST)."""
    return isinstance(node, ast.Call) and last_name(node.func) == "len" and len(node.args) == 1


def _first(node: ast.expr, names: Mapping[str, ast.expr]) -> ast.expr | None:
    """Return the first entry of a list expression, or None if it is unknown."""
    found = entries_of(node, names, {})
    first = found[0].nodes[0] if found and found[0].nodes else None
    if isinstance(first, ast.Starred) and isinstance(first.value, ast.Call) and first.value.args:
        if last_name(first.value.func) in ("enumerate", "reversed"):
            return _first(first.value.args[0], names)
        return None
    return None if isinstance(first, ast.Starred) else first


def _length(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> ast.expr | None:
    """Return the number of entries of a list expression, or None if it is unknown."""
    node = names.get(dotted_name(node) or "", node)
    if isinstance(node, ast.List | ast.Tuple):
        return ast.Constant(len(node.elts))
    if depth < 4 and isinstance(node, ast.ListComp | ast.GeneratorExp):
        return _length(node.generators[0].iter, names, depth + 1)
    if depth < 4 and isinstance(node, ast.Call) and node.args:
        called = last_name(node.func)
        if called == "range" and len(node.args) < 3:
            start, end = node.args[0], node.args[-1]
            from_0 = len(node.args) == 1 or getattr(start, "value", None) == 0
            return end if from_0 else ast.BinOp(end, ast.Sub(), start)
        if called in ("enumerate", "reversed", "list", "ModuleList"):
            return _length(node.args[0], names, depth + 1)
    return None


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


def _has_values(call: ast.Call) -> bool:
    """Whether a call takes the values of a tensor: torch.tensor(x), torch.Tensor([gamma])."""
    name, first = last_name(call.func), next(iter(call.args), None)
    values = name in ("tensor", "as_tensor", "from_numpy", "full_like")
    return values or (name.endswith("Tensor") and isinstance(first, ast.Tuple | ast.List))


def sizes(part: Part, shapes: Shapes) -> Iterator[tuple[ast.expr, Size]]:
    """Yield (argument of a layer, its size), derived from the layer's tensors {name: shape}."""
    if part.call is None:
        return
    if part.kind == "parameter" and () not in shapes.values() and "" in shapes:
        made = next(iter(part.call.args), None)
        if isinstance(made, ast.Call) and not _has_values(made):
            arguments = list(made.args) or [k.value for k in made.keywords if k.arg == "size"]
            if len(arguments) == 1 and isinstance(arguments[0], ast.Tuple | ast.List):
                arguments = list(arguments[0].elts)
            if len(arguments) == len(shapes[""]):
                yield from zip(arguments, shapes[""], strict=True)
        return
    axes = _AXES.get(part.kind, {})
    options = {keyword.arg for keyword in part.call.keywords}
    if "Conv" in part.kind and not {"groups", None} & options and len(part.call.args) < _GROUPS:
        axes = {name: 1 if axis < 0 else axis for name, axis in axes.items()}  # one group
    given = bound_arguments(part.call, list(axes) or _TRANSFORMERS.get(part.kind, ()))
    for name, node in given.items():
        size = _size(part.kind, axes.get(name, -1), name, shapes)
        if size is not None and isinstance(node, ast.Tuple):  # the sides of a kernel
            yield from zip(node.elts, shapes.get("weight", ())[2:], strict=False)
        elif size is not None:
            yield node, size


def _flags(part: Part, shapes: Shapes) -> Iterator[tuple[ast.expr, bool]]:
    """Yield (argument of a layer, whether it is set), derived from the names of its tensors."""
    keywords = part.call.keywords if part.call is not None and part.kind in _AXES else ()
    for keyword in keywords:
        if keyword.arg in _FLAGS and "weight" in {key.partition("_ih_")[0] for key in shapes}:
            yield keyword.value, any(_FLAGS[keyword.arg] in key for key in shapes)


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


def _agrees(node: ast.expr, size: Size) -> bool:
    """Whether an argument can have this size: a literal must have the same value."""
    with suppress(ValueError):
        value = ast.literal_eval(node)
        return not isinstance(value, int) or value == size
    return True


def entry_of(node: ast.expr, given: Mapping[str, ast.expr]) -> int | None:
    """Return the integer NAME, or NAME[K] for a list of integers NAME in `given`, or None."""
    with suppress(ValueError, TypeError, IndexError, KeyError):
        if isinstance(node, ast.Subscript):
            found = ast.literal_eval(given[last_name(node.value)])[ast.literal_eval(node.slice)]
        else:
            found = ast.literal_eval(given[last_name(node)])
        return found if isinstance(found, int) else None
    return None


def shapes_below(shapes: Shapes, name: str) -> dict[str, Shape]:
    """Return the shapes of the keys below a name; the tensor with exactly this name has key ""."""
    start = f"{name}."
    found = {key[len(start) :]: shape for key, shape in shapes.items() if key.startswith(start)}
    return found | ({"": shapes[name]} if name in shapes else {})
