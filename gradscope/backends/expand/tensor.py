"""`PerSample`, a tensor that looks like one sample and contains all samples; and signals.

The model and autograd see the logical shape: the shape of a batch of one, or of the parameter. The
physical tensor has the shape (n, *logical shape). A tensor with stride 0 over samples is *shared*:
all samples use one value, such as a parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from gradscope.backends.base import USE_AUTO
from gradscope.errors import UnsupportedError

TEXT = ", samples="  # a part of the text of a `PerSample`


class WriteScope(IntEnum):
    """Which tensors are per sample from the start, to allow writes of per-sample values.

    With fewer such tensors, more is computed once for all samples.
    """

    NOTHING = 0
    RESULTS = 1  # results of operators on parameters only
    EVERYTHING = 2  # also buffers, and constants made in the forward pass


class SharedWrite(BaseException):
    """The model writes per-sample values to a shared tensor; `needed` would allow it.

    It is a BaseException, so that `except Exception` in the model does not catch it.
    """

    def __init__(self, needed: WriteScope) -> None:
        super().__init__(needed)
        self.needed = needed


class SamplesDiverge(BaseException):
    """Samples take different branches, identified by `keys`; a BaseException like `SharedWrite`."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(keys)
        self.keys = keys


def refuse(what: str, remedy: str = USE_AUTO) -> NoReturn:
    """Raise an `UnsupportedError` of this backend."""
    raise UnsupportedError(f"the expand backend cannot run this model: {what}", remedy=remedy)


def same_as(keys: list[str]) -> None:
    """Raise `SamplesDiverge` unless all samples have the same key."""
    if any(key != keys[0] for key in keys):
        raise SamplesDiverge(keys)


class PerSample(Tensor):
    """A tensor (*shape) for the model that contains one value per sample.

    Attributes:
        raw: (n, *shape), the memory, without a graph: the wrapper has the graph. Torch's marks of
            lazy conjugation and negation are on the wrapper, never on the memory: torch does not
            resolve them at this level of dispatch.
        shared: Whether all samples use one value.
        lazy: Whether the values differ from the memory.
    """

    raw: Tensor
    shared: bool
    lazy: bool
    __torch_function__: ClassVar[Any] = getattr(torch._C, "_disabled_torch_function_impl", None)

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> "PerSample":
        """Wrap `raw` (n, *shape); views of the wrapper match views of `raw`."""
        shape, strides = raw.shape, raw.stride()
        made: PerSample = Tensor._make_wrapper_subclass(
            cls,
            shape[1:],
            strides=strides[1:],
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=raw.device,
            requires_grad=requires_grad,
        )
        made.raw, made.lazy = raw, False
        made.shared = strides[0] == 0 and shape[0] > 1
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise: only `Interpreter` can run operations."""
        refuse(f"{func} was called on a tensor kept from an earlier evaluation")

    def marked(self, conjugated: bool, negated: bool) -> "PerSample":
        """Mark the values as conjugates or negatives of the memory, and return self."""
        if conjugated:
            torch._C._set_conj(self, True)
        if negated:
            torch._C._set_neg(self, True)
        self.lazy = self.is_conj() or self.is_neg()
        return self

    @property
    def physical(self) -> Tensor:
        """The values (n, *shape): the memory, or a copy if they are lazy."""
        if not self.lazy:
            return self.raw
        values = self.raw.conj_physical() if self.is_conj() else self.raw
        return values.neg() if self.is_neg() else values

    def common(self) -> Tensor:
        """Return the value (*shape) of all samples; raise `SamplesDiverge` if values differ."""
        values = self.physical
        if not self.shared:
            same_as([str(value.tolist()) for value in values])
        return values[0]

    def tolist(self) -> Any:
        """Return nested lists, if equal for all samples."""
        return self.common().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array, if equal for all samples."""
        return self.common().numpy(force=force)

    def __format__(self, spec: str) -> str:
        """Return what `format` returns for a plain tensor, if equal for all samples.

        A tensor without axes is formatted as its number, as in f"expert_{index}".
        """
        if self.dim():
            return object.__format__(self, spec)
        return format(self.common().item(), spec)

    def __dlpack__(self, **how: Any) -> Any:
        """Export the value that all samples have, for other libraries.

        Raises:
            BufferError: The tensor requires a gradient.
        """
        if self.requires_grad:
            raise BufferError(
                "cannot export a tensor that requires a gradient: call detach() first"
            )
        return self.common().__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        """Return the device of the exported memory."""
        return self.raw.__dlpack_device__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PerSample({tuple(self.shape)}{TEXT}{self.raw.shape[0]})"


class SharedResult(Tensor):
    """A rule's result that all samples share and that the model gets unwrapped."""


@dataclass(frozen=True)
class Expansion:
    """The number n of samples, and the conversion from logical to physical tensors."""

    n: int

    def of(self, t: Tensor) -> Tensor:
        """Return the physical tensor (n, *shape); a constant is expanded, and so shared."""
        if isinstance(t, PerSample):
            return t.physical if t.lazy else t.raw
        return self.expanded(t.resolve_conj().resolve_neg())

    def expanded(self, t: Tensor) -> Tensor:
        """Return a view (n, *shape) of `t` (*shape) with stride 0 over samples."""
        return t.unsqueeze(0).expand(self.n, *t.shape)

    def wrap(self, t: Tensor) -> Tensor:
        """Wrap the physical tensor (n, *shape) that a rule returned."""
        if isinstance(t, SharedResult):
            return t.as_subclass(Tensor)
        if t.dim() == 0 or t.shape[0] != self.n:
            refuse(f"a result of shape {tuple(t.shape)} has no axis of {self.n} samples")
        return PerSample(t)


def is_shared(physical: Tensor) -> bool:
    """Whether a physical tensor (n, ...) has one value for all samples."""
    return physical.shape[0] > 1 and physical.stride(0) == 0


def fold(t: Tensor) -> Tensor:
    """Reshape (n, b, ...) to (n·b, ...)."""
    return t.flatten(0, 1)


def unfold(t: Tensor, n: int) -> Tensor:
    """Reshape (n·b, ...) to (n, b, ...)."""
    return t.reshape(n, t.shape[0] // n, *t.shape[1:])


_PLAIN = frozenset((int, float, bool, type(None)))


def leaves(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply `fn` to the tensors in an operator's arguments or results (lists nest once)."""
    if isinstance(tree, Tensor):
        return fn(tree)
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind([leaves(fn, item) if type(item) not in _PLAIN else item for item in tree])
    if kind is dict:
        return {key: leaves(fn, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return kind(leaves(fn, item) for item in tree)
    return tree


def tensors_of(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors in an operator's arguments, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found
