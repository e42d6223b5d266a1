"""Loading, computing and writing at the same time: in order, complete, and the same to the bit."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradscope.blocks import DenseBlock, Gradients, OuterBlock
from gradscope.config import resolve
from gradscope.core.batch import Batch
from gradscope.errors import GradscopeError, OutputError
from gradscope.run import compute, prepare
from gradscope.run.overlap import (
    BackgroundWriter,
    CopyStream,
    HostBlock,
    PinnedBuffers,
    dense_on_host,
    prefetch,
    to_device,
)
from gradscope.storage import FinishedBatch
from tests.run.test_pipeline import SAMPLES as MODELS
from tests.run.test_pipeline import contents

CPU = torch.device("cpu")
PATIENCE = 30.0  # seconds until a test that hangs fails instead


def batch(k: int) -> Batch:
    return Batch.of(torch.full((2, 1), float(k)))


def rows(k: int, n: int = 2) -> FinishedBatch:
    ones = torch.ones(n)
    index = torch.full((n,), k)
    return FinishedBatch({"index": index, "loss": ones, "norm": ones, "finite": ones.bool()})


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    """Whatever other tests have left: of this one's threads, none is there at its end."""
    before = threading.enumerate()
    yield
    assert [t for t in threading.enumerate() if t.name.startswith("gradscope-")] == [
        t for t in before if t.name.startswith("gradscope-") and t.is_alive()
    ]


@pytest.mark.usefixtures("no_thread_stays")
def test_the_next_batch_is_loaded_while_one_is_in_use() -> None:
    loaded = [threading.Event() for _ in range(5)]

    def load() -> Iterator[Batch]:
        for k, event in enumerate(loaded):
            event.set()
            yield batch(k)

    seen = []
    for given in prefetch(load(), CPU):
        seen.append(int(given.inputs[0]))
        if len(seen) < 5:
            assert loaded[len(seen)].wait(PATIENCE)  # the next one
        assert not any(event.is_set() for event in loaded[len(seen) + 1 :])
    assert seen == [0, 1, 2, 3, 4]


def test_what_loading_raises_comes_in_its_place() -> None:
    def load() -> Iterator[Batch]:
        yield batch(0)
        raise GradscopeError("unreadable")

    found = prefetch(load(), CPU)
    assert int(next(found).inputs[0]) == 0
    with pytest.raises(GradscopeError, match="unreadable"):
        next(found)


@pytest.mark.usefixtures("no_thread_stays")
def test_nobody_loads_when_nobody_asks_any_more() -> None:
    found = prefetch((batch(k) for k in range(100)), CPU)
    next(found)
    found.close()  # type: ignore[attr-defined]


@dataclass
class Recorder:
    """A writer that waits to be let go, and may fail."""

    gate: threading.Event = field(default_factory=threading.Event)
    fail_at: int = -1
    error: Exception = field(default_factory=lambda: OutputError("the disk is full"))
    seen: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    finished: bool = False
    user: threading.Lock = field(default_factory=threading.Lock)

    @property
    def completed(self) -> int:
        return len(self.seen)

    def append(self, rows: FinishedBatch, states: Any = None, *, proved: bool = False) -> None:
        assert self.user.acquire(blocking=False), "two at a time"
        k = int(rows.samples["index"][0])
        self.begun.append(k)
        assert self.gate.wait(PATIENCE)
        assert not torch.is_grad_enabled()
        if k == self.fail_at:
            raise self.error
        self.seen.append(k)
        self.user.release()

    def finish(self, *results: object, **more: object) -> None:
        self.finished = True


@pytest.mark.usefixtures("no_thread_stays")
def test_computing_goes_on_while_a_batch_is_written() -> None:
    writer = Recorder()
    with BackgroundWriter(writer, CPU, dense=True) as background:
        background.append(rows(0))  # returns although the writer waits
        assert writer.seen == []
        threading.Timer(0.1, writer.gate.set).start()
        background.append(rows(1))  # waits for the one before
        assert writer.seen[:1] == [0]
        background.append(rows(2))
        background.finish(results={}, certificate={})
        assert writer.seen == [0, 1, 2]
        assert writer.finished


@pytest.mark.usefixtures("no_thread_stays")
def test_what_writing_raises_stops_the_run() -> None:
    writer = Recorder(fail_at=1)
    writer.gate.set()
    with (
        pytest.raises(OutputError, match="disk is full"),
        BackgroundWriter(writer, CPU, dense=True) as background,
    ):
        for k in range(5):
            background.append(rows(k))
    assert writer.begun == [0, 1]
    assert writer.seen == [0]
    with (
        pytest.raises(OutputError, match="disk is full"),
        BackgroundWriter(Recorder(writer.gate, 0), CPU, dense=True) as background,
    ):
        background.append(rows(0))  # the last one: raised on leaving


def test_leaving_waits_for_what_is_being_written_whatever_signals_come() -> None:
    writer = Recorder()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.2, writer.gate.set).start()

    with suppress(KeyboardInterrupt), BackgroundWriter(writer, CPU, dense=True) as background:
        background.append(rows(0))
        threading.Timer(0.2, interrupt).start()  # a second Ctrl-C, while the first is dealt with
        raise KeyboardInterrupt
    assert writer.seen == [0]


@pytest.fixture
def in_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system start no thread, so that nothing is done beside anything else."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch use two threads, whatever the tests run under."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


CHAINS = ["identity", "clip:max_norm=0.5", "mean", "second_moment", "norm | quantile:q=0.5"]


@pytest.mark.parametrize(
    ("name", "backend"),
    [("digits_cnn", "hooks"), pytest.param("poisson_pinn", "vmap", marks=pytest.mark.full)],
)
@pytest.mark.usefixtures("two_threads")
def test_overlap_changes_no_bit(
    name: str, backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options = {"transform": CHAINS, "samples": ":40", "batch_size": 9, "backend": backend}
    settings = resolve(MODELS / name / "run.toml", {"compute": options})
    compute(prepare(settings), tmp_path / "overlapped.h5")
    request.getfixturevalue("in_sequence")
    compute(prepare(settings), tmp_path / "plain.h5")
    plain = contents(tmp_path / "plain.h5")
    for key, value in contents(tmp_path / "overlapped.h5").items():
        np.testing.assert_array_equal(value, plain[key], err_msg=key)


def test_memory_that_runs_out_in_writing_is_one_clear_error() -> None:
    writer = Recorder(fail_at=0, error=MemoryError())
    writer.gate.set()
    with (
        pytest.raises(OutputError, match="memory ran out") as refusal,
        BackgroundWriter(writer, CPU, dense=True) as background,
    ):
        background.append(rows(0))
    assert "--resume" in str(refusal.value)


def test_rows_by_way_of_pinned_memory_are_the_same() -> None:
    """Without a GPU the memory is not pinned; the way of the rows is the same."""
    torch.manual_seed(0)
    outer = OuterBlock.matrix(torch.randn(8, 3, 4), torch.randn(8, 3, 5))
    dense = DenseBlock(torch.randn(8, 2, 2, dtype=torch.float64))
    given = replace(rows(0, 8), chains=(Gradients({"w": outer, "b": dense}), None))
    moved = dense_on_host(given, PinnedBuffers(pin=False))
    assert moved.chains[1] is None
    assert moved.chains[0] is not None
    for name, block in (("w", outer), ("b", dense)):
        found = moved.chains[0][name]
        assert isinstance(found, HostBlock)
        assert (found.n, found.shape, found.dtype) == (8, block.shape, block.dtype)
        for part in (slice(0, 8), slice(2, 5)):
            made = found.select(part).dense(torch.empty(0))
            np.testing.assert_array_equal(made, block.select(part).dense())


def test_the_cpu_needs_no_streams() -> None:
    stream = CopyStream(CPU)
    assert stream.mark() is None
    with stream.use(stream.mark()):
        given = to_device(batch(3), CPU)
    stream.hand_over(given)
    assert isinstance(given.inputs, Tensor)
    assert given.inputs.device == CPU
