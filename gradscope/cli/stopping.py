"""Ctrl-C and SIGTERM: at once as long as there is nothing to keep, then by unwinding.

Modules that are half imported do not survive an exception, and some of torch's swallow it.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from gradscope.core.stops import Terminated

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def at_once() -> Iterator[None]:
    """Until `unwinding` is called in the body, let a signal end the process where it is."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _handle(_leave, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def unwinding() -> None:
    """From here on, let a signal raise `KeyboardInterrupt` or `Terminated`."""
    _handle(signal.default_int_handler, _terminate)


def _handle(*handlers: Callable[[int, FrameType | None], object]) -> None:
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, handler)


@contextmanager
def told(message: Callable[[], str]) -> Iterator[None]:
    """Say what there is to say when a signal stops the body."""
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        typer.echo(message(), err=True)
        raise


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped before anything was computed\n")
    os._exit(128 + number)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
