"""Ctrl-C and SIGTERM: exit at once while there is no result, later unwind by an exception.

Half-imported modules do not survive an exception, and some modules of torch swallow it. An
exception for a signal passes through the user's code, but is not an error of that code.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import _exit  # the original, before anybody replaces it
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN = 1.0  # seconds; parents that forward signals often send them twice
_Handler = Callable[[int, FrameType | None], object] | int

_code: int | None = None  # exit code of the finished command
_shuts_down = True


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived. The exception unwinds, so that finished results are kept."""

    def __init__(self, number: int, word: str | None = None) -> None:
        super().__init__(number)
        self.number = number  # the signal
        self.word = word  # the message for the user


class _Unwinding:
    """Handles a signal by raising `Stopped`, once; a later signal ends the process."""

    def __init__(self) -> None:
        self.arrived = 0  # the first signal
        self._at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.arrived:
            self.arrived, self._at = number, time.monotonic()
            raise Stopped(number)
        if time.monotonic() - self._at > _AGAIN:
            _leave("stopped at once\n", 128 + number)


class _ExitHandler:
    """Handles a signal: prints a message and exits with `code`, or with the signal's code."""

    def __init__(self, word: str, code: int | None = None) -> None:
        self._word, self._code = word, code

    def __call__(self, number: int, frame: FrameType | None) -> None:
        _leave(self._word, 128 + number if self._code is None else self._code)


def exit_on_signal() -> None:
    """From now on, exit at once on a signal."""
    _handle(_ExitHandler("stopped before anything was computed\n"))


def raise_on_signal() -> None:
    """From now on, raise `Stopped` on a signal."""
    _handle(_Unwinding())


def exit_with(code: int) -> None:
    """From now on, exit on a signal with the code of the finished command.

    The process still waits for the user's threads and for the shutdown of the interpreter.
    """
    global _code
    _handle(_ExitHandler("", code))
    _code = code


def without_shutdown() -> None:
    """Exit a finished command before the interpreter shuts down.

    During the shutdown, Gloo's threads may release their last tensors, which needs an interpreter.
    These threads end with their process group, and a model sharded by fully_shard keeps the group
    alive.
    """
    global _shuts_down
    _shuts_down = False


def register_end() -> None:
    """Register `_end` to run last: after all other atexit functions."""
    atexit.register(_end)


def _end() -> None:
    _handle(signal.SIG_IGN)
    if _code is not None and not _shuts_down:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, or without a reader
                stream.flush()
        _exit(_code)


@contextmanager
def restore_handlers() -> Iterator[None]:
    """Restore the signal handlers after the body."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by another language
                signal.signal(number, handler)


@contextmanager
def stop_message(message: Callable[[], str]) -> Iterator[None]:
    """Raise `Stopped` with a message if a signal caused the exception of the body."""
    try:
        yield
    except BaseException as error:
        stop = stop_cause(error)
        if stop is None:
            raise
        raise Stopped(stop.number, stop.word or message()) from None


def raise_pending() -> None:
    """Raise `Stopped` if a signal raised it and the user's code swallowed it."""
    for handler in map(signal.getsignal, _SIGNALS):
        if isinstance(handler, _Unwinding) and handler.arrived:
            raise Stopped(handler.arrived)


def is_stop(error: BaseException) -> bool:
    """Whether an exception comes from a signal, and not from the code that it passes through.

    A `KeyboardInterrupt` is Ctrl-C only in the main thread, and only if the handler of SIGINT
    raises it. The handlers of the command line do not.
    """
    if not isinstance(error, KeyboardInterrupt):
        return isinstance(error, Stopped)
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    return main and callable(handler) and not isinstance(handler, _Unwinding | _ExitHandler)


def stop_cause(error: BaseException) -> Stopped | None:
    """Return the `Stopped` that led to an exception, or None."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        if isinstance(found, Stopped):
            return found
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return None


def _handle(handler: _Handler) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # set by nohup
            signal.signal(number, handler)


def _leave(word: str, code: int) -> None:
    with suppress(OSError):  # there may be no reader
        os.write(2, word.encode())
    _exit(code)
