"""When an operation may be recorded as a function of ours."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from gradscope.blocks.products import plain

_KNOWN = (Tensor, nn.Parameter)


def recordable(given: Sequence[Any], *dtypes: torch.dtype) -> bool:
    """Whether autograd records these, and nobody else does: no hook, no other mode of torch's."""
    return (
        all(type(t) in _KNOWN for t in given)
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in given)
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0
        and not _saves_elsewhere()
        and plain(given, *dtypes)
    )


def _saves_elsewhere() -> bool:
    """Whether what is saved passes through hooks, as a checkpoint's does, which runs this again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
