"""What is done with results: `gradscope stats`, `gradscope export` and `gradscope view`."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli import options
from gradscope.cli.options import option
from gradscope.config import parse_samples
from gradscope.errors import SpecError
from gradscope.process import stops, streams

if TYPE_CHECKING:
    from gradscope.attribution import ScoreSummary
    from gradscope.stats import Difference, Summary
    from gradscope.stats.sections import Displayable
    from gradscope.training import History, Step
    from gradscope.view import View

    Found = Summary | Difference | History | ScoreSummary

_LARGE = 2**28  # bytes of data: more are not read for a glance
_FILES = "OUT.h5 [OTHER.h5]"

Results = Annotated[
    list[Path],
    option(
        _FILES,
        "A result file, two to compare, a score file, or the history of a training (*.jsonl).",
    ),
]
Top = Annotated[
    int | None, option("--top K", "How many samples to list [10; 5 for each query].", min=1)
]
Nearest = Annotated[int | None, option("--nearest I", "List the neighbours of sample I.")]
Rate = Annotated[float | None, option("--lr RATE", "The learning rate, for a batch size.")]
Clip = Annotated[
    list[float] | None, option("--clip NORM", "Say how many samples it clips; repeatable.")
]
By = Annotated[
    str | None, option("--by COLUMN", "Sum scores by this column of the training samples.")
]
Rows = Annotated[bool, option("--rows/--no-rows", "Whether to read the stored gradients.")]
Full = Annotated[bool, option("--full", "Show all there is, not what fits one screen.")]
Follow = Annotated[
    bool, option("--follow", "Show a history (*.jsonl) while it grows, until its training ends.")
]
Plot = Annotated[Path | None, option("--plot FILE", "Draw to a png, svg or pdf.")]
Html = Annotated[Path | None, option("--html FILE", "Write one page with everything.")]


def stats(
    files: Results,
    top: Top = None,
    nearest: Nearest = None,
    lr: Rate = None,
    clip: Clip = None,
    by: By = None,
    rows: Rows = True,
    full: Full = False,
    follow: Follow = False,
    json: options.Json = False,
    plot: Plot = None,
    html: Html = None,
) -> None:
    """Summarise a result file: norms, noise, parameters, classes, samples that stand out."""
    given = {"nearest": nearest, "lr": lr, "clip": clip}
    own = {name: value for name, value in given.items() if value not in (None, [])}
    history = any(file.suffix == ".jsonl" for file in files)
    _require_options(files, list(own), history=history, by=by is not None, follow=follow)
    stops.unwinding()
    if history:
        from gradscope.training import read_history

        found: Found = _followed(files[0], json=json) if follow else read_history(files[0])
        shown: Displayable = found
    else:
        largest = None if top is not None or html is not None else _LARGE
        largest = 0 if json and html is None else largest
        found, shown = _found(files, own, by, largest, top=top, rows=rows)
    if plot is not None:
        from gradscope.report import plot_stats

        plot_stats(found, plot)
    if html is not None:
        from gradscope.report import write_html

        write_html(shown, html)
    from gradscope.report import console, render

    if not follow or (console().is_terminal and not json):  # else each step has been told
        options.show(found if json else shown, render, json=json, full=full)


def _found(
    files: list[Path],
    own: dict[str, Any],
    by: str | None,
    largest: int | None,
    *,
    top: int | None,
    rows: bool,
) -> "tuple[Found, Displayable]":
    """Return what there is to say, and what is shown of it.

    `own` are the given options that only one result file takes. Samples are opened of data of at
    most `largest` bytes, of any if None, of none if 0.
    """
    from gradscope.stats import difference, summarize
    from gradscope.storage import open_file

    found: Found
    with open_file(files[0]) as first:
        if len(files) == 2:
            with open_file(files[1]) as second:
                found = difference(first, second, top=top or 10, rows=rows)
                return found, found
        if "attribution" in first.run:
            from gradscope.attribution import Scores, summarize_scores
            from gradscope.attribution import with_samples as opened

            if own:
                what = f"--{next(iter(own))} is for gradients, not for scores"
                raise SpecError(what, remedy="Leave it out.")
            scores = Scores.of(first)
            found = summarize_scores(scores, top=top or 5, by=by)
            return found, opened(found, scores) if largest is None else found
        if by is not None:
            raise SpecError("--by is for score files", remedy="Leave it out.")
        how = {"nearest": own.get("nearest"), "learning_rate": own.get("lr")}
        found = summarize(first, top=top, rows=rows, clip=own.get("clip", ()), **how)
        if largest == 0:
            return found, found
        from gradscope.sources.opened import Opened
        from gradscope.stats.album import with_samples

        return found, with_samples(found, Opened.of(first.run, first.samples, largest))


def _require_options(
    files: list[Path], asked: list[str], *, history: bool, by: bool, follow: bool
) -> None:
    """Refuse options that do not go with so many files, or with their kind."""
    several = history or len(files) == 2
    if len(files) > 2 or (history and len(files) > 1):
        raise SpecError(
            f"{len(files)} files were given",
            remedy="Give one result file, two to compare, or one history (*.jsonl).",
        )
    if by and several:
        raise SpecError("--by is for one score file", remedy="Leave it out.")
    if follow and not history:
        raise SpecError("--follow is for a history (*.jsonl)", remedy="Leave it out.")
    if asked and several:
        raise SpecError(f"--{asked[0]} is for one result file", remedy="Leave it out.")


def _followed(file: Path, *, json: bool) -> "History":
    """Show a history until its training has ended, as documents a line if so asked; return it."""
    from gradscope.report import console, follow
    from gradscope.training.history import HistoryReader, line

    def tell(found: "History | None", new: "Sequence[Step]") -> None:
        for step in new:
            typer.echo(line(step), file=streams.out(), nl=False)

    with stops.told(lambda: "followed no more; the training goes on"):
        return follow(HistoryReader(file), console(), tell if json else None)


def export(
    file: Annotated[Path, option("RESULT.h5", "A result file.")],
    output: Annotated[
        Path,
        option(
            "--output -o FILE|FOLDER",
            "Its ending is the format: .npy, .safetensors, .parquet or .csv (the sample "
            "table); a folder takes one .npy a parameter.",
        ),
    ],
    chain: Annotated[
        str | None, option("--chain K|TEXT", "Its number from 0, or its text [0].")
    ] = None,
    parameter: Annotated[
        list[str] | None,
        option(
            "--parameter GLOB",
            "Only parameters of these names; repeatable. In a table: their norms, too.",
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


def view(
    files: Annotated[
        list[Path],
        option(
            _FILES, "A result file, or two of the same data, to see each sample before and after."
        ),
    ],
    scores: Annotated[
        Path | None, option("--scores SCORES.h5", "Attribution: who helped and harmed a sample.")
    ] = None,
    output: Annotated[Path | None, option("--output -o FILE.html", "The page [OUT.html].")] = None,
    serve: Annotated[
        bool, option("--serve", "Answer on localhost: all samples, however many.")
    ] = False,
    port: Annotated[int, option("--port N", "Of --serve; 0: any.", min=0, max=65535)] = 0,
    json: options.Json = False,
) -> None:
    """Show the samples of a result file: each dot of the chart is one, opened by a click."""
    if len(files) > 2:
        raise SpecError(f"{len(files)} files were given", remedy="Give one result file, or two.")
    if serve and (json or output is not None):
        remedy = "Leave out --output and --json, or --serve."
        raise SpecError("--serve writes no page", remedy=remedy)
    stops.unwinding()
    with ExitStack() as stack:
        shown = _looked(files, scores, stack)
        if serve:
            from gradscope.view import serve as answer

            answer(shown, port, lambda address: typer.echo(address, file=streams.out()))
            return
        from gradscope.stats.sections import size
        from gradscope.view import write_page

        target = output or files[0].with_suffix(".html")
        document = shown.document()
        bytes_ = write_page(document, shown.overview(), target)
        made = {"schema": "gradscope.view", "version": 1, "path": str(target), "bytes": bytes_}
        if json:
            options.show(made | {"samples": document["samples"]}, print, json=True)
        else:
            typer.echo(f"{target}: {size(bytes_)}, open it in a browser", file=streams.out())


def _looked(files: list[Path], scores: Path | None, stack: ExitStack) -> "View":
    """Open one result file or two, with the scores of their samples where these are given."""
    from gradscope.attribution import open_scores
    from gradscope.storage import open_file
    from gradscope.view import open_view

    opened = [stack.enter_context(open_file(file)) for file in files]
    for file in opened:
        if "attribution" in file.run:
            raise SpecError(
                f"{file.path} holds scores, not gradients",
                remedy="Give the queries' result file, and the scores as --scores.",
            )
    found = None if scores is None else stack.enter_context(open_scores(scores))
    return open_view(opened[0], opened[1] if len(opened) > 1 else None, found)
