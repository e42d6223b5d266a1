"""Ctrl-C and SIGTERM wait until HDF5 is done: an exception inside its calls would break it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def deferred() -> Iterator[None]:
    """Let the handlers of SIGINT and SIGTERM, which may raise, run after the body."""
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
        for known, handler in handlers.items():
            signal.signal(known, handler)
        for came, frame in arrived:
            handlers[came](came, frame)
