"""`gradscope attribute` scores training samples for queries; `validate` checks scores."""

import os
from typing import Any, cast

from gradscope.cli.options import show, with_flags
from gradscope.config import parse_memory, this_worker
from gradscope.config.commands import AttributeOptions, ValidateOptions
from gradscope.errors import SpecError
from gradscope.process import stops


@with_flags
def attribute(options: AttributeOptions) -> None:
    """Score training samples for queries: positive scores helped the query, negative ones harmed.

    A score estimates the rise of the query's loss if the training sample had been left out.
    """
    from gradscope.attribution import AttributionSettings, Scoring, open_sources
    from gradscope.storage import LONGEST, require_free, require_place

    output, memory, factors = options.output, options.memory, options.factors
    settings = AttributionSettings(
        curvature=cast("Any", options.curvature),
        damping=options.damping,
        memory=None if memory is None else parse_memory(memory),
        factors=None if factors is None else str(factors),
        refine=options.refine,
        score=options.score,
    )
    if (worker := this_worker(os.environ)) is not None:  # all would write the same file
        raise SpecError(
            f"attribute runs in one process, but {worker.shard.count} were started",
            remedy="Start it without torchrun. torchrun -m gradscope compute computes its input "
            "files in several processes.",
        )
    stops.raise_on_signal()
    if options.more and not options.checkpoints:
        raise SpecError(
            f"unexpected argument {options.more[0]}",
            remedy="Give two arguments, TRAIN and QUERY; further files need --checkpoints.",
        )
    if output is not None:
        require_place(output, LONGEST)
        require_free(output, overwrite=options.overwrite or options.resume)
    with (
        stops.stop_message(lambda: "stopped; continue with --resume" if output else "stopped"),
        open_sources(
            options.train,
            options.query,
            chain=options.chain,
            checkpoints=[*options.checkpoints, *options.more],
            weights=options.weights,
            samples=options.samples,
            query_loss=options.query_loss,
            stream=options.stream,
            output=output,
        ) as pairs,
    ):
        report = _run(Scoring(pairs, settings), options)
    from gradscope.report.terminal import render

    show(report, render, json=options.as_json, quiet=options.quiet)


def _run(scoring: Any, options: AttributeOptions) -> Any:
    """Score all queries, write the file if there is an output, and return the summary."""
    from gradscope.attribution import in_memory, open_scores, summarize_scores, writing_scores
    from gradscope.report.progress import track

    output = options.output
    if output is not None:
        quiet = options.quiet or options.as_json
        shown: Any = {"unit": "queries", "size": lambda q: q.stop - q.start, "quiet": quiet}
        how = {"resume": options.resume, "overwrite": options.overwrite}
        with writing_scores(scoring, output, **how) as writer:
            for _ in track(writer.remaining(), scoring.pairs[0].query.n, **shown):
                stops.raise_pending()
            writer.finish()
    with in_memory(scoring) if output is None else open_scores(output) as scores:
        return summarize_scores(scores, top=options.top, notes=scoring.notes)


@with_flags
def validate(options: ValidateOptions) -> None:
    """Retrain on random subsets, and measure how well scores predict the new losses.

    Run the same command again to continue a stopped validation. Several commands can share the
    work.
    """
    from gradscope.attribution import ValidationRun, ValidationSettings
    from gradscope.report.progress import track
    from gradscope.report.terminal import render

    asked = ValidationSettings(
        retrainings=options.retrainings,
        fraction=options.fraction,
        seed=options.seed,
        width=options.width,
        removal=options.removal,
    )
    stops.raise_on_signal()
    with stops.stop_message(lambda: "stopped; run the same command again to continue"):
        work = ValidationRun(
            options.scores, options.train, asked, options.folder, overwrite=options.overwrite
        )
        for _ in track(
            work.remaining(options.workers),
            work.total,
            unit="retrainings",
            size=lambda _: 1,
            quiet=options.quiet or options.as_json,
        ):
            stops.raise_pending()
        report = work.finish()
    show(report, render, json=options.as_json, quiet=options.quiet)
