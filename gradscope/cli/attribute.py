"""`gradscope attribute` and `validate`: which training samples helped or harmed a query.

And how well the scores predict what retraining does.
"""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from gradscope.cli import options
from gradscope.cli.options import option
from gradscope.errors import SpecError
from gradscope.process import stops

_CURVATURES = "auto|shrunk|fisher|blockfisher|ekfac|kfac|diagonal|adam|identity"

Train = Annotated[
    Path,
    option(
        "TRAIN",
        "A result file with rows (gradients or projections) of the training samples; or "
        "their run file, from which they are computed on the way and none is stored.",
    ),
]
Query = Annotated[
    Path,
    option(
        "QUERY",
        "A result file of the same model and chain; or a run file, dataset.toml or data "
        "file, whose gradients are computed on the way.",
    ),
]
Output = Annotated[Path | None, option("--output -o SCORES.h5", "The score file.")]
Curvature = Annotated[
    str,
    option(
        f"--curvature {_CURVATURES}",
        "H in gᵀ(H + λ)⁻¹g; auto: the Fisher shrunk towards EK-FAC, or EK-FAC where the "
        "samples are too many.",
    ),
]
Damping = Annotated[str, option("--damping auto|NUMBER", "λ, relative to H's mean eigenvalue.")]
Chain = Annotated[
    str | None, option("--chain K|TEXT", "Which rows [the first chain that has some].")
]
More = Annotated[list[Path] | None, typer.Argument(metavar="", show_default=False, hidden=True)]
Checkpoints = Annotated[
    list[Path] | None,
    option(
        "--checkpoints TRAIN...", "The training samples at other checkpoints; scores are added up."
    ),
]
Weights = Annotated[
    str | None,
    option(
        "--weights W,W,...",
        "Of TRAIN and each of --checkpoints, such as learning rates [the mean].",
    ),
]
Factors = Annotated[
    Path | None,
    option(
        "--factors FILE.h5", "Take the chain ekfac, kfac:bias=column or second_moment from there."
    ),
]
Stream = Annotated[
    bool, option("--stream", "Compute the training gradients on the way, by TRAIN's own run.")
]
Refine = Annotated[
    int,
    option(
        "--refine K",
        "Of projections: score the K most helpful and the K most harmful samples of each "
        "query again with full gradients, by --curvature [ekfac].",
        min=0,
    ),
]
Memory = Annotated[str | None, option("--memory SIZE", "For queries at a time, such as 2GB.")]
Top = Annotated[int, option("--top K", "How many samples a query to show.", min=1)]


def attribute(
    train: Train,
    query: Query,
    output: Output = None,
    curvature: Curvature = "auto",
    damping: Damping = "auto",
    chain: Chain = None,
    more: More = None,
    checkpoints: Checkpoints = None,
    weights: Weights = None,
    factors: Factors = None,
    stream: Stream = False,
    samples: Annotated[str | None, options.flag("compute", "samples")] = None,
    refine: Refine = 0,
    memory: Memory = None,
    top: Top = 3,
    resume: Annotated[bool, option("--resume", "Go on where it was stopped.")] = False,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Score each training sample for each query: positive ones helped it, negative ones harmed."""
    commas, number = "numbers, with commas between", "auto, or a number such as 0.1"
    numbers = None if weights is None else _read(weights, _floats, "--weights", commas)
    from gradscope.attribution import Scoring, Settings, opened
    from gradscope.config import parse_memory
    from gradscope.storage import LONGEST, require_free, require_place

    chosen: Any = "auto" if damping == "auto" else _read(damping, float, "--damping", number)
    asked = Settings(
        curvature=cast("Any", curvature),
        damping=chosen,
        memory=None if memory is None else parse_memory(memory),
        factors=None if factors is None else str(factors),
        refine=refine,
    )
    stops.raise_on_signal()
    if more and not checkpoints:
        raise SpecError(f"{more[0]} is one file too many", remedy="Give TRAIN and QUERY.")
    if output is not None:
        require_place(output, LONGEST)
        require_free(output, overwrite=overwrite or resume)
    how: Any = {"chain": chain, "weights": numbers, "samples": samples, "stream": stream}
    how["output"] = output
    others = [*(checkpoints or ()), *(more or ())]
    with (
        stops.stop_message(lambda: "stopped; go on with --resume" if output else "stopped"),
        opened(train, query, checkpoints=others, **how) as pairs,
    ):
        ways = {"resume": resume, "overwrite": overwrite}
        report = _run(Scoring(pairs, asked), output, top, quiet=quiet or json, **ways)
    from gradscope.report import render

    options.show(report, render, json=json, quiet=quiet)


def _run(scoring: Any, output: Path | None, top: int, *, quiet: bool, **how: bool) -> Any:
    from gradscope.attribution import in_memory, open_scores, summarize_scores, writing_scores
    from gradscope.report import track

    if output is not None:
        shown: Any = {"unit": "queries", "size": lambda q: q.stop - q.start, "quiet": quiet}
        with writing_scores(scoring, output, **how) as writer:
            for _ in track(writer.remaining(), scoring.pairs[0].query.n, **shown):
                stops.raise_pending()
            writer.finish()
    with in_memory(scoring) if output is None else open_scores(output) as scores:
        return summarize_scores(scores, top=top, notes=scoring.notes)


def _floats(text: str) -> list[float]:
    found = [float(word) for word in text.split(",")]
    if not all(map(isfinite, found)):
        raise ValueError(text)
    return found


def _read(text: str, read: Callable[[str], Any], flag: str, accepted: str) -> Any:
    """Return what an option's text says."""
    try:
        return read(text)
    except ValueError as error:
        remedy = f"Accepted: {accepted}."
        raise SpecError(f"found {text!r}", where=flag, remedy=remedy) from error


Scores = Annotated[Path, option("SCORES.h5", "A score file: gradscope attribute -o wrote it.")]
Fit = Annotated[
    str,
    option(
        "--train FILE.py:FIT",
        "FIT(indices, seed): trains on the samples at these positions of the training "
        "data, and returns the model in the mode to evaluate it in.",
    ),
]
Retrainings = Annotated[int, option("--retrainings N", "How many, each on a random subset.")]
Fraction = Annotated[float, option("--fraction SHARE", "Of the training samples in a subset.")]
Width = Annotated[
    float, option("--width WIDTH", "Say how many retrainings an interval so wide takes.")
]
Removal = Annotated[
    int,
    option(
        "--removal K", "For a few queries, also train without up to K most helpful samples.", min=0
    ),
]
Workers = Annotated[int, option("--workers N", "Processes that train at once.", min=1)]
Seed = Annotated[int, option("--seed N", "Of subsets and trainings.", min=0)]
Folder = Annotated[
    Path | None,
    option(
        "--folder FOLDER",
        "Where retrainings are kept, for other scores of the same samples, too "
        "[SCORES.validation].",
    ),
]


def validate(
    scores: Scores,
    train: Fit,
    retrainings: Retrainings = 50,
    fraction: Fraction = 0.5,
    width: Width = 0.02,
    removal: Removal = 0,
    workers: Workers = 1,
    seed: Seed = 0,
    folder: Folder = None,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Retrain on random subsets, and say how well the scores predict what that does.

    A stopped validation goes on where it was, and several commands may share the work.
    """
    from gradscope.attribution import Asked, Validating
    from gradscope.report import render, track

    asked = Asked(retrainings, fraction, seed, width, removal)
    stops.raise_on_signal()
    with stops.stop_message(lambda: "stopped; the same command goes on with what is finished"):
        work = Validating(scores, train, asked, folder, overwrite=overwrite)
        for _ in track(
            work.remaining(workers),
            work.total,
            unit="retrainings",
            size=lambda _: 1,
            quiet=quiet or json,
        ):
            stops.raise_pending()
        report = work.finish()
    options.show(report, render, json=json, quiet=quiet)
