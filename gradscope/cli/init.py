"""`gradscope init`: a commented run file for a checkpoint and a data file."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from gradscope.cli import options
from gradscope.config import HELD
from gradscope.errors import OutputError


def init(
    checkpoint: Annotated[Path, options.flag("checkpoint", "path")],
    dataset: Annotated[Path, options.flag("dataset", "path")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="RUN.toml", help="The run file.")
    ] = Path("run.toml"),
    model: Annotated[str | None, options.flag("model", "factory")] = None,
    loss: Annotated[str | None, options.flag("loss", "name")] = None,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
) -> None:
    """Write a commented run file, guessing what can be guessed; nothing of yours is executed."""
    from gradscope.report import console, print_facts
    from gradscope.sources.draft import draft
    from gradscope.storage import require_place

    require_place(output)
    if output.exists() and not overwrite:
        remedy = "Choose another name, or --overwrite."
        raise OutputError("the file exists", where=str(output), remedy=remedy)
    given = {"checkpoint": checkpoint, "dataset": dataset}
    # what is wrong with an option is told before anything is written
    options.run_spec(None, {**given, "model": model or HELD, "loss": loss or "mse"})
    found = draft(checkpoint, dataset, output.parent, model=model, loss=loss)
    try:
        output.write_text(found.text, encoding="utf-8")
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise OutputError(what, where=str(output), remedy="Choose another name.") from error
    if json:
        document = {"path": str(output), "guessed": found.guessed, "missing": found.missing}
        options.print_json({"schema": "gradscope.init", "version": 1, **document})
        return
    rows = [*found.guessed.items(), *((key, "an example: write your own") for key in found.missing)]
    following = shlex.join(["gradscope", "check", "--config", str(output)])
    print_facts(console(), [*rows, ("written", str(output)), ("next", following)])
