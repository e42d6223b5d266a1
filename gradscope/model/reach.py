"""All values that a model or a loss can reach, as tables that can be read and written.

They are in modules and plain objects, lists, dicts and sets, closures, attributes of functions and
classes, random generators, and the globals that the user's own functions use. Code of Python,
torch, installed packages and gradscope counts as stateless. Objects that measure a model are not
part of its state, although the model may lead to them (by its trainer).
"""

import enum
import functools
import pickle
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradscope.model.locate import is_installed

Items = dict[Any, Any]
Named = tuple[Any, str]
Found = tuple[list["StateTable"], list[Named]]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST = 50_000  # objects that are searched, at most
_SKIPPED = (*PLAIN, types.BuiltinFunctionType, enum.Enum, Path, np.ndarray)
_SKIPPED_FROM = ("logging", "threading", "weakref", "io", "_io", "concurrent", "multiprocessing")
_OWN = tuple(f"gradscope.{part}" for part in ("scope", "engine", "training", "model.state"))


class StateTable:
    """A container of values by key, with a name for messages."""

    __slots__ = ("name", "read", "write")

    def __init__(
        self, name: str, read: Callable[[], Items], write: Callable[[Items], object]
    ) -> None:
        self.name, self.read, self.write = name, read, write  # the values are in order

    def name_of(self, key: Any) -> str:
        """Return the name of a value; names of torch's own tables in a module are omitted."""
        usual = key in ("_modules", "_parameters", "_buffers", "cell_contents")
        return self.name if usual else f"{self.name}.{key}"


def every_module(model: nn.Module) -> list[nn.Module]:
    """Return what `model.modules()` yields, without names: they take most of its time."""
    found: dict[nn.Module, None] = {}
    stack = [model]
    while stack:
        module = stack.pop()
        if module not in found:
            found[module] = None
            inner = [m for m in module._modules.values() if m is not None]
            stack += reversed(inner)
    return [*found]


def reachable(
    roots: Iterable[Named], own: Iterable[Tensor]
) -> Iterator[tuple[Hashable, StateTable]]:
    """Yield every table that can be reached from named objects, each once, with a lasting key.

    For the model's `own` tensors, attributes and flags are searched; other tensors are skipped.
    """
    known = {id(t) for t in own}
    waiting = deque(roots)
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MOST:
        value, name = waiting.popleft()
        home = getattr(type(value), "__module__", "")
        home = home if isinstance(home, str) else ""  # a descriptor in some wrapper classes
        foreign = home.partition(".")[0] in _SKIPPED_FROM or home.startswith(_OWN)
        if id(value) in seen or foreign or isinstance(value, _SKIPPED):
            continue
        seen[id(value)] = value  # keeps the object alive, so that its id stays unique
        if isinstance(value, Tensor) and id(value) not in known:
            continue
        tables, more = _looked_into(value, name)
        for k, table in enumerate(tables):
            yield (id(value), k), table
            values = table.read().items()
            waiting.extend((v, table.name_of(key)) for key, v in values if type(v) not in PLAIN)
        waiting.extend(more)


def _looked_into(value: Any, name: str) -> Found:
    """Return the tables of one object, and further objects that it leads to."""
    match value:
        case dict():
            return [_Namespace(value, name)], []
        case list() | deque() | bytearray():
            return [_refilled(value, name, lambda: dict(enumerate(value)))], []
        case set():
            return [_refilled(value, name, lambda: dict.fromkeys(value))], []
        case tuple() | frozenset():
            return [], [(v, name) for v in value]
        case types.ModuleType():
            users = _is_users_module(value)
            return [_Namespace(vars(value), value.__name__)] if users else [], []
        case types.FunctionType():
            return _of_function(value, name)
        case types.MethodType():
            return [], [(value.__self__, name), (value.__func__, name)]
        case staticmethod() | classmethod():
            return [], [(value.__func__, name)]
        case property():
            return [], [(value.fget, name)]
        case functools.partial():
            return [], [(v, name) for v in (value.func, *value.args, *value.keywords.values())]
        case functools._lru_cache_wrapper():  # the cache is not restored, but cleared
            calls = lambda: {"calls": value.cache_info().misses}  # noqa: E731
            return [StateTable(name, calls, lambda _: value.cache_clear())], [
                (value.__wrapped__, name)
            ]
        case type():
            return _of_class(value), []
        case torch.Generator() | random.Random() | np.random.Generator():
            return [_generator(value, name)], []
    return _of_object(value, name)


class _Namespace(StateTable):
    """A dict. There are many, so one object of Python is made for each."""

    __slots__ = ("name", "values")

    def __init__(self, values: dict[Any, Any], name: str) -> None:
        self.values, self.name = values, name

    def read(self) -> Items:
        if type(self.values) is dict:
            return dict(self.values)
        # a user's class may compute what its methods return
        kind = OrderedDict if isinstance(self.values, OrderedDict) else dict
        return dict(kind.items(self.values))

    def write(self, wanted: Items) -> None:
        kind = OrderedDict if isinstance(self.values, OrderedDict) else dict
        if list(self.read()) != list(wanted):
            kind.clear(self.values)
        for key, value in wanted.items():
            kind.__setitem__(self.values, key, value)


def _refilled(values: Any, name: str, read: Callable[[], Items]) -> StateTable:
    """A list or a set, which is emptied and filled again."""

    def write(wanted: Items) -> None:
        values.clear()
        if isinstance(values, set):
            values.update(wanted)
        else:
            values.extend(wanted.values())

    return StateTable(name, read, write)


def _of_object(value: Any, name: str) -> Found:
    """A plain object: its attributes, its class, and whether it requires a gradient."""
    tables = []
    if isinstance(value, Tensor):
        flag = lambda: {"requires_grad": value.requires_grad}  # noqa: E731
        tables.append(
            StateTable(name, flag, lambda now: value.requires_grad_(now["requires_grad"]))
        )
    if isinstance(getattr(value, "__dict__", None), dict):
        tables.append(_Namespace(vars(value), name))
    slots, of_class = _slots(type(value)), [(type(value), type(value).__name__)]
    if not slots:
        return tables, of_class

    def read() -> Items:
        return {k: getattr(value, k) for k in slots if hasattr(value, k)}

    def write(wanted: Items) -> None:
        for key in slots:
            if key in wanted:
                setattr(value, key, wanted[key])
            elif hasattr(value, key):
                delattr(value, key)

    return [*tables, StateTable(name, read, write)], of_class


def _generator(source: Any, name: str) -> StateTable:
    """A random generator of the model; its state as bytes, which can be compared."""

    def read() -> Items:
        if isinstance(source, torch.Generator):
            return {"state": source.get_state().numpy().tobytes()}
        python = isinstance(source, random.Random)
        return {"state": pickle.dumps(source.getstate() if python else source.bit_generator.state)}

    def write(wanted: Items) -> None:
        state = wanted["state"]
        if isinstance(source, torch.Generator):
            source.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        elif isinstance(source, random.Random):
            source.setstate(pickle.loads(state))
        else:
            source.bit_generator.state = pickle.loads(state)

    return StateTable(name, read, write)


def _of_function(fn: types.FunctionType, name: str) -> Found:
    """The values that a function of the user stores or uses."""
    if not _is_users(fn.__code__.co_filename):
        return [], []
    cells = [
        _cell(cell, f"{name}.{variable}")
        for cell, variable in zip(fn.__closure__ or (), fn.__code__.co_freevars, strict=True)
    ]
    names = sorted(_names(fn.__code__) & fn.__globals__.keys())
    named = StateTable(
        fn.__module__ or "global",
        lambda: {k: fn.__globals__[k] for k in names if k in fn.__globals__},
        fn.__globals__.update,
    )
    more = (fn.__defaults__, fn.__kwdefaults__, getattr(fn, "__wrapped__", None))
    return [*cells, _Namespace(vars(fn), name), named], [(v, name) for v in more]


def _cell(cell: types.CellType, name: str) -> StateTable:
    """A variable of an enclosing function; it may have no value (yet)."""

    def read() -> Items:
        try:
            return {"cell_contents": cell.cell_contents}
        except ValueError:
            return {}

    def write(wanted: Items) -> None:
        if wanted:
            cell.cell_contents = wanted["cell_contents"]
        else:
            del cell.cell_contents

    return StateTable(name, read, write)


def _of_class(kind: type) -> list[StateTable]:
    """The attributes and methods of a class, if it is the user's own."""
    modules = ((base, sys.modules.get(base.__module__)) for base in kind.__mro__)
    return [
        _class_attributes(base)
        for base, module in modules
        if module is None or module.__name__ == "__main__" or _is_users_module(module)
    ]


def _class_attributes(kind: type) -> StateTable:
    def read() -> Items:
        return {k: v for k, v in vars(kind).items() if not (k[:2] == k[-2:] == "__")}

    def write(wanted: Items) -> None:
        for key in read().keys() - wanted.keys():
            delattr(kind, key)
        for key, value in wanted.items():
            if vars(kind).get(key) is not value:
                setattr(kind, key, value)

    return StateTable(kind.__name__, read, write)


def _slots(kind: type) -> list[str]:
    own = [vars(base)["__slots__"] for base in kind.__mro__ if "__slots__" in vars(base)]
    names = (s for slots in own for s in ([slots] if isinstance(slots, str) else slots))
    return [s for s in names if not s.startswith("__")]


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function and its inner functions use."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_users_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return _is_users(file) if file else module.__spec__ is None  # created by hand


@functools.cache
def _is_users(file: str | None) -> bool:
    """Whether a file belongs neither to Python, nor to an installed package, nor to gradscope."""
    if file is None or file.startswith("<frozen"):
        return False
    path = Path(file)
    return not path.is_absolute() or not is_installed(path)  # a notebook's cell has no path
