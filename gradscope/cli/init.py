"""`gradscope init`: a commented run file for a checkpoint and a data file."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from gradscope.cli import options
from gradscope.config import HELD
from gradscope.errors import OutputError


def init(
    checkpoint: Annotated[
        Path, typer.Argument(show_default=False, help="A file with the model's weights.")
    ],
    dataset: Annotated[
        Path, typer.Argument(show_default=False, help="A data file, or a dataset spec (.toml).")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="RUN.toml", help="The run file.")
    ] = Path("run.toml"),
    model: options.Model = None,
    loss: options.Loss = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace RUN.toml if it is there.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Write a commented run file, guessing what can be guessed; nothing of yours is executed."""
    from gradscope.storage import require_place

    require_place(output)
    if output.exists() and not overwrite:
        raise OutputError(
            "the file exists", where=str(output), remedy="Choose another name, or --overwrite."
        )
    # what is wrong with an option is told before anything is written
    options.run_spec(
        None, checkpoint=checkpoint, dataset=dataset, model=model or HELD, loss=loss or "mse"
    )
    from gradscope.sources.draft import draft

    found = draft(checkpoint, dataset, output.parent, model=model, loss=loss)
    try:
        output.write_text(found.text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror}", where=str(output), remedy="Choose another name."
        ) from error
    if json:
        document = {"path": str(output), "guessed": found.guessed, "missing": found.missing}
        options.print_json({"schema": "gradscope.init", "version": 1, **document})
        return
    from gradscope.report.console import console
    from gradscope.report.layout import facts

    rows = [*found.guessed.items(), *((key, "an example: write your own") for key in found.missing)]
    ends = [
        ("written", str(output)),
        ("next", shlex.join(["gradscope", "check", "--config", str(output)])),
    ]
    facts(console(), [*rows, *ends])
