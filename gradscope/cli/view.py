"""`gradscope view`: the samples of a result file on a page."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from gradscope.cli import options
from gradscope.core import stops, streams
from gradscope.errors import SpecError


def view(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="OUT.h5 [OTHER.h5]",
            help="A result file, or two of the same data, to see each sample before and after.",
        ),
    ],
    scores: Annotated[
        Path | None,
        typer.Option(
            "--scores", metavar="SCORES.h5", help="Attribution: who helped and harmed a sample."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.html", help="The page [OUT.html]."),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Answer on localhost: all samples, however many."),
    ] = False,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Of --serve [any].")
    ] = 0,
    json: options.Json = False,
) -> None:
    """Show the samples of a result file: each dot of the chart is one, opened by a click."""
    if len(files) > 2:
        raise SpecError(f"{len(files)} files were given", remedy="Give one result file, or two.")
    if serve and (json or output is not None):
        remedy = "Leave out --output and --json, or --serve."
        raise SpecError("--serve writes no page", remedy=remedy)
    from gradscope.attribution import open_scores
    from gradscope.stats.sections import size
    from gradscope.storage import open_file
    from gradscope.view import look, write_page
    from gradscope.view import serve as answer

    stops.unwinding()
    with ExitStack() as stack:
        opened = [stack.enter_context(open_file(file)) for file in files]
        for file in opened:
            if "attribution" in file.run:
                raise SpecError(
                    f"{file.path} holds scores, not gradients",
                    remedy="Give the queries' result file, and the scores as --scores.",
                )
        found = None if scores is None else stack.enter_context(open_scores(scores))
        shown = look(opened[0], opened[1] if len(opened) > 1 else None, found)
        if serve:
            answer(shown, port, lambda address: typer.echo(address, file=streams.out()))
            return
        target = output or files[0].with_suffix(".html")
        document = shown.document()
        bytes_ = write_page(document, target)
        made = {"schema": "gradscope.view", "version": 1, "path": str(target), "bytes": bytes_}
        if json:
            options.show(made | {"samples": document["samples"]}, print, json=True)
        else:
            typer.echo(f"{target}: {size(bytes_)}, open it in a browser", file=streams.out())
