"""`gradscope stats`: what is in a result file."""

from pathlib import Path
from typing import Annotated

import typer

from gradscope.cli import options


def stats(
    file: Annotated[Path, typer.Argument(metavar="OUT.h5", help="A result file.")],
    top: Annotated[
        int, typer.Option("--top", metavar="K", min=1, help="How many samples to list.")
    ] = 10,
    json: options.Json = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw to a png, svg or pdf.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one page with everything.")
    ] = None,
) -> None:
    """Summarise a result file: norms, parameters, the samples with the largest gradients."""
    from gradscope.report.console import console
    from gradscope.report.stats import render_stats
    from gradscope.stats import summarize
    from gradscope.storage import open_file

    with open_file(file) as opened:
        summary = summarize(opened, top=top)
    if plot is not None:
        from gradscope.report.plots import plot_stats

        plot_stats(summary, plot)
    if html is not None:
        from gradscope.report.html import write_html

        write_html(summary, html)
    if json:
        options.print_json(summary.to_json())
    else:
        render_stats(summary, console())
