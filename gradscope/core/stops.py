"""Being stopped from outside: it passes through the user's code, and is no error of theirs."""

import os
import signal
import threading
import time
from contextlib import suppress
from os import _exit  # as it is before anybody takes its place
from types import FrameType

_AGAIN = 1.0  # seconds; what passes signals on to its children often sends them twice


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived; it unwinds, so that what is finished is kept.

    Attributes:
        number: The signal.
        word: What there is to say about it.
    """

    def __init__(self, number: int, word: str | None = None) -> None:
        super().__init__(number)
        self.number = number
        self.word = word


class Unwinding:
    """Handles SIGINT and SIGTERM by raising `Stopped`, once; a later signal ends the process.

    Attributes:
        arrived: The signal that came, 0 for none.
    """

    def __init__(self) -> None:
        self.arrived = 0
        self._at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Stop what is running."""
        if not self.arrived:
            self.arrived, self._at = number, time.monotonic()
            raise Stopped(number)
        if time.monotonic() - self._at > _AGAIN:
            _leave("stopped at once\n", 128 + number)


class Leaving:
    """Handles SIGINT and SIGTERM by ending the process where it is.

    Args:
        word: What is said.
        code: The exit code; that of the signal when None.
    """

    def __init__(self, word: str, code: int | None = None) -> None:
        self._word, self._code = word, code

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """End the process."""
        _leave(self._word, 128 + number if self._code is None else self._code)


def _leave(word: str, code: int) -> None:
    with suppress(OSError):  # nobody may be there to read it
        os.write(2, word.encode())
    _exit(code)


def is_stop(error: BaseException) -> bool:
    """Whether an exception comes from outside, and not from the code that it passes through.

    A `KeyboardInterrupt` is Ctrl-C only in the main thread, and only where SIGINT has a handler
    that raises one: the command line's own do not.
    """
    if not isinstance(error, KeyboardInterrupt):
        return isinstance(error, Stopped)
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    return main and callable(handler) and not isinstance(handler, Unwinding | Leaving)


def stop_behind(error: BaseException) -> Stopped | None:
    """Return the stop that an exception was raised in answer to, if it was."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        if isinstance(found, Stopped):
            return found
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return None
