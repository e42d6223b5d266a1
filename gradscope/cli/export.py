"""`gradscope export`: numbers of a result file, in other programs' formats."""

from pathlib import Path
from typing import Annotated

import typer

from gradscope.cli import options
from gradscope.config import parse_samples
from gradscope.core import stops


def export(
    file: Annotated[Path, typer.Argument(metavar="RESULT.h5", help="A result file.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|FOLDER",
            help="Its ending is the format: .npy, .safetensors, .parquet or .csv (the sample "
            "table); a folder takes one .npy a parameter.",
        ),
    ],
    chain: Annotated[
        str | None,
        typer.Option("--chain", metavar="K|TEXT", help="Its number from 0, or its text [0]."),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            metavar="GLOB",
            help="Only parameters of these names; repeatable. In a table: their norms, too.",
        ),
    ] = None,
    samples: Annotated[str | None, options.flag("compute", "samples")] = None,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
) -> None:
    """Write rows, aggregates or the sample table of a result file for other programs."""
    from gradscope.report import console, render_export
    from gradscope.storage import export as write
    from gradscope.storage import open_file

    stops.unwinding()
    chosen = None if samples is None else parse_samples(samples)
    with stops.told(lambda: "stopped; nothing was written"), open_file(file) as opened:
        found = write(opened, output, chain, parameter or (), chosen, overwrite=overwrite)
    if json:
        files = [vars(one) for one in found]
        options.print_json({"schema": "gradscope.export", "version": 1, "files": files})
    else:
        render_export(found, console())
