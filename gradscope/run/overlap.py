"""Loading, computing and writing at the same time: one thread loads ahead, one writes behind.

Each of them is at most one batch away from it, and whatever goes wrong in it is raised where its
result is asked for. Signals reach the main thread only, which waits for the others before it goes.
To and from a GPU, each thread copies by pinned memory, on a stream of its own.
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

_ONE = "does not suffice for a single sample"
_FREE = (
    "Free memory and run the command again; or compute fewer `parameters` at a time, or in another "
    "`dtype`. A stopped gradscope compute continues with --resume."
)
_COUPLED = (
    "With own-loss coupling the answer depends on which samples share a batch, so it is not split. "
    "Give a smaller `batch_size`."
)


class BatchSize:
    """The number of samples computed at a time; halved for good whenever memory runs out.

    It cannot be where it is `fixed`: where the answer depends on who shares a batch.
    """

    def __init__(self, samples: int, *, fixed: bool = False) -> None:
        self.samples = self._first = samples
        self._fixed = fixed

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say about it."""
        if self.samples == self._first:
            return ()
        return (
            f"memory ran out with {self._first:,} samples at a time: "
            f"{self.samples:,} from there on",
        )

    def fitting(self, action: Callable[[int], T], most: int) -> T:
        """Return `action(n)` for the largest n up to `most` that memory suffices for.

        An action may be called again with a smaller n, so it keeps nothing unless it succeeds.
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
            gc.collect()  # a traceback may hold on to what the attempt had computed
            release_freed_memory()
            module = accelerator_module(torch.accelerator.current_accelerator())
            if hasattr(module, "empty_cache"):
                module.empty_cache()


def prefetch(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches; while one is in use, the next one is loaded in another thread."""
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


class RowWriter(Protocol):
    """Takes the batches of a run, in order: writes them to a file, or nowhere in a rehearsal."""

    @property
    def completed(self) -> int:
        """The number of rows written so far."""

    def append(
        self, rows: FinishedBatch, states: States | None = None, *, proved: bool = False
    ) -> None:
        """Take one batch and the reducers' states after it; `go_back` goes to one `proved`."""

    def wait(self) -> None:
        """Wait until the last batch is taken: then its states may be changed."""

    def go_back(self) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """Drop the batches after the last proved one; return how many rows and states are left."""

    def finish(self, **results: Any) -> None:
        """Complete the file; see `Writer.finish`."""


class BackgroundWriter:
    """A writer that writes in a thread of its own: in order, one batch while the next is computed.

    Leaving the context waits for what is being written. A batch that could not be written is
    raised by the next call, or on leaving. From a GPU, `dense` rows are brought in dense form.
    """

    def __init__(self, writer: Writer, device: torch.device, *, dense: bool) -> None:
        self._writer, self._stream = writer, CopyStream(device)
        self._pinned = PinnedBuffers(pin=True) if dense and streaming(device) else None
        self._thread = thread_pool(1, "gradscope-writer")
        self._last: Future[None] | None = None

    @property
    def completed(self) -> int:
        """The number of rows in the file by now."""
        return self._writer.completed

    def append(
        self, rows: FinishedBatch, states: States | None = None, *, proved: bool = False
    ) -> None:
        """Wait for the batch before, and begin to write this one; `go_back` goes to one `proved`.

        Its rows may be made dense only now; the reducers' states do not change until it is written.
        """
        self.wait()
        alike = copy_context().run  # a thread has no context of its own caller's
        mark = self._stream.mark()
        self._last = self._thread.submit(alike, self._write, rows, states, mark, proved)

    def go_back(self) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """Wait for the last batch, and go back to the last one that was proved."""
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
        ):  # a second Ctrl-C waits, too: nobody else may touch the file meanwhile
            self._thread.shutdown()
        if kind is None:
            self.wait()

    def _write(self, rows: FinishedBatch, states: States | None, mark: Any, proved: bool) -> None:
        with torch.no_grad(), self._stream.use(mark):  # grad mode is a thread's own
            taken = rows if self._pinned is None else dense_on_host(rows, self._pinned)
            self._writer.append(taken, states, proved=proved)

    def wait(self) -> None:
        """Wait until what was appended last is written: then its states may be changed."""
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
    """A stream for a thread's work on a GPU, beside the computation's; no effect on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._module = streaming(device)
        self._stream = self._module and self._module.Stream(device)

    def mark(self) -> Any:
        """Return what `entered` is to wait for: the calling thread's work so far."""
        if self._stream is None:
            return None
        return self._module.current_stream(self._stream.device).record_event()

    @contextmanager
    def use(self, mark: Any = None) -> Iterator[None]:
        """Work on the stream in the body; when that is left, the work is done."""
        if self._stream is None:
            yield
            return
        with self._module.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            yield
            self._stream.synchronize()

    def hand_over(self, batch: Batch) -> None:
        """Let the calling thread's stream use what was made on this one, and free it."""
        if self._stream is not None:
            shared = [w.value for w in wholes(batch.inputs)]
            for t in tensors((batch.inputs, batch.targets, shared)):
                t.record_stream(self._module.current_stream(self._stream.device))


def streaming(device: torch.device) -> Any:
    """Return torch's module of a device with streams of work, as CUDA and XPU have; else None."""
    module = accelerator_module(device)
    return module if hasattr(module, "Stream") else None


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch; from the host to a GPU by pinned memory, without waiting for it there.

    Pinned memory is as large as what a tensor spans, and cannot hold one number for several places.
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
    """Two host buffers for each dtype, handed out in turn: one is filled, one is written."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin  # without a GPU, pages cannot be pinned
        self._buffers: dict[torch.dtype, list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of any content, which stays untouched until the next but one is taken."""
        buffers = self._buffers.setdefault(dtype, [torch.empty(0, dtype=dtype)] * 2)
        buffer, size = buffers.pop(0), prod(shape)
        if buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, pin_memory=self._pin)
        buffers.append(buffer)
        return buffer[:size].view(shape)


@dataclass(frozen=True, eq=False)
class HostBlock(DerivedBlock):
    """Gradients on a GPU, whose dense form (n, *shape) goes to buffers in the host's memory."""

    pinned: PinnedBuffers

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
        if module := streaming(base.device):
            module.current_stream(base.device).synchronize()
        return host


def dense_on_host(rows: FinishedBatch, pinned: PinnedBuffers) -> FinishedBatch:
    """Return rows of which a writer takes the dense form by way of `pinned`."""

    def moved(gradients: Gradients | None) -> Gradients | None:
        return gradients and gradients.map(lambda block: HostBlock(block, pinned))

    return replace(rows, chains=tuple(map(moved, rows.chains)))
