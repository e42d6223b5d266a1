"""Functions of single numbers, by whichever kernel is faster here."""

import torch
from torch import Tensor
from torch.backends import mkldnn

from gradscope.blocks.products import plain

_LARGE = 2**15  # entries from which on oneDNN's kernel pays for two copies
_PART = 2**20  # entries taken at a time: their copies stay near the caches


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent (...), of many numbers by oneDNN: a fourth of torch's time.

    Both are off by less than the last digit of float32 (7e-8 against 6e-8 of the value).
    """
    if x.numel() < _LARGE or not x.is_contiguous() or not _suits_onednn(x):
        return torch.tanh(x)
    if x.numel() <= _PART:
        return _tanh(x)
    out = torch.empty_like(x)
    numbers, places = x.view(-1), out.view(-1)
    for start in range(0, x.numel(), _PART):
        part = slice(start, start + _PART)
        places[part] = _tanh(numbers[part])
    return out


def _suits_onednn(x: Tensor) -> bool:
    """Whether oneDNN's kernels take these numbers; they have no derivative."""
    there: bool = mkldnn.is_available() and bool(mkldnn.enabled)  # type: ignore[no-untyped-call]
    tracked = torch.is_grad_enabled() and x.requires_grad
    return there and not tracked and plain([x], torch.float32)


def _tanh(x: Tensor) -> Tensor:
    found: Tensor = torch.tanh_(x.to_mkldnn()).to_dense()
    return found
