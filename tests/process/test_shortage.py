"""Threads that run from the beginning, and work that is done without them."""

import threading

import pytest

from gradscope.process.shortage import InlineExecutor, thread_pool


def test_all_threads_run_and_each_can_wait_for_the_others() -> None:
    together = threading.Barrier(3, timeout=30)
    with thread_pool(3, "gradscope-test") as pool:
        mine = [t for t in threading.enumerate() if t.name.startswith("gradscope-test")]
        assert len(mine) == 3
        assert sorted(pool.map(lambda _: together.wait(), range(3))) == [0, 1, 2]
    assert not any(thread.is_alive() for thread in mine)


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_without_threads_work_is_done_in_place(begun: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, left = threading.Thread.start, [begun]

    def start(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        usual(thread)

    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", start)
    with thread_pool(3, "gradscope-test") as pool:
        assert isinstance(pool, InlineExecutor)
        assert threading.active_count() == before  # those that began have ended
        seen: list[int] = []
        future = pool.submit(seen.append, 3)
        assert seen == [3] and future.result() is None
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 // 0).result()


def test_an_interrupt_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, left = threading.Thread.start, [1]

    def start(thread: threading.Thread) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        usual(thread)

    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        thread_pool(2, "gradscope-test")
    assert threading.active_count() == before


def test_an_interrupt_is_not_kept_for_later() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with InlineExecutor() as pool, pytest.raises(KeyboardInterrupt):
        pool.submit(interrupted)
