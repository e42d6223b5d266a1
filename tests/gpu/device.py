"""A device beside the CPU that is made of the CPU: every operation on it computes, and is seen.

torch's fake tensors have no values, and its engine takes no `cuda` without CUDA; this one is
registered under torch's own key for other people's devices, so that all of autograd runs. A tensor
on it holds one on the CPU. As on a GPU, operations refuse tensors of two devices, and generators of
the CPU; what makes the host wait for the device is counted; float64 can be missing, as it is on
Apple's. Streams are not in step: a copy that nobody waits for is made as late as may be, and what
one stream makes is noted where another takes it too early. The graph is that of a GPU: see
`kernels`. Where numbers are added in any order, their last digits differ from time to time; an
index that is out of range is found when the host next waits, and nothing computes from then on;
memory can run out at any operation.
"""

import random
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu import kernels

NAME = "standin"
LOST = (
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported "
    "at some other API call, so the stacktrace below might be incorrect."
)
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB."
NO_DOUBLE = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)
_NOT_YET = 99  # stands where a copy has not arrived
_WIDE = (torch.float64, torch.complex128)
_aten = torch.ops.aten
_ACROSS = {_aten._to_copy.default, _aten.copy_.default, _aten._copy_from.default}
_TAKES_HOST_INDICES = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
    _aten._pack_padded_sequence.default,
}
_MAKES = [  # which torch itself would make empty and fill by an operation that resizes
    *(f"aten::arange{end}" for end in ("", ".start", ".start_step")),
    *(f"aten::eye{end}" for end in ("", ".m")),
    *(f"aten::{name}" for name in ("linspace", "randperm", "randperm.generator")),
    *(f"aten::{name}" for name in ("tril_indices", "triu_indices")),
]
_WAITS = {  # the size or the value of what comes out is read on the host
    "_local_scalar_dense",
    "equal",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
    "repeat_interleave",
}


class Seen:
    """What was done on the device since the last `clear`.

    Attributes:
        operations: {name: times} of all that ran there.
        waits: {name: times} of those for which the host has to wait.
        races: {name: times} of those that took what another stream may not have made yet, or
            may make room for something else.
        copies: How many ended after they were asked for.
    """

    __module__ = "threading"  # else it is taken for the model's state, and put back after a pass

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.races: Counter[str] = Counter()
        self.copies = 0

    def clear(self) -> None:
        """Begin to count anew."""
        self.operations.clear()
        self.waits.clear()
        self.races.clear()
        self.copies = 0


seen = Seen()


class _Device:
    """What the device is like.

    Attributes:
        double: Whether it has float64. One that has not is like Apple's, others like CUDA's.
        lost: Whether an index was out of range: nothing is computed any more.
        room: How many operations there is memory for, None for all; those that make new tensors.
    """

    __module__ = "threading"  # as above

    def __init__(self) -> None:
        self.double, self.lost, self.room = True, False, None
        self.dice = random.Random(0)


_device: Any = _Device()


class Stream:
    """Work of the device in its order, which others have to wait for."""

    __module__ = "threading"  # as above

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.made = 0  # operations so far
        self.ended = 0  # of these, when the host last waited
        self.known: dict[Stream, int] = {}  # of other streams, which of theirs have ended
        self.arriving: list[Callable[[], object]] = []  # copies from the host
        self.leaving: list[Callable[[], object]] = []  # and to it

    def synchronize(self) -> None:
        """Let the host wait until all is done."""
        self.arrive()
        while self.leaving:
            self.leaving.pop(0)()
        self.ended = self.made

    def arrive(self) -> None:
        """Make the copies that what comes next is behind of."""
        while self.arriving:
            self.arriving.pop(0)()

    def record_event(self) -> "Event":
        """Return what others can wait for: the work so far."""
        return Event(self, self.made, dict(self.known))

    def wait_event(self, event: "Event") -> None:
        """Let what comes next here come after that."""
        event.stream.arrive()
        for stream, made in (*event.known.items(), (event.stream, event.made)):
            self.known[stream] = max(made, self.known.get(stream, 0))

    def has(self, t: "OnDevice") -> bool:
        """Whether what a tensor holds has been made, and stays, whatever comes next here."""
        stream, made = t.made
        if stream is self:
            return True
        there = max(stream.ended, self.known.get(stream, 0)) >= made
        waited = self is not _Current.stream  # a thread does, before it lets go of its tensors
        return there and (waited or not t.arrived or self in t.used)


class Event(NamedTuple):
    """A moment of a stream."""

    stream: Stream
    made: int
    known: dict[Stream, int]


class _Current(threading.local):
    stream = Stream()  # that all threads begin with


_current = _Current()


class OnDevice(Tensor):
    """A tensor of the device; `held` is what it is made of."""

    held: Tensor
    made: tuple[Stream, int]  # where, and by which operation there
    arrived: bool  # by a copy that the host did not wait for
    used: tuple[Stream, ...]  # by which its memory is used, as its allocator was told

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        if held.dtype in _WIDE and not _device.double:
            kernels.fail(TypeError(NO_DOUBLE))
        made: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        made.made, made.arrived, made.used = (_current.stream, _current.stream.made), False, ()
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, *args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """What it holds, without a graph."""
        return self.detach()

    @data.setter
    def data(self, other: "OnDevice") -> None:
        """Hold what another one holds, as `Module.to` does with a parameter."""
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.held, self.made = other.held, other.made

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Keep the memory until a stream has done what it was given by now."""
        self.used = (*self.used, stream)

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        """Make a tensor here; torch's own way goes past what is registered."""
        return _tensor(data, **{"dtype": self.dtype, "device": self.device} | options)

    def __getitem__(self, index: Any) -> Tensor:
        """Take rows; a list of positions is made a tensor first, as in `new_tensor`."""
        given = index if isinstance(index, tuple) else (index,)
        given = tuple(self.new_tensor(i, dtype=None) if isinstance(i, list) else i for i in given)
        return super().__getitem__(given)

    def tolist(self) -> Any:
        """Bring the numbers to the host; torch's own way knows no tensors but its own."""
        seen.operations["tolist"] += 1
        seen.waits["to host"] += 1
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        """Refuse, as every device but the CPU does."""
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu()")

    __array__ = numpy  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on what its tensors are made of; say what ends the process."""
    try:
        return _ran(func, *args, **kwargs)
    except Exception:
        if kernels.in_engine():
            traceback.print_exc()
        raise


def _ran(func: Any, *args: Any, **kwargs: Any) -> Any:
    given = tree_leaves((args, kwargs))
    own = {id(t.held): t for t in given if isinstance(t, OnDevice)}
    to = kwargs.get("device")
    stays = kwargs["device"].type == NAME if to is not None else True
    name = func.overloadpacket.__name__
    _require_one_device(func, given, kwargs)
    if not func._schema.is_mutable and not func.is_view:
        _require_room()
    seen.operations[name] += 1
    here = _current.stream
    if not all(map(here.has, own.values())):
        seen.races[name] += 1
    here.arrive()
    here.made += 1
    if (name in _WAITS and own) or _reads_mask(func, args):
        seen.waits[name] += 1
        _wait(here)
    if func in _ACROSS and own:
        host = not stays or (name == "copy_" and not isinstance(args[0], OnDevice))
        lands = name == "copy_" and not isinstance(args[1], OnDevice)
        if (host or lands) and not _waits_not(args, kwargs):
            seen.waits["to host" if host else "from host"] += 1
            _wait(here)
        if name == "copy_" and host and _waits_not(args, kwargs):
            return _later(here.leaving, args[0], args[1].held.clone())
        if lands and _waits_not(args, kwargs):
            there: OnDevice = args[0]
            there.made, there.arrived = (here, here.made), True
            _later(here.arriving, there.held.fill_(_NOT_YET), args[1])
            return there
    if func is _aten.copy_.default and not isinstance(args[0], OnDevice):
        stays = False
    inner, options = tree_map(_within, (args, kwargs))
    found = _computed(func, name, inner, options)
    if torch.Tag.inplace_view in func.tags:  # the shape is the outer tensor's own
        with no_dispatch():
            func(*args, **kwargs)
    for t in own.values():
        t.made = (here, here.made) if func._schema.is_mutable else t.made
        assert t.shape == t.held.shape, f"{func} changes the size of a tensor of the device"
    if name == "_pack_padded_sequence":
        return _there(found[0]), found[1]  # torch wants the second on the CPU, always
    return tree_map(lambda t: own[id(t)] if id(t) in own else _there(t), found) if stays else found


def _wait(stream: Stream) -> None:
    """Let the host wait, and find out what went wrong meanwhile."""
    stream.synchronize()
    if _device.lost:
        kernels.fail(torch.AcceleratorError(LOST))


def _require_room() -> None:
    """Raise where memory has run out."""
    if _device.room is not None:
        _device.room -= 1
        if _device.room == 0:  # once: whoever tries again with less may find room
            _device.room = None
            kernels.fail(torch.OutOfMemoryError(FULL))


def _computed(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return what an operation computes, as a GPU does."""
    every = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    whole = [t for t in every if not (t.is_floating_point() or t.is_complex())]
    if name in kernels.NO_WHOLE and whole:
        kernels.fail(NotImplementedError(f"\"{name}_cuda\" not implemented for 'Long'"))
    run = kernels.ONLY_THERE.get(name, func)
    try:
        found = run(*args, **kwargs)
    except (IndexError, RuntimeError) as error:
        text = str(error)
        if not whole or ("out of range" not in text and "out of bounds" not in text):
            raise
        _device.lost = True  # nobody knows yet; what comes out is of no use
        args = tree_map(lambda t: t * 0 if any(t is w for w in whole) else t, args)
        found = run(*args, **kwargs)
    return tree_map(_in_any_order, found) if name in kernels.ADDED_IN_ANY_ORDER else found


def _in_any_order(t: Any) -> Any:
    """Change a tensor's last digits, in place."""
    if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.numel():
        off = torch.tensor([_device.dice.choice((-1, 0, 1)) for _ in range(7)], dtype=torch.float32)
        off = off.repeat(-(-t.numel() // 7))[: t.numel()].view(t.shape)
        with torch.no_grad():
            t.mul_(1 + off.to(t.real.dtype) * torch.finfo(t.dtype).eps)
    return t


def _later(queue: list[Callable[[], object]], target: Tensor, source: Tensor) -> Tensor:
    """Copy when somebody waits for it: a buffer that is used again by then spoils the copy."""

    def copy() -> None:
        target.copy_(source)
        seen.copies += 1

    queue.append(copy)
    return target


def _there(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return OnDevice(value.resolve_conj().resolve_neg())  # a view of bits would not show


def _overload(name: str) -> Any:
    packet, _, end = name.removeprefix("aten::").partition(".")
    return getattr(getattr(_aten, packet), end or "default")


def _within(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.held
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _waits_not(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking")) or (len(args) > 2 and bool(args[2]))


def _reads_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether rows are taken by a mask on the device, whose number the host has to know."""
    if func not in _TAKES_HOST_INDICES:
        return False
    masks = (t for t in args[1] if isinstance(args[1], list | tuple) and isinstance(t, OnDevice))
    return any(t.dtype in (torch.bool, torch.uint8) for t in masks)


def _require_one_device(func: Any, given: list[Any], kwargs: dict[str, Any]) -> None:
    """Refuse what CUDA refuses: a tensor of the host with axes beside one of the device."""
    if func in _ACROSS:
        return
    if func in _TAKES_HOST_INDICES:
        given = [t for t in given if not (isinstance(t, Tensor) and not t.is_floating_point())]
    on = [t for t in given if isinstance(t, OnDevice)]
    off = [t for t in given if isinstance(t, Tensor) and not isinstance(t, OnDevice)]
    there = bool(on) or getattr(kwargs.get("device"), "type", "cpu") == NAME
    if on and any(t.dim() for t in off):
        what = "Expected all tensors to be on the same device, but found at least two devices, "
        kernels.fail(RuntimeError(f"{what}{NAME}:0 and cpu! ({func})"))
    draw = kwargs.get("generator")
    if there and draw is not None and draw.device.type != NAME:
        kernels.fail(RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'"))


class _Module:
    """What torch asks the module of a device for."""

    def __init__(self) -> None:
        self.waited = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: numbers are drawn from the CPU's generator, which is seeded anyway."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        self.waited += 1
        _wait(_current.stream)

    Stream = Stream

    def current_stream(self, device: Any = None) -> Stream:
        return _current.stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, _current.stream = _current.stream, stream
        try:
            yield
        finally:
            _current.stream = before


_library: Any = None
_torch_tensor, _empty = torch.tensor, torch.empty
_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def _backward(*args: Any, **kwargs: Any) -> Any:
    """Run a backward pass, and raise what went wrong in its threads."""
    found = _run_backward(*args, **kwargs)
    if kernels.failed and not kernels.in_kernel():
        error = kernels.failed[0]
        kernels.failed.clear()
        raise error
    return found


def _tensor(data: Any, **options: Any) -> Tensor:
    """What `torch.tensor` does, in two steps where it is to lie on the device."""
    device = options.pop("device", None)
    if device is None or torch.device(device).type != NAME:
        return _torch_tensor(data, device=device, **options)
    return _torch_tensor(data, **options).to(device)


def _choice(func: Any, chosen: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run what torch chooses on CUDA, or what it chooses on Apple's device."""
    there = _device.double or func.overloadpacket.__name__ == "rms_norm"
    return chosen(*args, **kwargs) if there else kernels.composed(func, *args, **kwargs)


def register() -> torch.device:
    """Make the device known to torch, for the rest of the process, and return it."""
    global _library
    if _library is None:
        backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
        _library = torch.library.Library("_", "IMPL")
        _library.fallback(_run, "PrivateUse1")
        for op in (*_MAKES, "aten::_fused_rms_norm"):
            torch.library.impl(op, "PrivateUse1", partial(_run, _overload(op)))
        for op, chosen in kernels.CHOSEN.items():
            run = partial(_choice, _overload(op), chosen)
            torch.library.impl(f"aten::{op}", "AutogradPrivateUse1", run)
        torch.tensor = _tensor  # torch's own goes past what is registered
        torch.autograd._engine_run_backward = _backward  # type: ignore[attr-defined]
    return torch.device(NAME, 0)


def placed(model: nn.Module) -> nn.Module:
    """Move a model's parameters and buffers to the device; one that has two names keeps both.

    `Module.to` would make it two, since these tensors cannot take each other's place.
    """
    moved: dict[int, Tensor] = {}

    def of(t: Tensor) -> Tensor:
        if id(t) not in moved:
            there = t.detach().to(torch.device(NAME, 0))
            parameter = isinstance(t, nn.Parameter)
            moved[id(t)] = nn.Parameter(there, t.requires_grad) if parameter else there
        return moved[id(t)]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            table.update({k: of(t) for k, t in table.items() if t is not None})
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    return model


@contextmanager
def pinned() -> Iterator[None]:
    """Let host memory be pinned in the body, which torch does for devices that it knows."""

    def pin_memory(t: Tensor) -> Tensor:
        if isinstance(t, OnDevice):
            raise RuntimeError("cannot pin a tensor of the device: only dense CPU tensors can be")
        strides = zip(t.shape, t.stride(), strict=True)
        span = 1 + sum((size - 1) * step for size, step in strides) if t.numel() else 0
        return _empty(span, dtype=t.dtype).as_strided(t.shape, t.stride()).copy_(t)

    def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return _empty(*shape, **options)

    with (
        patch.object(torch, "empty", empty),
        patch.object(Tensor, "pin_memory", pin_memory),
    ):
        yield


@contextmanager
def without_double() -> Iterator[None]:
    """Let the device have no float64 in the body, and one operation for a linear layer."""
    apple = torch.library.Library("aten", "IMPL")
    apple.impl("linear", partial(_run, _aten.linear.default), "PrivateUse1")
    _device.double = False
    try:
        yield
    finally:
        _device.double = True
        apple._destroy()


@contextmanager
def modes_kept() -> Iterator[None]:
    """Let nothing switch dispatch off in the body: then torch finds no kernels of Python's."""
    with patch.object(torch._C, "_DisableTorchDispatch", nullcontext):
        yield


@contextmanager
def full_after(operations: int) -> Iterator[None]:
    """Let memory run out once in the body, after so many operations."""
    _device.room = operations
    try:
        yield
    finally:
        _device.room = None


@contextmanager
def found_again() -> Iterator[None]:
    """Let the device compute again after the body, though an index was out of range in it."""
    try:
        yield
    finally:
        _device.lost = False
