"""Memory that is used again: fresh pages cost five times as much."""

from math import prod

import torch
from torch import Tensor

from gradscope.storage.layout import Shape


class Scratch:
    """Two buffers for each format, handed out in turn: one is filled while the other is written."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of any content, which stays untouched until the next but one is taken."""
        held = self._held.setdefault((dtype, device), [torch.empty(0)] * 2)
        buffer, size = held.pop(0), prod(shape)
        if buffer.numel() < size or buffer.dtype != dtype:
            buffer = torch.empty(size, dtype=dtype, device=device)
        held.append(buffer)
        return buffer[:size].view(shape)
