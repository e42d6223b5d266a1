"""A command as the application runs it: its streams, and what becomes of whatever is raised."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from gradscope.core import streams
from gradscope.core.stops import Stopped, is_stop, stop_behind
from gradscope.errors import GradscopeError


class Command(TyperCommand):
    """Keeps stdout for results, and makes one message and an exit code of every error."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            typer.Exit: It failed, and that has been told.
        """
        with streams.kept(), _no_silent_exit():
            try:
                return super().invoke(ctx)
            except typer.Exit:
                raise
            except BaseException as error:
                raise typer.Exit(_code(error)) from error


def show(error: GradscopeError) -> int:
    """Print an error on stderr, and return its exit code."""
    from gradscope.report import console, render_error

    render_error(error, console(stderr=True))
    return error.exit_code


def show_stop(stop: Stopped) -> int:
    """Say that a signal came, and return the exit code for it."""
    typer.echo(stop.word or "stopped", file=streams.err())
    return 128 + stop.number


def _code(error: BaseException) -> int:
    """Tell what was raised, and return the exit code; what is a bug of ours is raised again."""
    stop = Stopped(signal.SIGINT) if is_stop(error) else None
    stop = stop_behind(error) or stop
    if stop is not None:
        return show_stop(stop)
    if isinstance(error, GradscopeError):
        return show(error)
    from gradscope.sources.code import blamed

    found = blamed(error)
    if found is None:
        raise error
    return show(found)


@contextmanager
def _no_silent_exit() -> Iterator[None]:
    """Let os._exit raise SystemExit in this process: nobody is to leave without a word."""
    process, leave = os.getpid(), os._exit

    def stop(status: int) -> NoReturn:
        if os.getpid() != process:  # a fork that the user's code made
            leave(status)
        raise SystemExit(status)

    os._exit = stop
    try:
        yield
    finally:
        os._exit = leave
