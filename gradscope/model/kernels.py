"""Corrections of torch's kernels that are wrong or missing in some cases, while a model runs.

On a CPU, the backward of batch and instance normalisation misreads the layout of some gradients and
returns a wrong result. It happens if channels come after positions in memory (as after flatten and
`transpose(1, 2)`) and an axis has one entry. Batches of one are such a case, and they are the
reference for all results. A contiguous gradient is never misread.

Grouped products, which mixtures of experts use, are missing for float64.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MISTAKEN = (
    "torch's batch normalisation on a CPU misreads the memory layout of a single sample's gradient "
    "in this model, and silently returns a wrong gradient. gradscope passes a contiguous gradient "
    "(gradient.contiguous()), so its rows differ from those of a plain loop over batches of one"
)
_PLAIN = (Tensor, nn.Parameter)


def _channels_normalised(
    own: Callable[..., Tensor], mistaken: Callable[[], object], *args: Any, **kwargs: Any
) -> Tensor:
    """Return `own` of its input (n, c, ...), with gradients made contiguous.

    `mistaken` is called if torch alone would have returned a wrong gradient.
    """
    name = "input"
    x: Tensor = kwargs[name] if name in kwargs else args[0]
    if type(x) not in _PLAIN or x.dim() < 4 or x.device.type != "cpu" or _transformed():
        return own(*args, **kwargs)
    given, layout = x, _Layout.of(x)
    if not x.is_contiguous():
        if x.stride() == _channels_last(x):  # a layout that torch names is not misread
            return own(*args, **kwargs)
        x = given.contiguous()
    rest = {key: value for key, value in kwargs.items() if key != name}
    out = own(x, *args[1:], **rest)

    def laid_out(gradient: Tensor) -> Tensor:
        with suppress(RuntimeError):  # a batch of gradients has no layout
            if layout.taken_for(_Layout.of(gradient)) and takes_layouts_for_others():
                mistaken()
        return gradient.contiguous()

    if out.requires_grad:
        out.register_hook(laid_out)  # type: ignore[no-untyped-call]
    return out


class _Layout(NamedTuple):
    """The layouts that torch's kernel sees in a tensor (n, c, ...)."""

    row_by_row: bool
    channels_last: bool
    named: torch.memory_format  # the layout by torch's name

    @classmethod
    def of(cls, t: Tensor) -> "_Layout":
        last = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
        row_by_row = t.is_contiguous()
        channels_last = t.dim() in (4, 5) and t.is_contiguous(memory_format=last)
        named = channels_last and not row_by_row and t.stride(0) >= t[0].numel()
        return cls(row_by_row, channels_last, last if named else torch.contiguous_format)

    def taken_for(self, other: "_Layout") -> bool:
        """Whether the kernel misreads this layout if the gradient has the layout `other`."""
        both = all(one.row_by_row or one.channels_last for one in (self, other))
        return both and self.row_by_row != other.row_by_row and self.named == other.named


@cache
def takes_layouts_for_others() -> bool:
    """Whether this torch's kernel misreads the gradient of a single sample."""
    x = torch.arange(12.0).reshape(1, 3, 2, 2)
    gradient = torch.arange(12.0).reshape(1, 4, 3).transpose(1, 2).view(1, 3, 2, 2)
    statistics = torch.ones(3), torch.zeros(3), torch.ones(3), None, None
    _, found, _ = torch.ops.aten.native_batch_norm_backward(
        gradient, x, *statistics, False, 0.0, [False, True, False]
    )
    return not torch.allclose(found, (x * gradient).sum((0, 2, 3)))


def _channels_last(x: Tensor) -> tuple[int, ...]:
    """Return the strides of (n, c, ...) with channels last in memory."""
    strides, size = [1], x.shape[1]
    for axis in range(x.dim() - 1, 1, -1):
        strides.insert(1, size)
        size *= x.shape[axis]
    return (size, *strides)


def _transformed() -> bool:
    """Whether a transform of torch.func is active; its tensors do not support hooks."""
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return torch.compiler.is_compiling() or (peek is not None and peek() is not None)


def _grouped_mm(
    own: Callable[..., Tensor], a: Tensor, b: Tensor, offs: Tensor | None = None, **options: Any
) -> Tensor:
    """Return torch's grouped product; in float64, compute it group by group.

    Groups are rows of `a` (r, i), each multiplied by a matrix of `b` (g, i, o); or columns of `b`
    (i, r), each multiplied by a matrix of `a` (g, o, i); or parts of the summed axis: (g, o, i).
    The result is zero after the last group.
    """
    if a.dtype != torch.float64 or any(value is not None for value in options.values()):
        return own(a, b, offs, **options)
    if offs is None:
        return a @ b
    ends = offs.tolist()
    groups = [slice(*part) for part in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim():
        return torch.stack([a[:, part] @ b[part] for part in groups])
    if a.dim() == 2:
        rows = [a[part] @ b[k] for k, part in enumerate(groups)]
        return torch.cat([*rows, a.new_zeros(len(a) - ends[-1], b.shape[-1])])
    columns = [a[k] @ b[:, part] for k, part in enumerate(groups)]
    return torch.cat([*columns, a.new_zeros(a.shape[1], b.shape[1] - ends[-1])], 1)


_OWN: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name)
    for name in ("batch_norm", "instance_norm", "_grouped_mm")
    if hasattr(torch, name)  # _grouped_mm is missing in older releases
}


def patched_kernels(mistaken: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
    """Use the corrected kernels in the body.

    `mistaken` is called in a backward pass if torch alone would return a wrong gradient.
    """
    return _in_place(
        {
            name: partial(_grouped_mm, own)
            if name == "_grouped_mm"
            else partial(_channels_normalised, own, mistaken)
            for name, own in _OWN.items()
        }
    )


def original_kernels() -> AbstractContextManager[None]:
    """Undo `patched_kernels` while torch compiles, because it supports only its own kernels."""
    return _in_place(_OWN)


@contextmanager
def _in_place(kernels: Mapping[str, Callable[..., Tensor]]) -> Iterator[None]:
    before = {name: getattr(torch, name) for name in kernels}
    try:
        for name, kernel in kernels.items():
            setattr(torch, name, kernel)
        yield
    finally:
        for name, kernel in before.items():
            setattr(torch, name, kernel)
