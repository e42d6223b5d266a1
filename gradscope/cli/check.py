"""`gradscope check`: load, check, plan and prove, without computing or writing anything."""

import typer

from gradscope.cli import options
from gradscope.config import RunSpec
from gradscope.core import stops


@options.with_settings
def check(*, spec: RunSpec, json: options.Json = False, verbose: options.Verbose = False) -> None:
    """Load everything, prove the first batch, say what a run would cost; write nothing."""
    if spec.compute.verify == "never":
        spec = spec.computing(verify="first")
    from gradscope.report import render_inspection
    from gradscope.run import inspect, prepare

    stops.unwinding()
    found = inspect(prepare(spec))
    options.show(found, render_inspection, json=json, verbose=verbose)
    if found.first.nonfinite:
        raise typer.Exit(options.NONFINITE)
