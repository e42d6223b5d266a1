"""Ctrl-C and SIGTERM: at once as long as there is nothing to keep, then by unwinding.

Modules that are half imported do not survive an exception, and some of torch's swallow it. A stop
passes through the user's code, and is no error of theirs.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import _exit  # as it is before anybody takes its place
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN = 1.0  # seconds; what passes signals on to its children often sends them twice
_Handler = Callable[[int, FrameType | None], object] | int

_code: int | None = None  # of the command that this process was, once it is done
_shuts_down = True


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived; it unwinds, so that what is finished is kept."""

    def __init__(self, number: int, word: str | None = None) -> None:
        super().__init__(number)
        self.number = number  # the signal
        self.word = word  # what there is to say about it


class _Unwinding:
    """Handles a signal by raising `Stopped`, once; a later signal ends the process."""

    def __init__(self) -> None:
        self.arrived = 0  # the signal that came
        self._at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.arrived:
            self.arrived, self._at = number, time.monotonic()
            raise Stopped(number)
        if time.monotonic() - self._at > _AGAIN:
            _leave("stopped at once\n", 128 + number)


class _Leaving:
    """Handles a signal by saying a word and ending the process with `code`, or the signal's."""

    def __init__(self, word: str, code: int | None = None) -> None:
        self._word, self._code = word, code

    def __call__(self, number: int, frame: FrameType | None) -> None:
        _leave(self._word, 128 + number if self._code is None else self._code)


def exit_on_signal() -> None:
    """From here on, let a signal end the process where it is."""
    _handle(_Leaving("stopped before anything was computed\n"))


def raise_on_signal() -> None:
    """From here on, let a signal raise `Stopped`."""
    _handle(_Unwinding())


def exit_with(code: int) -> None:
    """From here on, let a signal end the process with the code of the command, which is done.

    What is left is to wait for threads of the user's own, and for the interpreter to shut down.
    """
    global _code
    _handle(_Leaving("", code))
    _code = code


def without_shutdown() -> None:
    """Let the process of a command that is done end before the interpreter shuts down.

    Gloo's threads may still let go of the last tensors then, for which they need an interpreter;
    they end with their group, and a model that fully_shard has divided keeps it.
    """
    global _shuts_down
    _shuts_down = False


def register_end() -> None:
    """Prepare for the time when the interpreter has called what others have asked it to call."""
    atexit.register(_end)


def _end() -> None:
    _handle(signal.SIG_IGN)
    if _code is not None and not _shuts_down:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, or nobody is there to read it
                stream.flush()
        _exit(_code)


@contextmanager
def restore_handlers() -> Iterator[None]:
    """Leave the handlers as they were before the body."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # as another language may have set it
                signal.signal(number, handler)


@contextmanager
def stop_message(message: Callable[[], str]) -> Iterator[None]:
    """Raise `Stopped` with a message when a signal stops the body, whatever the body raises."""
    try:
        yield
    except BaseException as error:
        stop = stop_cause(error)
        if stop is None:
            raise
        raise Stopped(stop.number, stop.word or message()) from None


def raise_pending() -> None:
    """Raise `Stopped` if a signal has raised it and the user's code has swallowed it."""
    for handler in map(signal.getsignal, _SIGNALS):
        if isinstance(handler, _Unwinding) and handler.arrived:
            raise Stopped(handler.arrived)


def is_stop(error: BaseException) -> bool:
    """Whether an exception comes from outside, and not from the code that it passes through.

    A `KeyboardInterrupt` is Ctrl-C only in the main thread, and only where SIGINT has a handler
    that raises one: the command line's own do not.
    """
    if not isinstance(error, KeyboardInterrupt):
        return isinstance(error, Stopped)
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    return main and callable(handler) and not isinstance(handler, _Unwinding | _Leaving)


def stop_cause(error: BaseException) -> Stopped | None:
    """Return the stop that an exception was raised in answer to, if it was."""
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
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, handler)


def _leave(word: str, code: int) -> None:
    with suppress(OSError):  # nobody may be there to read it
        os.write(2, word.encode())
    _exit(code)
