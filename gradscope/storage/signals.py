"""Ctrl-C and SIGTERM wait until HDF5 is done: an exception inside its calls would break it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def deferred() -> Iterator[None]:
    """Let handlers of SIGINT and SIGTERM run after the body; only they can raise in a main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                handlers[number] = signal.signal(number, lambda *s: arrived.append(s))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handlers[number](number, frame)
