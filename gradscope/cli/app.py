"""The application, its commands, and the handling of their errors.

This module and the modules of the commands do not import torch, so `gradscope --help` is fast.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from gradscope.cli.attribute import attribute, validate
from gradscope.cli.before import check, init, list_
from gradscope.cli.compare import compare
from gradscope.cli.compute import compute, merge
from gradscope.cli.options import FEW_OPTIONS, GROUPS, flags_of, group_of, naming_flags
from gradscope.cli.results import export, stats, view
from gradscope.errors import GradscopeError, SpecError
from gradscope.process import stops, streams
from gradscope.process.stops import Stopped

_SHORT = 4  # letters of a name, at least: --data is the argument DATASET
START = """\
gradscope computes the gradient of each sample of a PyTorch model: E[T(∇f)].

  Start from a checkpoint and a data file:
    gradscope init weights.pt data.npz -o run.toml
    gradscope check --config run.toml

  Compute the gradient of each sample, or any expectation of them:
    gradscope compute --config run.toml -t "clip:max_norm=1 | mean" -o out.h5

  See which samples have the largest gradients, and look at them:
    gradscope stats out.h5
    gradscope view out.h5

  Find the training samples that caused a prediction:
    gradscope attribute out.h5 query.npz -o scores.h5

  Compare the backends, or your own per-sample gradients, with a float64 loop:
    gradscope compare --config run.toml --against my_code.py:my_gradients

Every command: gradscope --help. Its options: gradscope COMMAND --help.
In Python: gradscope.Scope(model, "cross_entropy").norms(inputs, targets)"""


class Command(TyperCommand):
    """A command that keeps stdout for results and turns errors into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            typer.Exit: The command failed, and the error has been printed.
        """
        with streams.reserve_stdout(), _no_silent_exit():
            try:
                return super().invoke(ctx)
            except typer.Exit:
                raise
            except BaseException as error:
                raise typer.Exit(_code(error, flags_of(self))) from error

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command; click's message does not say that a name is an argument.

        Raises:
            SpecError: An argument is given by name, as `--checkpoint w.pt`.
        """
        parameters = self.get_params(ctx)
        known = {flag for parameter in parameters for flag in parameter.opts}
        names = [str(p.name) for p in parameters if p.param_type_name == "argument"]
        for flag in (word.partition("=")[0] for word in takewhile("--".__ne__, args)):
            word = flag.removeprefix("--")
            if flag in known or flag == word or len(word) < _SHORT:
                continue
            if any(name.startswith(word) for name in names):
                usage = " ".join(self.collect_usage_pieces(ctx))
                raise SpecError(
                    f"{flag} is not an option but an argument, which is given without a name",
                    remedy=f"Write gradscope {ctx.info_name} {usage}",
                )
        found: list[str] = super().parse_args(ctx, args)
        return found

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options in groups, in the order of `GROUPS`."""
        shown: list[tuple[str, tuple[str, str]]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                group = "Arguments" if argument else group_of(str(parameter.name))
                shown.append((group, record))
        if len(shown) <= FEW_OPTIONS:
            shown = [("Options" if group in GROUPS else group, each) for group, each in shown]
        for title in ("Arguments", "Options", *GROUPS):
            records = [record for group, record in shown if group == title]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the pieces of the usage line, without hidden arguments."""
        return [piece for piece in super().collect_usage_pieces(ctx) if piece != "[]..."]


def _summary(command: Callable[..., None]) -> str:
    """Return the first paragraph of a command's help; typer would use its first line only."""
    return " ".join((command.__doc__ or "").partition("\n\n")[0].split())


app = typer.Typer(
    name="gradscope",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (init, check, compute, merge, compare, attribute, validate, stats, view, export):
    app.command(cls=Command, short_help=_summary(command))(command)
app.command("list", cls=Command, short_help=_summary(list_))(list_)


def execute() -> int:
    """Run the command line, and return its exit code."""
    try:
        with streams.report_write_errors():
            app(prog_name="gradscope")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except GradscopeError as error:
        return show_error(error)
    except Stopped as stop:
        return _show_stop(stop)
    return 0


def run() -> int:
    """Run the command line within another program, and restore its signal handlers."""
    with stops.restore_handlers():
        stops.exit_on_signal()
        return execute()


def show_error(error: GradscopeError) -> int:
    """Print an error on stderr, and return its exit code."""
    from gradscope.report.console import console, render_error

    render_error(error, console(stderr=True))
    return error.exit_code


def _show_stop(stop: Stopped) -> int:
    """Print that a signal stopped the command, and return its exit code."""
    typer.echo(stop.word or "stopped", file=streams.err())
    return 128 + stop.number


def _code(error: BaseException, flags: Mapping[str, str]) -> int:
    """Print an error and return its exit code; an unknown error (a bug) is raised again.

    Args:
        error: The exception that a command raised.
        flags: The command's flags by their names in Python, for the message.
    """
    stop = Stopped(signal.SIGINT) if stops.is_stop(error) else None
    stop = stops.stop_cause(error) or stop
    if stop is not None:
        return _show_stop(stop)
    if isinstance(error, GradscopeError):
        return show_error(naming_flags(error, flags))
    found: GradscopeError | None = None
    with suppress(ImportError):  # another torch may lack what these import
        from gradscope.model.releases import missing_name, untested

        for note in filter(None, [untested()]):
            error.add_note(note)
        found = missing_name(error)
        from gradscope.sources.code import blamed

        found = found or blamed(error)
    if found is None:
        raise error
    return show_error(naming_flags(found, flags))


@contextmanager
def _no_silent_exit() -> Iterator[None]:
    """Make os._exit raise SystemExit in this process, so that it cannot end silently."""
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


def _version(asked: bool) -> None:
    if asked:
        from gradscope.version import VERSION

        typer.echo(f"gradscope {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Compute the gradient of each sample of a PyTorch model, and expectations of transforms.

    Exit codes: 0 done, 1 bug in gradscope, 2 usage or run file, 3 input, 4 refused, 5 compare found
    a disagreement, 6 output, 7 numbers are not finite, 130/143 interrupted.
    """
    if context.invoked_subcommand is None:
        typer.echo(START)
        raise typer.Exit(2)
