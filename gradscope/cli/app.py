"""The application: its commands, and what becomes of an error.

Nothing heavy is imported here or in the modules of the commands: `gradscope --help` answers
without torch.
"""

import signal
import sys
from typing import Annotated

import typer

from gradscope.cli import stopping
from gradscope.cli.check import check
from gradscope.cli.compare import compare
from gradscope.cli.compute import compute
from gradscope.cli.export import export
from gradscope.cli.init import init
from gradscope.cli.listing import list_
from gradscope.cli.merge import merge
from gradscope.cli.stats import stats
from gradscope.cli.streams import written
from gradscope.core.stops import Terminated
from gradscope.errors import GradscopeError

app = typer.Typer(
    name="gradscope",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(init)
app.command()(check)
app.command()(compute)
app.command()(merge)
app.command()(compare)
app.command()(stats)
app.command()(export)
app.command("list")(list_)


def main() -> None:
    """Run the command line and exit with the code of DESIGN's table."""
    try:
        with stopping.at_once(), written():
            app()
    except GradscopeError as error:
        from gradscope.report.console import console
        from gradscope.report.errors import render_error

        render_error(error, console(stderr=True))
        sys.exit(error.exit_code)
    except Terminated:
        sys.exit(128 + signal.SIGTERM)


def _version(asked: bool) -> None:
    if asked:
        from gradscope import __version__

        typer.echo(f"gradscope {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Per-sample gradients of PyTorch models, and the expectation of their transformation.

    Exit codes: 0 done, 1 a bug in gradscope, 2 usage or spec, 3 input, 4 refused, 5 compare found
    a disagreement, 6 output, 7 finished but some samples are not finite, 130/143 interrupted.
    """
