"""Commands for results: `gradscope stats`, `gradscope export` and `gradscope view`."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gradscope.cli.options import show, with_flags
from gradscope.config import parse_samples
from gradscope.config.commands import ExportOptions, StatsOptions, ViewOptions
from gradscope.errors import SpecError
from gradscope.process import stops, streams

if TYPE_CHECKING:
    from gradscope.attribution import ScoreSummary
    from gradscope.stats import Difference, Summary
    from gradscope.stats.sections import Displayable
    from gradscope.training import Histories, History, Step
    from gradscope.view import View

    Found = Summary | Difference | History | Histories | ScoreSummary

_LARGE = 2**28  # `stats` reads the data by default up to this size, in bytes


@with_flags
def stats(options: StatsOptions) -> None:
    """Summarise a result file: norms, noise, parameters, classes, unusual samples."""
    files, as_json = options.files, options.as_json
    history = any(file.suffix == ".jsonl" for file in files)
    _require_options(options, history=history)
    stops.raise_on_signal()
    if history:
        from gradscope.training import read_histories, read_history

        if len(files) > 1:
            found: Found = read_histories(files)
        else:
            found = _follow(files[0], json=as_json) if options.follow else read_history(files[0])
        shown: Displayable = found
    else:
        found, shown = _summarize(options)
    if options.plot is not None:
        from gradscope.report.plots import plot_stats

        plot_stats(found, options.plot)
    if options.html is not None:
        from gradscope.report.page import write_html

        write_html(shown, options.html)
    from gradscope.report.console import console
    from gradscope.report.terminal import render

    # after --follow without a terminal, each step has been printed already
    if not options.follow or (console().is_terminal and not as_json):
        show(found if as_json else shown, render, json=as_json, full=options.full)


def _single_file_options(options: StatsOptions) -> dict[str, Any]:
    """Return the given options that need exactly one result file, by name."""
    own = {"nearest": options.nearest, "lr": options.lr, "clip": options.clip}
    return {name: value for name, value in own.items() if value not in (None, ())}


def _summarize(options: StatsOptions) -> "tuple[Found, Displayable]":
    """Return the statistics of one result file or two, and their display.

    Samples are shown with --top or --html, and otherwise only if the data are small.
    """
    from gradscope.stats import difference, summarize
    from gradscope.storage import open_file

    found: Found
    top, rows, by, files = options.top, options.rows, options.by, options.files
    everything = top is not None or options.html is not None
    none = options.as_json and options.html is None
    with open_file(files[0]) as first:
        if len(files) == 2:
            with open_file(files[1]) as second:
                found = difference(first, second, top=top or 10, rows=rows)
                return found, found
        if "attribution" in first.run:
            from gradscope.attribution import Scores, summarize_scores
            from gradscope.attribution import with_samples as opened

            if own := _single_file_options(options):
                what = f"--{next(iter(own))} applies to gradients, and the file holds scores"
                raise SpecError(what, remedy="Leave it out.")
            scores = Scores.of(first)
            found = summarize_scores(scores, top=top or 5, by=by)
            return found, opened(found, scores) if everything and not none else found
        if by is not None:
            raise SpecError(
                "--by applies to scores, and the file holds gradients", remedy="Leave it out."
            )
        how: Any = {"nearest": options.nearest, "learning_rate": options.lr, "clip": options.clip}
        found = summarize(first, top=top, rows=rows, **how)
        if none:
            return found, found
        from gradscope.sources.opened import ShownData
        from gradscope.stats.album import with_samples

        largest = None if everything else _LARGE
        return found, with_samples(found, ShownData.of(first.run, first.samples, largest))


def _require_options(options: StatsOptions, *, history: bool) -> None:
    """Raise if an option does not fit the number or the kind of the files."""
    files, own = options.files, _single_file_options(options)
    several = history or len(files) == 2
    if history and (other := next((f for f in files if f.suffix != ".jsonl"), None)):
        raise SpecError(
            f"{other} is not a history (*.jsonl), but other files are",
            remedy="Give only histories, or only result files.",
        )
    if len(files) > 2 and not history:
        raise SpecError(
            f"{len(files)} files were given",
            remedy="Give one result file, two to compare, or histories (*.jsonl).",
        )
    if options.follow and len(files) > 1:
        raise SpecError("--follow takes a single history", remedy="Give one of the files.")
    if options.by is not None and several:
        raise SpecError("--by takes a single score file", remedy="Leave it out.")
    if options.follow and not history:
        raise SpecError(
            "--follow applies to a history (*.jsonl), not to a result file", remedy="Leave it out."
        )
    if own and several:
        raise SpecError(f"--{next(iter(own))} takes a single result file", remedy="Leave it out.")


def _follow(file: Path, *, json: bool) -> "History":
    """Show a history until its training has ended (`json`: one line for each step); return it."""
    from gradscope.report.console import console
    from gradscope.report.following import follow
    from gradscope.training.history import HistoryReader, line

    def tell(found: "History | None", new: "Sequence[Step]") -> None:
        for step in new:
            typer.echo(line(step), file=streams.out(), nl=False)

    with stops.stop_message(lambda: "stopped following; the training continues"):
        return follow(HistoryReader(file), console(), tell if json else None)


@with_flags
def export(options: ExportOptions) -> None:
    """Write rows, aggregates or the sample table of a result file in formats of other programs."""
    from gradscope.report.screens import render_export
    from gradscope.storage import export as write
    from gradscope.storage import open_file

    stops.raise_on_signal()
    samples = None if options.samples is None else parse_samples(options.samples)
    with (
        stops.stop_message(lambda: "stopped; nothing was written"),
        open_file(options.file) as opened,
    ):
        found = write(
            opened,
            options.output,
            options.chain,
            options.parameter,
            samples,
            overwrite=options.overwrite,
        )
    document = {"schema": "gradscope.export", "version": 1, "files": [vars(one) for one in found]}
    show(document, lambda _, console: render_export(found, console), json=options.as_json)


@with_flags
def view(options: ViewOptions) -> None:
    """Show the samples of a result file on an interactive page, with a chart and filters."""
    files = options.files
    if len(files) > 2:
        raise SpecError(f"{len(files)} files were given", remedy="Give one or two result files.")
    if options.serve and (options.as_json or options.output is not None):
        remedy = "Leave out --output and --json, or --serve."
        raise SpecError("--serve writes no page", remedy=remedy)
    stops.raise_on_signal()
    with ExitStack() as stack:
        shown = _open_view(files, options.scores, stack)
        if options.serve:
            from gradscope.view import serve as answer

            answer(shown, options.port, lambda address: typer.echo(address, file=streams.out()))
            return
        from gradscope.stats.sections import size
        from gradscope.view import write_page

        target = options.output or files[0].with_suffix(".html")
        overview, document = shown.overview(), shown.document()  # the document is large
        bytes_ = write_page(document, overview, target)
        made = {"schema": "gradscope.view", "version": 1, "path": str(target), "bytes": bytes_}
        if options.as_json:
            show(made | {"samples": document["samples"]}, print, json=True)
        else:
            typer.echo(f"{target}: {size(bytes_)}, open it in a browser", file=streams.out())


def _open_view(files: Sequence[Path], scores: Path | None, stack: ExitStack) -> "View":
    """Open one or two result files, and the score file if given."""
    from gradscope.attribution import open_scores
    from gradscope.storage import open_file
    from gradscope.view import View

    opened = [stack.enter_context(open_file(file)) for file in files]
    for file in opened:
        if "attribution" in file.run:
            raise SpecError(
                f"{file.path} holds scores, not gradients",
                remedy="Give the queries' result file, and the score file as --scores.",
            )
    found = None if scores is None else stack.enter_context(open_scores(scores))
    return View(opened[0], opened[1] if len(opened) > 1 else None, found)
