"""The state that a model carries between forward passes: detected, and restored every time.

A counter, a cache or a running mean would make a result depend on earlier calls of the model. So
each forward pass begins with the state of the caller's model. The contents of its modules are
restored after every evaluation. For a proof, everything that the model and the loss can reach is
compared. Changed values are restored from then on. Changes that cannot be undone raise an error
that names them. Buffers are not handled here: forward passes get copies.
"""

import copy
import itertools
import operator
import sys
import types
import warnings
import weakref
import zlib
from collections.abc import Callable, Container, Generator, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradscope.core.batch import tensors
from gradscope.core.precision import doubled
from gradscope.errors import GradscopeError, UnsupportedError
from gradscope.model.control import step_by_step
from gradscope.model.kernels import patched_kernels
from gradscope.model.randomness import FixedRandomness, forked, random_numbers_kept, states
from gradscope.model.reach import PLAIN, Items, StateTable, every_module, reachable

_CheckpointedPart = Generator[None, None, None]  # runs a checkpointed part of a model
_COPIED = 2**24  # bytes of a value; larger values are not copied
_ROOM = 2**28  # bytes of all copied parameters: less than a second model
_READ = 2**28  # bytes of a value; larger values are not compared bit by bit
_COMPARED = 2**16  # values per recomputed tensor that are compared, at most
_USUAL = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ITERATORS: tuple[type, ...] = (
    *map(type, (iter([]), iter(()), iter(range(1)), iter(""), iter(set()))),
    *(enumerate, zip, map, reversed),
    *(itertools.cycle, itertools.count, itertools.chain, itertools.repeat, itertools.islice),
)


@dataclass(eq=False)
class _Snapshot:
    """An earlier state of a table."""

    table: StateTable
    items: Items  # its values (the objects, not copies)
    marks: Items  # copies or fingerprints, to detect changes in place
    copies: Items  # copies of the values that can be restored

    def put(self, wanted: Items) -> None:
        """Restore these values in the table."""
        now = self.table.read()
        if list(now) != list(wanted) or any(now[k] is not v for k, v in wanted.items()):
            self.table.write(wanted)

    def changed(self) -> tuple[bool, set[Hashable]]:
        """Return whether the table has other values, and the keys of values changed in place."""
        now = self.table.read()
        moved = list(now) != list(self.items)
        moved = moved or not all(_same(now[k], v) for k, v in self.items.items())
        return moved, {k for k, mark in self.marks.items() if _differs(self.items[k], mark)}

    def repair(self, keys: set[Hashable]) -> list[str]:
        """Undo changes in place; return the names of values that cannot be restored."""
        other = set()  # tensors of another shape: what belongs to a tensor may have changed, too
        for key in keys & self.copies.keys():
            value, before = self.items[key], self.copies[key]
            if isinstance(value, Tensor) and value.shape != before.shape:
                other.add(key)
            elif isinstance(value, Tensor):
                value.data.copy_(before)
            elif isinstance(value, np.ndarray):
                value[...] = before
            else:
                self.items[key] = before
        lost = {k for k in keys if k not in self.copies or isinstance(self.items[k], nn.Parameter)}
        lost |= other
        return sorted(map(self.table.name_of, lost))

    def replaceable(self, keys: set[Hashable]) -> set[Hashable]:
        """Return the keys whose values can be replaced by copies during a forward pass."""
        return {k for k in keys & self.copies.keys() if not isinstance(self.items[k], nn.Parameter)}


class ModelState:
    """The state of a model and its loss.

    Attributes:
        fixed: Draws random numbers that are fixed for each sample, or None.
        latest: The name of the last value that was seen to change.
        drew: Whether a forward pass has used torch's generators.
        untrained: Whether a checkpointed part gets no gradient for its parameters in training.
        mistaken: Whether torch alone would have misread a gradient (see `gradscope.model.kernels`).
    """

    def __init__(self, model: nn.Module, loss: Any, fixed: FixedRandomness | None = None) -> None:
        self._model, self._loss, self.randomness = model, loss, fixed
        self.drew = self.untrained = self.mistaken = False
        self.latest = ""
        # tables, each with the keys of values that change in place
        self._changing: dict[Hashable, tuple[StateTable, set[Hashable]]] = {}
        self._before: tuple[_Contents, list[_Snapshot]] | None = None
        self._unused = False  # whether no inner use of `restoring` has begun since `_before`
        self._parts: list[weakref.ref[_CheckpointedPart]] = []

    @property
    def change_count(self) -> int:
        """The number of values that forward passes change and that are restored each time."""
        return sum(1 + len(keys) for _, keys in self._changing.values())

    @contextmanager
    def noticing(self, device: torch.device) -> Iterator[None]:
        """Restore torch's generators after the body, and detect whether the body uses them.

        These are the generators of the CPU and of a device.
        """
        reads = states(device)
        if len(reads) > 1:
            with forked(device):
                before = [read() for read in reads]
                yield
                changed = any(not torch.equal(a, r()) for a, r in zip(before, reads, strict=True))
        else:
            (read,) = reads
            own, changed = read(), True
            try:
                yield
            finally:
                changed = not torch.equal(own, read())
                if changed:
                    torch.set_rng_state(own)
        self.drew |= changed and self.randomness is None

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore what the body changes; an inner use begins with the state of the outer use.

        Backward passes belong inside the body, because they may recompute code. In the body, the
        model runs as written; see `_as_written`.
        """
        if self._before is not None:
            if not self._unused:
                self._begin()
            self._unused = False
            yield
            return
        fixed = nullcontext() if self.randomness is None else self.randomness.active(self._model)
        with self._as_written(), fixed:
            yield from self._restore_after()

    def _restore_after(self) -> Iterator[None]:
        contents = _Contents(self._model)
        self._before = contents, [_snapshot(*found) for found in self._changing.values()]
        try:
            if self._changing:
                self._begin()
            self._unused = True
            yield
        finally:
            contents.put_back()
            for taken in reversed(self._before[1]):  # the first snapshots have the original state
                taken.put(taken.items)
            self._before = None

    def _begin(self) -> None:
        assert self._before is not None
        self._end_parts()
        self._before[0].put_back()
        for taken in self._before[1]:
            fresh = {key: _copy(value) for key, value in taken.copies.items()}
            taken.put({**taken.items, **fresh})

    @contextmanager
    def _as_written(self) -> Iterator[None]:
        """Make compiled code and checkpointed code record their own operations.

        Code compiled by `torch.compile` runs as written: compiled, it records a single operation
        that hides the samples. Reentrant activation checkpointing does not support gradients by
        chosen tensors, so it is replaced by the non-reentrant kind, which computes the same values.
        Control flow by functions runs step by step, and wrong kernels of torch are corrected.
        """
        own = checkpointing.CheckpointFunction
        part = checkpointing._checkpoint_without_reentrant_generator
        try:
            checkpointing.CheckpointFunction = types.SimpleNamespace(  # type: ignore[misc,assignment]
                apply=self._checkpointed
            )
            checkpointing._checkpoint_without_reentrant_generator = partial(self._start_part, part)
            with _eager(), step_by_step(), patched_kernels(self._note_mistake):
                yield
        finally:
            checkpointing.CheckpointFunction = own  # type: ignore[misc]
            checkpointing._checkpoint_without_reentrant_generator = part
            self._end_parts()

    def _note_mistake(self) -> None:
        self.mistaken = True

    def _start_part(
        self, part: Callable[..., _CheckpointedPart], *args: Any, **kwargs: Any
    ) -> _CheckpointedPart:
        made = part(*args, **kwargs)
        self._parts.append(weakref.ref(made))
        return made

    def _end_parts(self) -> None:
        """End the checkpointed parts in which a forward pass has failed.

        Before torch 2.13, they intercept saved tensors of other code until the exception is
        released.
        """
        while self._parts:
            made = self._parts.pop()()
            if made is not None:
                made.close()

    def _checkpointed(self, run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Return the result of `run`, which runs again in the backward pass."""
        found = checkpointing.checkpoint(
            run, *args, use_reentrant=False, preserve_rng_state=preserve
        )
        if not any(isinstance(a, Tensor) and a.requires_grad for a in args):
            self.untrained |= any(t.requires_grad for t in tensors(found))
        return found

    @contextmanager
    def watching(self, *, again: bool = False) -> Iterator[None]:
        """Search everywhere for changes by the body; undo them, now and in later evaluations.

        The global random generators of Python and NumPy are also restored. Values recomputed by
        activation checkpointing are compared with the original values.

        Raises:
            UnsupportedError: A change cannot be undone, or a recomputed value differs.
        """
        own = [*self._model.parameters(), *self._model.buffers()]
        roots = [(self._model, "model"), (self._loss, "loss")]
        # changes by earlier passes of the outer body are not the state
        if self._before is not None:
            self._begin()
        known = {id(p): p._version for p in own} if again else {}
        room = [_ROOM]
        tables = reachable(roots, own)
        before = {key: _snapshot(table, but=known, room=room) for key, table in tables}
        generators = {
            value.gi_frame: taken.table.name_of(key)
            for taken in before.values()
            for key, value in taken.items.items()
            if isinstance(value, types.GeneratorType) and value.gi_frame is not None
        }
        try:
            with random_numbers_kept(), _recomputed(), _resumed(generators) as advanced:
                yield
            named = self._model.named_parameters()
            written = [k for k, p in named if known.get(id(p), p._version) != p._version]
            if advanced or written:
                raise _changed([*sorted(advanced), *written])
        except BaseException as error:
            lost = self._learn(before)
            if lost and isinstance(error, GradscopeError):
                raise _changed(lost) from error
            raise
        lost = self._learn(before)
        if lost:
            raise _changed(lost)

    def _learn(self, before: dict[Hashable, _Snapshot]) -> list[str]:
        """Undo and store the changes; return the names of values that cannot be restored."""
        lost: list[str] = []
        for key, taken in before.items():
            if not (taken.items or taken.table.read()):  # true for almost all hooks
                continue
            moved, in_place = taken.changed()
            if moved or in_place:
                lost += taken.repair(in_place)
                self.latest = taken.table.name
                known = self._changing.setdefault(key, (taken.table, set()))[1]
                known |= taken.replaceable(in_place)
            taken.put(taken.items)
            if (moved or in_place) and self._before is not None:
                self._before[1].append(_snapshot(*self._changing[key]))
        return lost


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled code as written, including code that the body is the first to compile."""
    own = torch.compile
    with ExitStack() as stack:

        def eager() -> None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))

        def first(*args: Any, **kwargs: Any) -> Any:
            torch.compile = own
            eager()
            return own(*args, **kwargs)

        try:
            if "torch._dynamo" in sys.modules:
                eager()
            else:  # loading dynamo takes seconds, and nothing has been compiled
                torch.compile = first
            yield
        finally:
            torch.compile = own


class _SavedTensor:
    """A tensor saved in activation checkpointing, for comparison with its recomputation.

    torch compares shapes and dtypes. Values also show a different start of the recomputation:
    random generators of Python, NumPy or the model, or a counter.
    """

    def __init__(self, x: Tensor) -> None:
        self.kind, self.values = (x.shape, x.dtype, x.device), torch.empty(0)
        if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_meta:
            with torch._C._DisableTorchDispatch():  # not an operation of the model
                step = 1 + x.numel() // _COMPARED
                self.values = x.detach().reshape(-1)[::step].clone()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _SavedTensor) and self.kind == other.kind:
            with torch._C._DisableTorchDispatch():
                if _close(self.values, other.values):
                    return True
        raise UnsupportedError(
            "a checkpointed part computes different values in the backward pass than in the "
            "forward pass, so its gradient is wrong, in training too",
            remedy="Recomputation gives different values if the part draws random numbers from "
            "Python, NumPy or a custom generator, or counts its calls. Do this outside the part "
            "and pass the values in. torch's own generators are restored "
            "(preserve_rng_state=True).",
        )

    __hash__ = None  # type: ignore[assignment]


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether values are equal up to a different order of sums."""
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    eps = torch.finfo(a.dtype).eps ** 0.5
    a, b = doubled(a), doubled(b)
    size = float(a.abs().nan_to_num(posinf=0.0).amax()) if len(a) else 0.0
    return torch.allclose(a, b, rtol=eps, atol=eps * size, equal_nan=True)


@contextmanager
def _recomputed() -> Iterator[None]:
    """Raise if activation checkpointing recomputes different values than the forward pass had."""
    checks = getattr(checkpointing, "_allowed_determinism_checks_to_fns", {})  # keyed by name
    own = dict(checks)
    try:
        checks.update(dict.fromkeys(checks, _SavedTensor))
        yield
    finally:
        checks.update(own)


@contextmanager
def _resumed(generators: dict[types.FrameType, str]) -> Iterator[set[str]]:
    """Yield a set that collects the names of generators that the body advances."""
    advanced: set[str] = set()
    profile = sys.getprofile()
    if not generators or profile is not None:
        yield advanced
        return

    def watch(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame in generators:
            advanced.add(generators[frame])

    sys.setprofile(watch)
    try:
        yield advanced
    finally:
        sys.setprofile(None)


def _changed(lost: list[str]) -> UnsupportedError:
    return UnsupportedError(
        f"the forward pass changes {', '.join(lost[:3])}, and this cannot be undone: the next call "
        "would use a different model",
        where=lost[0],
        remedy="Store changing values in a buffer or in an attribute of the module (gradscope "
        "restores both), or move the change out of the forward pass.",
    )


def compiled_part(model: nn.Module) -> str | None:
    """Name the first module that `torch.compile` was applied to, or return None."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return f"layer {name!r}" if name else "the model"
    return None


def facts(model: nn.Module) -> list[Any]:
    """Return the facts that a proof relies on: modules, their modes and hooks, parameters."""
    found: list[Any] = []
    for m in every_module(model):
        own = vars(m)
        found += (id(m), m.training, _forward_of(type(m)), own.get("forward"))
        found += map(id, m._buffers.values())
        for kind in _HOOKS:
            if hooks := own.get(kind):
                found += hooks
        for name, p in m._parameters.items():
            found += (name, id(p))
            if p is not None:
                after = getattr(p, "_post_accumulate_grad_hooks", None)
                found += (p.requires_grad, p.dtype, p.device, *(p._backward_hooks or ()))
                found += after or ()
    return found


def _forward_of(kind: type) -> Any:
    """Return the class's own or inherited attribute `forward`, as stored, or None."""
    found = getattr(kind, "forward", None)
    if type(found) is types.FunctionType:
        return found
    return next((vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)), None)


def _snapshot(
    table: StateTable,
    keys: set[Hashable] | None = None,
    but: Container[int] = frozenset(),
    room: list[int] | None = None,
) -> _Snapshot:
    """Return the state of a table, with copies of values and marks to detect changes.

    Parameters are copied while there is `room`. A changed parameter raises an error in any case; a
    copy only serves to restore it.
    """
    items = table.read()
    if not items:
        return _Snapshot(table, items, items, items)

    def copied(value: Any) -> Any:
        if room is not None and isinstance(value, nn.Parameter):
            room[0] -= value.nbytes
            if room[0] < 0:
                return None
        return _copy(value)

    own = {k: v for k, v in items.items() if type(v) not in PLAIN and id(v) not in but}
    chosen = {k: v for k, v in own.items() if keys is None or k in keys}
    copies = {k: c for k, v in chosen.items() if (c := copied(v)) is not None}
    found = {k: _mark(v, copies.get(k)) for k, v in chosen.items()} if keys is None else {}
    return _Snapshot(table, items, {k: m for k, m in found.items() if m is not None}, copies)


def _copy(value: Any) -> Any:
    """Return a copy of a value that may change in place; other or too large values give None."""
    if _is_wrapper(value):
        return None  # it may not support a copy
    if isinstance(value, Tensor) and value.layout == torch.strided and value.nbytes <= _COPIED:
        with torch.no_grad():
            return value.clone().requires_grad_(value.requires_grad)
    if isinstance(value, np.ndarray) and value.nbytes <= _COPIED:
        return value.copy()
    if isinstance(value, _ITERATORS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # later Python releases cannot copy some of them
            try:
                return copy.copy(value)
            except TypeError:
                return None
    return None


def _mark(value: Any, copied: Any) -> Any:
    """Return a mark that shows later changes in place, or None."""
    if isinstance(value, _ITERATORS):
        return copied
    if not _has_bits(value):  # a sparse tensor has no byte count
        return None
    if value.nbytes > _READ:
        return value._version if isinstance(value, Tensor) else None
    return (value.shape, zlib.crc32(_bits(value).data)) if copied is None else copied


def _differs(value: Any, mark: Any) -> bool:
    """Whether a value has changed since it was marked; iterators always count as changed."""
    if isinstance(value, _ITERATORS):
        return True
    if not isinstance(mark, Tensor | np.ndarray):
        return bool(_mark(value, None) != mark)
    if value.shape != mark.shape or value.dtype != mark.dtype:
        return True
    now, before = _bits(value), _bits(mark)  # compare eight bytes at a time
    whole = len(now) - len(now) % 8
    a, b = now[:whole].view(np.uint64), before[:whole].view(np.uint64)
    return not (np.array_equal(a, b) and np.array_equal(now[whole:], before[whole:]))


def _has_bits(value: Any) -> bool:
    """Whether a value is an array that contains its own numbers."""
    if isinstance(value, Tensor):
        return value.layout == torch.strided and not value.is_meta
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def _is_wrapper(value: Any) -> bool:
    """Whether a tensor has its numbers in other tensors, as a quantised weight of torchao has."""
    return is_traceable_wrapper_subclass(value) and not hasattr(value, "_local_tensor")


def _bits(value: Tensor | np.ndarray) -> np.ndarray:
    """Return the bytes of an array."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    # the local part of a DTensor, without communication
    value = getattr(value, "_local_tensor", value)
    if _is_wrapper(value):
        names: Any = value.__tensor_flatten__()[0]  # type: ignore[union-attr]
        return np.concatenate([_bits(getattr(value, name)) for name in names])
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    found: np.ndarray = plain.view(-1).view(torch.uint8).numpy()
    return found


def _same(a: Any, b: Any) -> bool:
    """Whether values are identical, equal plain values, or containers of such values."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_same, a.values(), b.values()))
    return isinstance(a, PLAIN) and bool(a == b or (a != a and b != b))


class _Contents:
    """The contents of a model's modules, and of the dicts and lists in them, at one moment.

    This includes hooks: a model may register hooks in a forward pass, and store that it did.
    """

    def __init__(self, model: nn.Module) -> None:
        every = [vars(module) for module in every_module(model)]
        self._dicts: list[dict[Any, Any]] = every
        self._lists: list[list[Any]] = []
        for own in [*every]:
            self._dicts += [t for name in _HOOKS if isinstance(t := own.get(name), dict)]
            for name in own.keys() - _USUAL:
                if type(value := own[name]) is dict:
                    self._dicts.append(value)
                elif type(value) is list:
                    self._lists.append(value)
        views = [table.values() for table in self._dicts]
        self._flat: list[Iterable[Any]] = [*self._lists, *self._dicts, *views]
        self._before = self._read()

    def _read(self) -> tuple[list[int], list[Any]]:
        """Return the sizes of all tables, and their keys and values in a row: fast to compare."""
        sizes = [*map(len, self._lists), *map(len, self._dicts)]
        return sizes, [*itertools.chain.from_iterable(self._flat)]

    def put_back(self) -> None:
        """Restore all tables."""
        (sizes, flat), (now, found) = self._before, self._read()
        if now == sizes and all(map(operator.is_, found, flat)):
            return
        rest = iter(flat)
        lists, dicts = sizes[: len(self._lists)], sizes[len(self._lists) :]
        for items, size in zip(self._lists, lists, strict=True):
            items[:] = itertools.islice(rest, size)
        keys = [[*itertools.islice(rest, size)] for size in dicts]
        for table, own in zip(self._dicts, keys, strict=True):
            values = [*itertools.islice(rest, len(own))]
            known = len(table) == len(own) and all(map(operator.is_, table, own))
            if not (known and all(map(operator.is_, table.values(), values))):
                table.clear()
                table.update(zip(own, values, strict=True))
