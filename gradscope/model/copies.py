"""Deep copies of a model that do not use the model: functions with references to it are copied.

`copy.deepcopy` returns functions uncopied. So a copied module with a function over its own
submodules, such as `self.mlp = lambda x: self.down(self.up(x))`, would still use the parameters of
the original.
"""

import copy
import functools
import gc
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor, nn

from gradscope.errors import RefusedError

T = TypeVar("T")

_MOST = 50_000  # objects that are searched behind one function, at most
_Cached = type(functools.lru_cache(id))
_CALLED = (types.FunctionType, types.MethodType, functools.partial, _Cached, weakref.ref)
_SKIPPED = (type, types.ModuleType, types.CodeType)


def deep_copy(model: nn.Module, memo: Mapping[int, Any]) -> tuple[nn.Module, "Copies"]:
    """Return a deep copy of a model, and a `Copies` for other objects that refer to the model.

    Args:
        model: Any module. Exceptions of its copy methods are raised.
        memo: Copies of its parts by id, as for `copy.deepcopy`.

    Raises:
        RefusedError: The copy shares a parameter or a buffer with the model.
    """
    known: dict[Any, Any] = {**memo}
    for module in model.modules():  # most are dicts of hooks; `copy` takes long for each
        known |= {id(v): OrderedDict() for v in vars(module).values() if _is_empty(v)}
    made = copy.deepcopy(model, known)
    own = {id(t): name for name, t in _tensors(model)}
    for _, t in _tensors(made):
        if id(t) in own:
            raise RefusedError(
                f"a deep copy of the model shares {own[id(t)]!r} with the model",
                remedy="Make __deepcopy__ return copies of all tensors, or turn verification off.",
            )
    copies = Copies(known)
    copies.complete()
    return made, copies


def graph_leaves(value: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of a tensor's graph."""
    seen, waiting = set[Any](), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        waiting += [edge for edge, _ in node.next_functions]


def _is_empty(value: Any) -> bool:
    return type(value) is OrderedDict and not value


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


class Copies:
    """The copies that `copy.deepcopy` made, extended by copied functions and references.

    Args:
        memo: The memo of `copy.deepcopy`: the copy of each object by the object's id.
    """

    def __init__(self, memo: dict[Any, Any]) -> None:
        self._copies = {
            k: v
            for k, v in memo.items()
            # objects that cannot be changed in place are copied again, with their contents
            if type(k) is int and k != id(memo) and not isinstance(v, (*_CALLED, tuple))
        }
        self._made = {id(value) for value in self._copies.values()}
        self._kept: list[Any] = [memo]  # keep objects alive whose ids are keys

    @property
    def modules(self) -> list[nn.Module]:
        """The copied modules, including modules that no other module has registered."""
        return [value for value in self._copies.values() if isinstance(value, nn.Module)]

    def complete(self) -> None:
        """Store copied functions and references in the copied modules, objects and containers."""
        for holder in [*self._copies.values()]:
            if isinstance(holder, dict):
                self._replace(holder, holder.items())
            elif isinstance(holder, list | deque):
                self._replace(holder, enumerate(holder))
            if hasattr(holder, "__dict__") and not isinstance(holder, _SKIPPED):
                self._replace(vars(holder), vars(holder).items())

    def _replace(self, holder: Any, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in [*items]:
            if isinstance(value, (*_CALLED, tuple)) and (found := self.of(value)) is not value:
                holder[key] = found

    def of(self, value: T) -> T:
        """Return a value, or a copy of it if it leads to originals."""
        found: T = self._copies.get(id(value), value)
        if found is value and self._leads(value):
            with suppress(Exception):  # copying runs the user's code
                found = self._keep(value, self._copy(value))
        return found

    def _keep(self, value: Any, found: T) -> T:
        self._kept.append(value)
        self._copies[id(value)] = found
        self._made.add(id(found))
        return found

    def _leads(self, value: Any) -> bool:
        """Whether an object refers to an original, directly or through uncopied objects."""
        seen: set[int] = set()
        waiting: list[Any] = [value]
        while waiting and len(seen) < _MOST:
            one = waiting.pop()
            if id(one) in self._copies:
                return True
            if id(one) in seen or id(one) in self._made or isinstance(one, _SKIPPED):
                continue
            seen.add(id(one))
            if isinstance(one, types.FunctionType):
                waiting += [one.__closure__, one.__defaults__, one.__kwdefaults__, vars(one)]
            else:
                waiting += [one()] if type(one) is weakref.ref else gc.get_referents(one)
        return False

    def _copy(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, _Cached):
            return functools.lru_cache(**value.cache_parameters())(self.of(value.__wrapped__))
        if type(value) is weakref.ref:
            return weakref.ref(self.of(value()))
        if isinstance(value, functools.partial):
            keywords = {k: self.of(v) for k, v in value.keywords.items()}
            return type(value)(self.of(value.func), *map(self.of, value.args), **keywords)
        if isinstance(value, tuple):
            parts = [*map(self.of, value)]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return self._shallow(value)

    def _shallow(self, value: Any) -> Any:
        """Return a copy of a container or object; its values are copied only if they need to be."""
        if hasattr(value, "__deepcopy__"):
            return value
        found = self._keep(value, copy.copy(value))
        if isinstance(value, dict):
            found.update({k: self.of(v) for k, v in value.items()})
        elif isinstance(value, list | deque):
            found.clear()
            found.extend(map(self.of, value))
        elif isinstance(value, set):
            found.clear()
            found.update(map(self.of, value))
        if hasattr(value, "__dict__"):
            vars(found).update({k: self.of(v) for k, v in vars(value).items()})
        return found

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        cells = [self._cell(cell) for cell in fn.__closure__ or ()]
        closure = tuple(cells) if cells else None
        found = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, closure)
        self._keep(fn, found)  # its own cells may contain it
        for cell, own in zip(fn.__closure__ or (), cells, strict=True):
            if own is not cell:
                own.cell_contents = self.of(cell.cell_contents)
        found.__defaults__ = self.of(fn.__defaults__)
        found.__kwdefaults__ = None if fn.__kwdefaults__ is None else {**self.of(fn.__kwdefaults__)}
        vars(found).update({k: self.of(v) for k, v in vars(fn).items()})
        for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
            setattr(found, name, getattr(fn, name))
        return found

    def _cell(self, cell: types.CellType) -> types.CellType:
        """Return a cell that is filled later; functions that share a cell share its copy."""
        if not self._leads(cell):
            return cell
        known = self._copies.get(id(cell))
        return self._keep(cell, types.CellType()) if known is None else known
