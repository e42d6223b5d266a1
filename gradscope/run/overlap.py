"""Loading, computing and writing at the same time: threads load the next and write the last batch.

An error in a thread is raised when the main thread needs its result. Signals reach only the main
thread, which waits for the other threads before it ends. To and from a GPU, each thread copies
through pinned memory on a separate stream.
"""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from gradscope.blocks import DerivedBlock, Gradients
from gradscope.core.batch import Batch, tensors, wholes
from gradscope.errors import OutputError, RefusedError
from gradscope.model.locate import first_line
from gradscope.process.memory import accelerator_module, release_freed_memory
from gradscope.process.shortage import is_shortage, thread_pool
from gradscope.storage import FinishedBatch, States, Writer, deferring_signals

T = TypeVar("T")

_ONE = "ran out with a single sample"
_FREE = (
    "Free memory and run the command again. Or compute fewer `parameters` at a time, or use a "
    "smaller `dtype`. A stopped gradscope compute continues with --resume."
)
_COUPLED = (
    "Give a smaller `batch_size`. With own-loss coupling, gradients depend on which samples share "
    "a batch, so the batch cannot be split automatically."
)


class BatchSize:
    """The batch size of a run; it is halved permanently when memory runs out.

    A `fixed` size is not halved, because gradients depend on which samples share a batch.
    """

    def __init__(self, samples: int, *, fixed: bool = False) -> None:
        self.samples = self._first = samples
        self._fixed = fixed

    @property
    def notes(self) -> tuple[str, ...]:
        """A note if the batch size was reduced."""
        if self.samples == self._first:
            return ()
        return (
            f"memory ran out with batches of {self._first:,} samples; later batches have "
            f"{self.samples:,}",
        )

    def fitting(self, action: Callable[[int], T], most: int) -> T:
        """Return `action(n)` for the largest n up to `most` that fits into memory.

        If memory runs out, the action is called again with a smaller n, so a failed call must have
        no effect.
        """
        while True:
            n = min(self.samples, most)
            try:
                return action(n)
            except Exception as error:
                if not is_shortage(error):
                    raise
                if self._fixed or n == 1:
                    few = f"ran out with {n} samples"
                    raise RefusedError(
                        f"memory {few if self._fixed else _ONE}: {first_line(error)}",
                        where="batch",
                        remedy=_COUPLED if self._fixed else _FREE,
                    ) from error
            self.samples = n // 2
            gc.collect()  # a traceback may reference tensors of the failed attempt
            release_freed_memory()
            module = accelerator_module(torch.accelerator.current_accelerator())
            if hasattr(module, "empty_cache"):
                module.empty_cache()


def prefetch(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches; a thread loads the next batch while the caller uses the current one."""
    stream = CopyStream(device)

    def load() -> Batch | None:
        with stream.use():
            return next(batches, None)

    with thread_pool(1, "gradscope-loader") as thread:
        coming = thread.submit(load)
        while (batch := coming.result()) is not None:
            coming = thread.submit(load)
            stream.hand_over(batch)
            yield batch


class BatchWriter(Protocol):
    """Receives the batches of a run in order, and writes them to a file except in a rehearsal."""

    @property
    def completed(self) -> int:
        """The number of rows written so far."""

    def append(
        self, rows: FinishedBatch, states: States | None = None, *, proved: bool = False
    ) -> None:
        """Add one batch and the reducers' states after it; `go_back` keeps `proved` batches."""

    def wait(self) -> None:
        """Wait until the last batch is written; after that, its states may be changed."""

    def go_back(self) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """Drop the batches after the last proved batch; return the remaining rows and states."""

    def finish(self, **results: Any) -> None:
        """Complete the file; see `Writer.finish`."""


class BackgroundWriter:
    """Writes batches in a thread, one batch while the next is computed.

    Leaving the context waits for the thread. An error in the thread is raised by the next call, or
    when the context is left. With `dense`, rows are copied from a GPU in dense form.
    """

    def __init__(self, writer: Writer, device: torch.device, *, dense: bool) -> None:
        self._writer, self._stream = writer, CopyStream(device)
        self._pinned = PinnedBuffers(pin=True) if dense and streaming(device) else None
        self._thread = thread_pool(1, "gradscope-writer")
        self._last: Future[None] | None = None

    @property
    def completed(self) -> int:
        """The number of rows in the file."""
        return self._writer.completed

    def append(
        self, rows: FinishedBatch, states: States | None = None, *, proved: bool = False
    ) -> None:
        """Wait for the previous batch, and start writing this batch; `go_back` keeps `proved` ones.

        The thread may form dense rows. The states must not change until the batch is written.
        """
        self.wait()
        alike = copy_context().run  # gives the thread the caller's context variables
        mark = self._stream.mark()
        self._last = self._thread.submit(alike, self._write, rows, states, mark, proved)

    def go_back(self) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """Wait for the last batch; see `Writer.go_back`."""
        self.wait()
        return self._writer.go_back()

    def finish(self, **results: Any) -> None:
        """Wait for the last batch, and complete the file; see `Writer.finish`."""
        self.wait()
        self._writer.finish(**results)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with (
            deferring_signals()
        ):  # a second Ctrl-C must wait until the thread no longer uses the file
            self._thread.shutdown()
        if kind is None:
            self.wait()

    def _write(self, rows: FinishedBatch, states: States | None, mark: Any, proved: bool) -> None:
        with torch.no_grad(), self._stream.use(mark):  # grad mode is local to a thread
            taken = rows if self._pinned is None else dense_on_host(rows, self._pinned)
            self._writer.append(taken, states, proved=proved)

    def wait(self) -> None:
        """Wait until the last batch is written; after that, its states may be changed."""
        if self._last is None:
            return
        try:
            self._last.result()
        except Exception as error:
            if not is_shortage(error):
                raise
            raise OutputError(
                f"memory ran out while rows were written: {first_line(error)}",
                remedy="Run gradscope compute again with --resume, and a smaller `batch_size` or "
                "`memory`.",
            ) from error
        self._last = None


class CopyStream:
    """A separate GPU stream for the work of a thread; no effect on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._module = streaming(device)
        self._stream = self._module and self._module.Stream(device)

    def mark(self) -> Any:
        """Return an event for `use` to wait for: the end of the calling thread's work so far."""
        if self._stream is None:
            return None
        return self._module.current_stream(self._stream.device).record_event()

    @contextmanager
    def use(self, mark: Any = None) -> Iterator[None]:
        """Use the stream in the body, and wait for its work at the end."""
        if self._stream is None:
            yield
            return
        with self._module.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            yield
            self._stream.synchronize()

    def hand_over(self, batch: Batch) -> None:
        """Record the batch's tensors as used by the calling thread's stream."""
        if self._stream is not None:
            shared = [w.value for w in wholes(batch.inputs)]
            for t in tensors((batch.inputs, batch.targets, shared)):
                t.record_stream(self._module.current_stream(self._stream.device))


def streaming(device: torch.device) -> Any:
    """Return torch's module of the device if it has streams (CUDA, XPU), else None."""
    module = accelerator_module(device)
    return module if hasattr(module, "Stream") else None


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch; from the host to a GPU through pinned memory, asynchronously.

    Tensors are made contiguous first, because pinned memory cannot hold expanded tensors.
    """
    if streaming(device) is None:
        return batch.to(device, None)

    def move(t: Tensor) -> Tensor:
        if t.device.type != "cpu":
            return t.to(device)
        if t.layout != torch.strided:
            return t.to(device)
        return t.contiguous().pin_memory().to(device, non_blocking=True)

    return batch.map(move, whole=True)


class PinnedBuffers:
    """Two alternating host buffers for each dtype: one is filled while one is written."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin  # pinning needs a GPU
        self._buffers: dict[torch.dtype, list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory; the second next call with the same dtype reuses it."""
        buffers = self._buffers.setdefault(dtype, [torch.empty(0, dtype=dtype)] * 2)
        buffer, size = buffers.pop(0), prod(shape)
        if buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, pin_memory=self._pin)
        buffers.append(buffer)
        return buffer[:size].view(shape)


@dataclass(frozen=True, eq=False)
class HostBlock(DerivedBlock):
    """Gradients on a GPU whose dense form (n, *shape) is copied to host buffers."""

    pinned: PinnedBuffers

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape) in a buffer of `pinned`; `out` is ignored."""
        return self._values(self.base.dense())

    def _values(self, base: Tensor) -> Tensor:
        host = self.pinned.take(tuple(base.shape), base.dtype)
        host.copy_(base, non_blocking=True)
        if module := streaming(base.device):
            module.current_stream(base.device).synchronize()
        return host


def dense_on_host(rows: FinishedBatch, pinned: PinnedBuffers) -> FinishedBatch:
    """Return rows whose dense form is copied to the host through `pinned`."""

    def moved(gradients: Gradients | None) -> Gradients | None:
        return gradients and gradients.map(lambda block: HostBlock(block, pinned))

    return replace(rows, chains=tuple(map(moved, rows.chains)))
