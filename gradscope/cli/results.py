"""What is done with results: `gradscope stats` and `gradscope export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli import options
from gradscope.config import parse_samples
from gradscope.core import stops
from gradscope.errors import SpecError

if TYPE_CHECKING:
    from gradscope.stats import Difference, History, Summary


def stats(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="OUT.h5 [OTHER.h5]",
            help="A result file, two to compare, or the history of a training (*.jsonl).",
        ),
    ],
    top: Annotated[
        int, typer.Option("--top", metavar="K", min=1, help="How many samples to list.")
    ] = 10,
    nearest: Annotated[
        int | None,
        typer.Option("--nearest", metavar="I", help="List the neighbours of sample I."),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option("--lr", metavar="RATE", help="The learning rate, for a batch size."),
    ] = None,
    clip: Annotated[
        list[float] | None,
        typer.Option("--clip", metavar="NORM", help="Say how many samples it clips; repeatable."),
    ] = None,
    rows: Annotated[
        bool,
        typer.Option("--rows/--no-rows", help="Whether to read the stored gradients."),
    ] = True,
    json: options.Json = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw to a png, svg or pdf.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one page with everything.")
    ] = None,
) -> None:
    """Summarise a result file: norms, noise, parameters, classes, samples that stand out."""
    own = {"nearest": nearest, "learning_rate": lr, "clip": clip or []}
    found = _found(files, own, top=top, rows=rows)
    if plot is not None:
        from gradscope.report import plot_stats

        plot_stats(found, plot)
    if html is not None:
        from gradscope.report import write_html

        write_html(found, html)
    from gradscope.report import render

    options.show(found, render, json=json)


def _found(
    files: list[Path], own: dict[str, Any], *, top: int, rows: bool
) -> "Summary | Difference | History":
    """Return what there is to say; `own` holds the options that only one result file takes."""
    history = any(file.suffix == ".jsonl" for file in files)
    if len(files) > 2 or (history and len(files) > 1):
        raise SpecError(
            f"{len(files)} files were given",
            remedy="Give one result file, two to compare, or one history (*.jsonl).",
        )
    asked = [name for name, value in own.items() if value not in (None, [])]
    if asked and (history or len(files) == 2):
        option = "lr" if asked[0] == "learning_rate" else asked[0]
        raise SpecError(f"--{option} is for one result file", remedy="Leave it out.")
    from gradscope.stats import difference, read_history, summarize
    from gradscope.storage import open_file

    stops.unwinding()
    if history:
        return read_history(files[0])
    with open_file(files[0]) as first:
        if len(files) == 1:
            return summarize(first, top=top, rows=rows, **own)
        with open_file(files[1]) as second:
            return difference(first, second, top=top, rows=rows)


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
    from gradscope.report import render_export
    from gradscope.storage import export as write
    from gradscope.storage import open_file

    stops.unwinding()
    chosen = None if samples is None else parse_samples(samples)
    with stops.told(lambda: "stopped; nothing was written"), open_file(file) as opened:
        found = write(opened, output, chain, parameter or (), chosen, overwrite=overwrite)
    document = {"schema": "gradscope.export", "version": 1, "files": [vars(one) for one in found]}
    options.show(document, lambda _, console: render_export(found, console), json=json)
