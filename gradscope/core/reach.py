"""Everything with values that a model or a loss can reach, as tables that can be read and written.

Modules and plain objects, lists, dicts and sets, closures, function attributes, class attributes,
random generators, and the globals that the user's own functions name. Code of Python, torch,
installed packages and gradscope is taken to keep nothing.
"""

import enum
import functools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Items = dict[Any, Any]
Named = tuple[Any, str]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MOST = 50_000  # objects that are looked at
_SKIPPED = (*PLAIN, types.BuiltinFunctionType, enum.Enum, Path, np.ndarray)
_SKIPPED_FROM = ("logging", "threading", "weakref", "io", "_io", "concurrent", "multiprocessing")
_FOREIGN = (
    *(sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)


@dataclass(frozen=True, eq=False)
class Table:
    """Something that holds values by key.

    Attributes:
        name: What a reader knows it by.
        read: Returns the values, in order.
        write: Makes these the values.
    """

    name: str
    read: Callable[[], Items]
    write: Callable[[Items], object]

    def named(self, key: Any) -> str:
        """Return the name of a value; torch's own tables of a module are left out."""
        usual = key in ("_modules", "_parameters", "_buffers", "cell_contents")
        return self.name if usual else f"{self.name}.{key}"


def reachable(roots: Iterable[Named], own: Iterable[Tensor]) -> Iterator[tuple[Hashable, Table]]:
    """Yield every table that can be reached from `roots`, each once, under a lasting key.

    Args:
        roots: Objects and their names.
        own: Parameters and buffers, of which only attributes and flags are looked at.
    """
    known = {id(t) for t in own}
    waiting = deque(roots)
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MOST:
        value, name = waiting.popleft()
        foreign = type(value).__module__.partition(".")[0] in _SKIPPED_FROM
        if id(value) in seen or foreign or isinstance(value, _SKIPPED):
            continue
        seen[id(value)] = value  # so that no other object gets its id
        if isinstance(value, Tensor) and id(value) not in known:
            continue
        tables, more = _looked_into(value, name)
        for k, table in enumerate(tables):
            yield (id(value), k), table
            waiting.extend((v, table.named(key)) for key, v in table.read().items())
        waiting.extend(more)


def _looked_into(value: Any, name: str) -> tuple[list[Table], list[Named]]:
    """Return the tables of one object, and what else it leads to."""
    if isinstance(value, dict):
        return [namespace(value, name)], []
    if isinstance(value, list | deque | bytearray):
        return [_sequence(value, name)], []
    if isinstance(value, set):
        return [_set(value, name)], []
    if isinstance(value, tuple | frozenset):
        return [], [(v, name) for v in value]
    if isinstance(value, types.ModuleType):
        return ([namespace(vars(value), value.__name__)] if _is_users_module(value) else []), []
    if isinstance(value, types.FunctionType):
        return _of_function(value, name)
    if isinstance(value, types.MethodType):
        return [], [(value.__self__, name), (value.__func__, name)]
    if isinstance(value, staticmethod | classmethod):
        return [], [(value.__func__, name)]
    if isinstance(value, property):
        return [], [(value.fget, name)]
    if isinstance(value, functools.partial):
        return [], [(v, name) for v in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, functools._lru_cache_wrapper):
        return [_memory(value, name)], [(value.__wrapped__, name)]
    if isinstance(value, type):
        return _of_class(value), []
    if isinstance(value, torch.Generator | random.Random | np.random.Generator):
        return [_generator(value, name)], []
    tables = [_flag(value, name)] if isinstance(value, Tensor) else []
    if isinstance(getattr(value, "__dict__", None), dict):
        tables.append(namespace(vars(value), name))
    slots = [s for base in type(value).__mro__ for s in _slots(base)]
    return [*tables, _attributes(value, slots, name)], [(type(value), type(value).__name__)]


def namespace(values: dict[Any, Any], name: str) -> Table:
    """Return a dict as a table."""

    def write(wanted: Items) -> None:
        if list(values) != list(wanted):
            values.clear()
        values.update(wanted)

    return Table(name, lambda: dict(values), write)


def _sequence(values: Any, name: str) -> Table:
    def write(wanted: Items) -> None:
        values.clear()
        values.extend(wanted.values())

    return Table(name, lambda: dict(enumerate(values)), write)


def _set(values: set[Any], name: str) -> Table:
    def write(wanted: Items) -> None:
        values.clear()
        values.update(wanted)

    return Table(name, lambda: dict.fromkeys(values), write)


def _attributes(owner: Any, names: list[str], name: str) -> Table:
    """Some attributes of an object; which of them exist may change."""

    def read() -> Items:
        return {k: getattr(owner, k) for k in names if hasattr(owner, k)}

    def write(wanted: Items) -> None:
        for key in names:
            if key in wanted:
                setattr(owner, key, wanted[key])
            elif hasattr(owner, key):
                delattr(owner, key)

    return Table(name, read, write)


def _cell(cell: types.CellType, name: str) -> Table:
    """A variable of a function around the one that names it."""

    def read() -> Items:
        try:
            return {"cell_contents": cell.cell_contents}
        except ValueError:  # it has no value (yet)
            return {}

    def write(wanted: Items) -> None:
        if wanted:
            cell.cell_contents = wanted["cell_contents"]
        else:
            del cell.cell_contents

    return Table(name, read, write)


def _flag(t: Tensor, name: str) -> Table:
    return Table(
        name,
        lambda: {"requires_grad": t.requires_grad},
        lambda wanted: t.requires_grad_(wanted["requires_grad"]),
    )


def _memory(fn: Any, name: str) -> Table:
    """What a function remembers of earlier calls: it is not put back, but forgotten."""
    return Table(name, lambda: {"calls": fn.cache_info().misses}, lambda _: fn.cache_clear())


def _generator(source: Any, name: str) -> Table:
    """A random generator of the model's own."""
    states: dict[str, Any] = {}

    def state() -> Any:
        if isinstance(source, torch.Generator):
            return source.get_state().tolist()
        return (
            source.getstate() if isinstance(source, random.Random) else source.bit_generator.state
        )

    def read() -> Items:
        found = state()
        states[repr(found)] = found
        return {"state": repr(found)}

    def write(wanted: Items) -> None:
        found = states[wanted["state"]]
        if isinstance(source, torch.Generator):
            source.set_state(torch.tensor(found, dtype=torch.uint8))
        elif isinstance(source, random.Random):
            source.setstate(found)
        else:
            source.bit_generator.state = found

    return Table(name, read, write)


def _of_function(fn: types.FunctionType, name: str) -> tuple[list[Table], list[Named]]:
    """What a function of the user's own keeps or names."""
    if not _is_users(fn.__code__.co_filename):
        return [], []
    cells = [
        _cell(cell, f"{name}.{variable}")
        for cell, variable in zip(fn.__closure__ or (), fn.__code__.co_freevars, strict=True)
    ]
    names = sorted(_names(fn.__code__) & fn.__globals__.keys())
    named = Table(
        fn.__module__ or "global",
        lambda: {k: fn.__globals__[k] for k in names if k in fn.__globals__},
        fn.__globals__.update,
    )
    more = (fn.__defaults__, fn.__kwdefaults__, getattr(fn, "__wrapped__", None))
    return [*cells, namespace(vars(fn), name), named], [(v, name) for v in more]


def _of_class(kind: type) -> list[Table]:
    """The attributes and methods of a class, where it is the user's own."""
    modules = ((base, sys.modules.get(base.__module__)) for base in kind.__mro__)
    return [
        _class_attributes(base)
        for base, module in modules
        if module is None or module.__name__ == "__main__" or _is_users_module(module)
    ]


def _class_attributes(kind: type) -> Table:
    def read() -> Items:
        return {k: v for k, v in vars(kind).items() if not (k[:2] == k[-2:] == "__")}

    def write(wanted: Items) -> None:
        for key in read().keys() - wanted.keys():
            delattr(kind, key)
        for key, value in wanted.items():
            if vars(kind).get(key) is not value:
                setattr(kind, key, value)

    return Table(kind.__name__, read, write)


def _slots(base: type) -> list[str]:
    own = vars(base).get("__slots__", ())
    return [s for s in ([own] if isinstance(own, str) else own) if not s.startswith("__")]


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function and those written inside it use."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_users_module(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return _is_users(file) if file else module.__spec__ is None  # made by hand


@functools.cache
def _is_users(file: str | None) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor ours."""
    if file is None or file.startswith("<frozen"):
        return False
    return not any(file.startswith(folder) for folder in _FOREIGN)
