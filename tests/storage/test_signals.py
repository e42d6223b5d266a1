"""Signals that arrive while HDF5 is at work are handled after it."""

import os
import signal
import threading
from pathlib import Path

import pytest

from gradscope.storage import deferring_signals, open_writer
from tests.storage.example import PLAN, load, rows, same, write


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end(number: signal.Signals) -> None:
    seen: list[str] = []
    before = signal.signal(number, lambda *_: seen.append("handled"))
    try:
        with deferring_signals():
            os.kill(os.getpid(), number)
            seen.append("body done")
        assert seen == ["body done", "handled"]
        os.kill(os.getpid(), number)
        assert seen[2:] == ["handled"]
    finally:
        signal.signal(number, before)


def test_other_threads_are_left_alone() -> None:
    found: list[object] = []

    def body() -> None:
        with deferring_signals():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


def test_ctrl_c_within_a_write_keeps_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "whole.h5")
    plain = os.pwrite

    def interrupted(descriptor: int, data: memoryview, at: int) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return plain(descriptor, data, at)

    with (
        pytest.raises(KeyboardInterrupt),
        open_writer(tmp_path / "o.h5", PLAN) as writer,
        monkeypatch.context() as patch,
    ):
        patch.setattr(os, "pwrite", interrupted)
        writer.append(rows(0, 16), writer.states)
    with open_writer(tmp_path / "o.h5", PLAN, resume=True) as writer:
        assert writer.completed == 16
    (tmp_path / "o.h5.part").unlink()
    write(tmp_path / "o.h5")
    assert same(load(tmp_path / "o.h5"), load(tmp_path / "whole.h5"))
