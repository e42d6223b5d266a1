"""Between host and GPU: pinned memory, and a stream of its own for each thread that copies.

On the CPU there is nothing to do, and nothing is done.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from gradscope.blocks import DerivedBlock, Gradients
from gradscope.core.batch import Batch, map_tensors, tensors
from gradscope.storage import Rows


class Lane:
    """Where a thread's work for the device goes: a stream beside that of the computation.

    Args:
        device: Of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """Return what `entered` is to wait for: the calling thread's work so far."""
        if self._stream is None:
            return None
        mark: torch.cuda.Event = torch.cuda.current_stream(self._stream.device).record_event()
        return mark

    @contextmanager
    def entered(self, mark: torch.cuda.Event | None = None) -> Iterator[None]:
        """Work on the stream in the body; when that is left, the work is done."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            yield
            self._stream.synchronize()

    def hand_over(self, batch: Batch) -> None:
        """Let the calling thread's stream use what was made on this one, and free it."""
        if self._stream is not None:
            for t in tensors((batch.inputs, batch.targets)):
                t.record_stream(torch.cuda.current_stream(self._stream.device))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch from the host; by pinned memory to a GPU, without waiting for it there."""
    if device.type != "cuda":
        return batch.to(device, None)

    def move(t: Tensor) -> Tensor:
        return t.pin_memory().to(device, non_blocking=True)

    return Batch(map_tensors(move, batch.inputs), map_tensors(move, batch.targets), batch.index)


class Pinned:
    """Two host buffers for each format, handed out in turn: one is filled, one is written.

    Args:
        pin: Pin their pages; without a GPU this is not possible.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._held: dict[torch.dtype, list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of any content, which stays untouched until the next but one is taken."""
        held = self._held.setdefault(dtype, [torch.empty(0, dtype=dtype)] * 2)
        buffer, size = held.pop(0), prod(shape)
        if buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, pin_memory=self._pin)
        held.append(buffer)
        return buffer[:size].view(shape)


@dataclass(frozen=True, eq=False)
class HostBlock(DerivedBlock):
    """Gradients on a GPU, whose dense form lies in the host's memory.

    Attributes:
        base: On the GPU.
        pinned: Where the dense form goes; it stays there until the next but one is asked for.
    """

    pinned: Pinned

    @property
    def device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape), in `pinned` rather than in `out`."""
        return self._values(self.base.dense())

    def _values(self, base: Tensor) -> Tensor:
        host = self.pinned.take(tuple(base.shape), base.dtype)
        host.copy_(base, non_blocking=True)
        if base.is_cuda:
            torch.cuda.current_stream(base.device).synchronize()
        return host


def on_host(rows: Rows, pinned: Pinned) -> Rows:
    """Return rows of which a writer takes the dense form by way of `pinned`."""

    def moved(gradients: Gradients | None) -> Gradients | None:
        return gradients and gradients.map(lambda block: HostBlock(block, pinned))

    return replace(rows, chains=tuple(map(moved, rows.chains)))
