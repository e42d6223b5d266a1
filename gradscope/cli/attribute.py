"""`gradscope attribute` scores training samples for queries; `validate` checks scores."""

import os
from pathlib import Path
from typing import Any, cast

from gradscope.cli.options import show, with_flags
from gradscope.config import Worker, parse_memory, parse_shard, this_worker
from gradscope.config.commands import AttributeOptions, ValidateOptions
from gradscope.errors import SpecError
from gradscope.process import stops


@with_flags
def attribute(options: AttributeOptions) -> None:
    """Score training samples for queries: positive scores helped the query, negative ones harmed.

    A score estimates the rise of the query's loss if the training sample had been left out.
    """
    from gradscope.attribution import AttributionSettings, open_sources
    from gradscope.storage import LONGEST, require_free, require_place

    output, memory, factors = options.output, options.memory, options.factors
    settings = AttributionSettings(
        curvature=cast("Any", options.curvature),
        damping=options.damping,
        memory=None if memory is None else parse_memory(memory),
        factors=None if factors is None else str(factors),
        refine=options.refine,
        score=options.score,
        query_rank=options.query_rank,
    )
    worker = _worker(options.shard)
    if worker is not None and worker.shard.index > 0 and options.shard is None:
        options = options.model_copy(update={"quiet": True})  # of torchrun's workers, one speaks
    stops.raise_on_signal()
    if options.more and not options.checkpoints:
        raise SpecError(
            f"unexpected argument {options.more[0]}",
            remedy="Give two arguments, TRAIN and QUERY; further files need --checkpoints.",
        )
    if worker is not None and output is None:
        raise SpecError(
            "a part of the training samples is scored into a file, and there is no output",
            remedy="Give -o SCORES.h5.",
        )
    again = "; continue with --resume" if worker is None else "; the same command continues"
    if output is not None:
        output = output if worker is None else worker.shard.place(output)
        require_place(output, LONGEST)
        resume = options.resume or worker is not None
        require_free(output, overwrite=options.overwrite or resume)
    with (
        stops.stop_message(lambda: f"stopped{again}" if output else "stopped"),
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
            worker=worker,
        ) as pairs,
    ):
        report = _run(pairs, settings, options, output, worker)
    from gradscope.report.terminal import render

    show(report, render, json=options.as_json, quiet=options.quiet)


def _worker(shard: str | None) -> Worker | None:
    """Return the part of the training samples to score, or None for all of them."""
    if shard is None:
        return this_worker(os.environ)
    part = parse_shard(shard)
    return Worker(part, None, restarted=False) if part.count > 1 else None


def _run(
    pairs: Any, settings: Any, options: AttributeOptions, output: Path | None, worker: Worker | None
) -> Any:
    """Score all queries, write the file if there is an output, and return the summary."""
    from gradscope.attribution import (
        Scoring,
        in_memory,
        is_finished,
        open_scores,
        shared_factors,
        summarize_scores,
        writing_scores,
    )
    from gradscope.report.progress import track

    if output is None:
        with in_memory(scoring := Scoring(pairs, settings)) as scores:
            return summarize_scores(scores, top=options.top, notes=scoring.notes)
    overwrite, resume = options.overwrite, options.resume
    notes: tuple[str, ...] = ()
    if worker is not None and options.output is not None:
        resume = resume or worker.restarted or not overwrite
        if not options.shard and len(pairs) == 1:  # torchrun has started all workers
            how = {"overwrite": overwrite, "resume": resume}
            settings = shared_factors(pairs[0].train, settings, options.output, worker, **how)
        part, place = worker.shard, options.output
        every = place.with_name(f"{place.stem}.shard-*-of-{part.count}{place.suffix}")
        notes = (f"part {part} of the samples; gradscope merge {every} joins all parts",)
    if not (resume and is_finished(pairs, settings, output, overwrite=overwrite)):
        scoring = Scoring(pairs, settings)
        quiet = options.quiet or options.as_json
        shown: Any = {"unit": "queries", "size": lambda q: q.stop - q.start, "quiet": quiet}
        with writing_scores(scoring, output, resume=resume, overwrite=overwrite) as writer:
            for _ in track(writer.remaining(), pairs[0].query.n, **shown):
                stops.raise_pending()
            writer.finish()
        notes = (*scoring.notes, *notes)
    with open_scores(output) as scores:
        return summarize_scores(scores, top=options.top, notes=notes)


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
