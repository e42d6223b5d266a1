"""Operators that make shapes: stacking, repeating, fresh memory."""

from typing import Any

import torch
from torch import Tensor

from gradscope.backends.expand.facts import aten
from gradscope.backends.expand.rules import rules
from gradscope.backends.expand.tensor import Samples


@rules.register("stack.default")
def stack(s: Samples, tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Stack along a new axis, counted past the sample axis."""
    width = tensors[0].dim() + 1
    return torch.stack([s.of(t) for t in tensors], dim % width + 1)


@rules.register("repeat.default")
def repeat(s: Samples, t: Tensor, repeats: list[int]) -> Tensor:
    """Repeat along logical axes; new ones come right after the sample axis."""
    physical = s.of(t)
    missing = (slice(None), *[None] * (len(repeats) - t.dim()))
    return physical[missing].repeat(1, *repeats)


@rules.register("new_empty_strided.default")
def new_empty_strided(
    s: Samples, t: Tensor, size: list[int], stride: list[int], **kwargs: Any
) -> Tensor:
    """Fresh memory of the given layout for each sample, one after another."""
    extent = 1 + sum((a - 1) * b for a, b in zip(size, stride, strict=True) if a)
    return s.of(t).new_empty_strided((s.n, *size), (max(extent, 1), *stride), **kwargs)


def _new(key: str) -> None:
    name, _, overload = key.partition(".")
    func = getattr(getattr(aten, name), overload)

    @rules.register(key)
    def rule(s: Samples, t: Tensor, size: list[int], *args: Any, **kwargs: Any) -> Any:
        return func(s.of(t), [s.n, *size], *args, **kwargs)


for _key in ("new_zeros.default", "new_ones.default", "new_empty.default", "new_full.default"):
    _new(_key)
