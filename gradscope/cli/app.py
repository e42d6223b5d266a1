"""The application and its commands.

Nothing heavy is imported here or in the modules of the commands: `gradscope --help` answers
without torch.
"""

from typing import Annotated

import typer

from gradscope.cli import stopping
from gradscope.cli.check import check
from gradscope.cli.command import Command, show, show_stop
from gradscope.cli.compare import compare
from gradscope.cli.compute import compute
from gradscope.cli.export import export
from gradscope.cli.init import init
from gradscope.cli.listing import list_
from gradscope.cli.merge import merge
from gradscope.cli.stats import stats
from gradscope.cli.streams import written
from gradscope.core.stops import Stopped
from gradscope.errors import GradscopeError

app = typer.Typer(
    name="gradscope",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Command)(init)
app.command(cls=Command)(check)
app.command(cls=Command)(compute)
app.command(cls=Command)(merge)
app.command(cls=Command)(compare)
app.command(cls=Command)(stats)
app.command(cls=Command)(export)
app.command("list", cls=Command)(list_)


def execute() -> int:
    """Run the command line, and return the exit code of DESIGN's table."""
    try:
        with written():
            app(prog_name="gradscope")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except GradscopeError as error:
        return show(error)
    except Stopped as stop:
        return show_stop(stop)
    return 0


def run() -> int:
    """Run the command line within another program, which finds its signals handled as before."""
    with stopping.restored():
        stopping.at_once()
        return execute()


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
    a disagreement, 6 output, 7 finished but some samples or numbers are not finite, 130/143
    interrupted.
    """
