"""`gradscope validate`: how well scores predict what retraining does."""

from pathlib import Path
from typing import Annotated

import typer

from gradscope.cli import options
from gradscope.core import stops

Scores = Annotated[
    Path,
    typer.Argument(metavar="SCORES.h5", help="A score file: gradscope attribute -o wrote it."),
]

Train = Annotated[
    str,
    typer.Option(
        "--train",
        metavar="FILE.py:FIT",
        help="FIT(indices, seed): trains on the samples at these positions of the training "
        "data, and returns the model in the mode to evaluate it in.",
    ),
]

Retrainings = Annotated[
    int,
    typer.Option("--retrainings", metavar="N", help="How many, each on a random subset."),
]

Fraction = Annotated[
    float,
    typer.Option("--fraction", metavar="SHARE", help="Of the training samples in a subset."),
]

Width = Annotated[
    float,
    typer.Option(
        "--width", metavar="WIDTH", help="Say how many retrainings an interval so wide takes."
    ),
]

Removal = Annotated[
    int,
    typer.Option(
        "--removal",
        metavar="K",
        min=0,
        help="For a few queries, also train without up to K most helpful samples.",
    ),
]

Workers = Annotated[
    int, typer.Option("--workers", metavar="N", min=1, help="Processes that train at once.")
]

Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of subsets and trainings.")]

Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="FOLDER",
        help="Where retrainings are kept, for other scores of the same samples, too "
        "[SCORES.validation].",
    ),
]


def validate(
    scores: Scores,
    train: Train,
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
    stops.unwinding()
    with stops.told(lambda: "stopped; the same command goes on with what is finished"):
        work = Validating(scores, train, asked, folder, overwrite=overwrite)
        for _ in track(
            work.remaining(workers),
            work.total,
            unit="retrainings",
            size=lambda _: 1,
            quiet=quiet or json,
        ):
            stops.once_more()
        report = work.finish()
    options.show(report, render, json=json, quiet=quiet)
