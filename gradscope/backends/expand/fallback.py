"""Any operator, exactly: apply it to each sample's tensors and stack the results."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradscope.backends.expand.signals import same_as
from gradscope.backends.expand.tensor import PerSample, Samples, leaves


def sample_by_sample(s: Samples, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the physical results of `func`; what it writes to is written through slices.

    Raises:
        Differ: Samples have results of different shapes, or different answers.
    """
    results = []
    for i in range(s.n):
        mine, named = leaves(partial(_slice, i=i), (args, kwargs))
        results.append(func(*mine, **named))
    return _stacked(results)


def _slice(t: Tensor, i: int) -> Tensor:
    return t.physical[i] if isinstance(t, PerSample) else t


def _stacked(results: list[Any]) -> Any:
    first = results[0]
    if isinstance(first, Tensor):
        same_as([f"{r.shape} {r.dtype}" for r in results])
        return torch.stack(results)
    if isinstance(first, tuple | list):
        same_as([str(len(r)) for r in results])
        return type(first)(_stacked(list(parts)) for parts in zip(*results, strict=True))
    same_as([repr(r) for r in results])
    return first
