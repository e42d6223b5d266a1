"""Loading, computing and writing at the same time: one thread ahead of the computation, one behind.

Each of them is at most one batch away from it, and whatever goes wrong in it is raised where its
result is asked for. Signals reach the main thread only, which waits for the others before it goes.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from gradscope.core.batch import Batch
from gradscope.core.locate import first_line
from gradscope.core.shortage import is_shortage, started
from gradscope.errors import OutputError
from gradscope.run.transfer import Lane, Pinned, on_host
from gradscope.storage import Rows
from gradscope.storage.complete import Look
from gradscope.storage.plan import States
from gradscope.storage.signals import deferred


class Appending(Protocol):
    """What a run gives its batches to; see `storage.Writer`."""

    @property
    def completed(self) -> int:
        """The number of rows in the file."""

    def append(self, rows: Rows, states: States | None = None, *, proved: bool = False) -> None:
        """Take one batch, up to which all is to be found again where it was proved."""

    def go_back(self) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """Go back to the last batch that was proved; return how many rows that is, and states."""

    def finish(
        self,
        results: Mapping[int, Mapping[str, Tensor]],
        certificate: Mapping[str, Any],
        norm_attributes: Mapping[str, Mapping[str, float]] | None = None,
        states: States | None = None,
        look: Look | None = None,
    ) -> None:
        """Complete the file."""


def ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches; while one is in use, the next one is loaded in another thread.

    Args:
        batches: Loads a batch when it is asked for the next one.
        device: Where batches go.
    """
    lane = Lane(device)

    def load() -> Batch | None:
        with lane.entered():
            return next(batches, None)

    with started(1, "gradscope-loader") as thread:
        coming = thread.submit(load)
        while (batch := coming.result()) is not None:
            coming = thread.submit(load)
            lane.hand_over(batch)
            yield batch


class Behind:
    """A writer that writes in a thread of its own: in order, one batch while the next is computed.

    Leaving the context waits for what is being written. A batch that could not be written is
    raised by the next `append` or `finish`, or on leaving.

    Args:
        writer: Used by one thread at a time.
        device: Where rows come from.
        dense: Rows are stored in their dense form, so that they may be brought in it.
    """

    def __init__(self, writer: Appending, device: torch.device, *, dense: bool) -> None:
        self._writer, self._lane = writer, Lane(device)
        self._pinned = Pinned(pin=True) if dense and device.type == "cuda" else None
        self._thread = started(1, "gradscope-writer")
        self._last: Future[None] | None = None

    @property
    def completed(self) -> int:
        """The number of rows in the file by now."""
        return self._writer.completed

    def append(self, rows: Rows, states: States | None = None, *, proved: bool = False) -> None:
        """Wait for the batch before, and begin to write this one.

        Args:
            rows: The batch's rows; they may be made dense only now.
            states: The reducers' states after it, which nobody changes any more.
            proved: Whether `go_back` may go back to it.
        """
        self._wait()
        alike = copy_context().run  # a thread has no context of its own caller's
        mark = self._lane.mark()
        self._last = self._thread.submit(alike, self._write, rows, states, mark, proved)

    def go_back(self) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """Wait for the last batch, and go back to the last one that was proved."""
        self._wait()
        return self._writer.go_back()

    def finish(
        self,
        results: Mapping[int, Mapping[str, Tensor]],
        certificate: Mapping[str, Any],
        norm_attributes: Mapping[str, Mapping[str, float]] | None = None,
        states: States | None = None,
        look: Look | None = None,
    ) -> None:
        """Wait for the last batch, and complete the file."""
        self._wait()
        self._writer.finish(results, certificate, norm_attributes, states, look)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with deferred():  # a second Ctrl-C waits, too: nobody else may touch the file meanwhile
            self._thread.shutdown()
        if kind is None:
            self._wait()

    def _write(
        self, rows: Rows, states: States | None, mark: torch.cuda.Event | None, proved: bool
    ) -> None:
        with torch.no_grad(), self._lane.entered(mark):  # grad mode is a thread's own
            taken = rows if self._pinned is None else on_host(rows, self._pinned)
            self._writer.append(taken, states, proved=proved)

    def _wait(self) -> None:
        if self._last is None:
            return
        try:
            self._last.result()
        except Exception as error:
            if not is_shortage(error):
                raise
            raise OutputError(
                f"memory ran out while rows were written: {first_line(error)}",
                remedy="Go on with --resume, and a smaller --batch-size or --memory.",
            ) from error
        self._last = None
