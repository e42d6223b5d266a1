"""Ctrl-C and SIGTERM: at once as long as there is nothing to keep, then by unwinding.

Modules that are half imported do not survive an exception, and some of torch's swallow it.
"""

import atexit
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from gradscope.core.stops import Leaving, Stopped, Unwinding, stop_behind

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], object] | int


def at_once() -> None:
    """From here on, let a signal end the process where it is."""
    _handle(Leaving("stopped before anything was computed\n"))


@contextmanager
def restored() -> Iterator[None]:
    """Leave the handlers as they were before the body."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # as another language may have set it
                signal.signal(number, handler)


def unwinding() -> None:
    """From here on, let a signal raise `Stopped`."""
    _handle(Unwinding())


def finished(code: int) -> None:
    """From here on, let a signal end the process with the code of the command, which is done.

    What is left is to wait for threads of the user's own, and for the interpreter to fold up. Where
    that has begun there are no handlers any more, and signals are ignored.
    """
    _handle(Leaving("", code))


def ignored_at_the_end() -> None:
    """Ignore signals when the interpreter has called what others have asked it to call."""
    atexit.register(_handle, signal.SIG_IGN)


@contextmanager
def told(message: Callable[[], str]) -> Iterator[None]:
    """Say what there is to say when a signal stops the body, also one that it answers by an error.

    Raises:
        Stopped: With the message.
    """
    try:
        yield
    except BaseException as error:
        stop = stop_behind(error)
        if stop is None:
            raise
        raise Stopped(stop.number, stop.word or message()) from None


def once_more() -> None:
    """Raise again what a signal has raised and somebody has swallowed.

    Raises:
        Stopped: A signal has come.
    """
    for handler in map(signal.getsignal, _SIGNALS):
        if isinstance(handler, Unwinding) and handler.arrived:
            raise Stopped(handler.arrived)


def _handle(handler: _Handler) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, handler)
