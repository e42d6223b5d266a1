"""The options of each command: one spec a command.

`option` describes an option once. Its flag, its help, the message about a wrong value and its line
in docs/reference.md follow from that. A command that computes gradients also takes the settings of
a run.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradscope.config import values
from gradscope.config.resolve import combine_errors, short_repr
from gradscope.config.spec import RunSpec, option, options_of, same
from gradscope.errors import SpecError

T = TypeVar("T", bound="Options")
Kind = StrEnum("Kind", ["BACKENDS", "TRANSFORMS", "REDUCERS", "LOSSES", "FORMATS"])
AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]

_CURVATURES = "auto|shrunk|fisher|blockfisher|ekfac|kfac|diagonal|adam|identity"
_FILES = "OUT.h5 [OTHER.h5]"
_RESULT = "a path for an HDF5 file, such as OUT.h5; gradscope export writes other formats"

CONFIG: Any = option(None, "--config RUN.toml", help="A run file; flags win over it")
JSON: Any = option(False, "--json", help="Print one JSON document to stdout, and nothing else")
QUIET: Any = option(False, "--quiet -q", help="No progress and no notices")
VERBOSE: Any = option(False, "--verbose", help="Show which kernels were chosen, and their times")
DRY_RUN: Any = option(False, "--dry-run", help="Load, choose, prove and estimate; write nothing")
OVERWRITE: Any = option(False, "--overwrite", help="Replace an output of the same kind")


class Options(BaseModel):
    """What a command takes.

    A field `spec` stands for the settings of a run: the command has a flag for each setting that
    names the command.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def of(cls: type[T], given: Mapping[str, Any]) -> T:
        """Return the options of some values {key: value}, where None and [] are not given.

        Raises:
            SpecError: A value does not fit; all of them are listed.
        """
        found = {key: value for key, value in given.items() if value not in (None, [])}
        try:
            return cls.model_validate(found)
        except ValidationError as failure:
            wrong = {error["loc"][0] for error in failure.errors()}
            raise combine_errors(
                [
                    SpecError(
                        f"found {short_repr(found[each.key])}",
                        where=each.flags[0],
                        remedy=f"Accepted: {each.accepted}.",
                    )
                    for each in options_of(cls)
                    if each.key in wrong
                ]
            ) from failure


class ListOptions(Options):
    """What `gradscope list` takes."""

    kind: Kind = option(..., "kind", help="What to list")
    as_json: bool = JSON


class InitOptions(Options):
    """What `gradscope init` takes."""

    checkpoint: values.SomePath = same("checkpoint", "path", ...)
    dataset: values.SomePath = same("dataset", "path", ...)
    output: Path = option(Path("run.toml"), "--output -o RUN.toml", help="The run file")
    model: str | None = same("model", "factory", None)
    loss: str | None = same("loss", "name", None)
    unsafe_pickle: bool = same("checkpoint", "unsafe_pickle", False)
    overwrite: bool = OVERWRITE
    as_json: bool = JSON


class CheckOptions(Options):
    """What `gradscope check` takes."""

    config: Path | None = CONFIG
    spec: RunSpec
    as_json: bool = JSON
    verbose: bool = VERBOSE


class ComputeOptions(Options):
    """What `gradscope compute` takes."""

    output: values.ResultPath | None = option(
        None, "--output -o OUT.h5", help="The result file", accepted=_RESULT
    )
    config: Path | None = CONFIG
    spec: RunSpec
    resume: bool = option(False, "--resume", help="Go on with a stopped run")
    overwrite: bool = OVERWRITE
    as_json: bool = JSON
    quiet: bool = QUIET
    verbose: bool = VERBOSE
    dry_run: bool = DRY_RUN


class MergeOptions(Options):
    """What `gradscope merge` takes."""

    shards: tuple[Path, ...] = option(
        ..., "SHARD...", help="Result files, folders with shards, or patterns"
    )
    output: values.ResultPath = option(
        ..., "--output -o OUT.h5", help="The result file", accepted=_RESULT
    )
    virtual: bool = option(
        False, "--virtual", help="Refer to the shards' rows instead of copying them"
    )
    code: tuple[Path, ...] = option(
        (), "--code FILE.py", help="Code that reducers of yours are in and that may be run"
    )
    config: Path | None = option(
        None,
        "--config RUN.toml",
        help="Compute a few samples of each shard anew from this run file, and compare",
    )
    overwrite: bool = OVERWRITE
    as_json: bool = JSON
    quiet: bool = QUIET


class CompareOptions(Options):
    """What `gradscope compare` takes."""

    config: Path | None = CONFIG
    spec: RunSpec
    against: tuple[str, ...] = option(
        (),
        "--against FILE.py:FUNCTION|RESULT.h5|opacus|backpack",
        help="Your own implementation, a stored result, or what another library computes, as a "
        "further row",
    )
    as_json: bool = JSON
    quiet: bool = QUIET
    verbose: bool = VERBOSE
    dry_run: bool = DRY_RUN


class AttributeOptions(Options):
    """What `gradscope attribute` takes."""

    train: Path = option(
        ...,
        "TRAIN",
        help="A result file with rows (gradients or projections) of the training samples; or "
        "their run file, from which they are computed on the way and none is stored",
    )
    query: Path = option(
        ...,
        "QUERY",
        help="A result file of the same model and chain; or a run file, dataset.toml or data "
        "file, whose gradients are computed on the way",
    )
    output: values.ResultPath | None = option(
        None, "--output -o SCORES.h5", help="The score file", accepted=_RESULT
    )
    curvature: str = option(
        "auto",
        f"--curvature {_CURVATURES}",
        help="H in gᵀ(H + λ)⁻¹g; auto: the Fisher shrunk towards EK-FAC, or EK-FAC where the "
        "samples are too many",
    )
    damping: Literal["auto"] | float = option(
        "auto",
        "--damping auto|NUMBER",
        help="λ, relative to H's mean eigenvalue",
        accepted="auto, or a number such as 0.1",
    )
    chain: str | None = option(
        None, "--chain K|TEXT", help="Which rows [the first chain that has some]"
    )
    more: tuple[Path, ...] = option((), "MORE")  # of `--checkpoints *.h5`, all but the first
    checkpoints: tuple[Path, ...] = option(
        (),
        "--checkpoints TRAIN...",
        help="The training samples at other checkpoints; scores are added up",
    )
    weights: values.Numbers | None = option(
        None,
        "--weights W,W,...",
        help="Of TRAIN and each of --checkpoints, such as learning rates [the mean]",
    )
    factors: Path | None = option(
        None,
        "--factors FILE.h5",
        help="Take the chain ekfac, kfac:bias=column or second_moment from there",
    )
    stream: bool = option(
        False, "--stream", help="Compute the training gradients on the way, by TRAIN's own run"
    )
    samples: values.Samples | None = same("compute", "samples", None)
    refine: AtLeast0 = option(
        0,
        "--refine K",
        help="Of projections: score the K most helpful and the K most harmful samples of each "
        "query again with full gradients, by --curvature [ekfac]",
    )
    memory: values.Memory | None = option(
        None, "--memory SIZE", help="For queries at a time, such as 2GB"
    )
    top: AtLeast1 = option(3, "--top K", help="How many samples a query to show")
    resume: bool = option(False, "--resume", help="Go on where it was stopped")
    overwrite: bool = OVERWRITE
    as_json: bool = JSON
    quiet: bool = QUIET


class ValidateOptions(Options):
    """What `gradscope validate` takes."""

    scores: Path = option(..., "SCORES.h5", help="A score file: gradscope attribute -o wrote it")
    train: str = option(
        ...,
        "--train FILE.py:FIT",
        help="FIT(indices, seed): trains on the samples at these positions of the training "
        "data, and returns the model in the mode to evaluate it in",
    )
    retrainings: int = option(50, "--retrainings N", help="How many, each on a random subset")
    fraction: float = option(0.5, "--fraction SHARE", help="Of the training samples in a subset")
    width: float = option(
        0.02, "--width WIDTH", help="Say how many retrainings an interval so wide takes"
    )
    removal: AtLeast0 = option(
        0,
        "--removal K",
        help="For a few queries, also train without up to K most helpful samples",
    )
    workers: AtLeast1 = option(1, "--workers N", help="Processes that train at once")
    seed: AtLeast0 = option(0, "--seed N", help="Of subsets and trainings")
    folder: Path | None = option(
        None,
        "--folder FOLDER",
        help="Where retrainings are kept, for other scores of the same samples, too "
        "[SCORES.validation]",
    )
    overwrite: bool = OVERWRITE
    as_json: bool = JSON
    quiet: bool = QUIET


class StatsOptions(Options):
    """What `gradscope stats` takes."""

    files: tuple[Path, ...] = option(
        ...,
        _FILES,
        help="A result file, two to compare, a score file, or the history of a training (*.jsonl)",
    )
    top: AtLeast1 | None = option(
        None, "--top K", help="How many samples to list [10; 5 for each query]"
    )
    nearest: int | None = option(None, "--nearest I", help="List the neighbours of sample I")
    lr: float | None = option(None, "--lr RATE", help="The learning rate, for a batch size")
    clip: tuple[float, ...] = option((), "--clip NORM", help="Say how many samples it clips")
    by: str | None = option(
        None, "--by COLUMN", help="Sum scores by this column of the training samples"
    )
    rows: bool = option(True, "--rows/--no-rows", help="Whether to read the stored gradients")
    full: bool = option(False, "--full", help="Show all there is, not what fits one screen")
    follow: bool = option(
        False,
        "--follow",
        help="Show a history (*.jsonl) while it grows, until its training ends",
    )
    as_json: bool = JSON
    plot: Path | None = option(None, "--plot FILE", help="Draw to a png, svg or pdf")
    html: Path | None = option(None, "--html FILE", help="Write one page with everything")


class ViewOptions(Options):
    """What `gradscope view` takes."""

    files: tuple[Path, ...] = option(
        ...,
        _FILES,
        help="A result file, or two of the same data, to see each sample before and after",
    )
    scores: Path | None = option(
        None, "--scores SCORES.h5", help="Attribution: who helped and harmed a sample"
    )
    output: Path | None = option(None, "--output -o FILE.html", help="The page [OUT.html]")
    serve: bool = option(False, "--serve", help="Answer on localhost: all samples, however many")
    port: Annotated[int, Field(ge=0, le=65535)] = option(0, "--port N", help="Of --serve; 0: any")
    as_json: bool = JSON


class ExportOptions(Options):
    """What `gradscope export` takes."""

    file: Path = option(..., "RESULT.h5", help="A result file")
    output: Path = option(
        ...,
        "--output -o FILE|FOLDER",
        help="Its ending is the format: .npy, .safetensors, .parquet or .csv (the sample "
        "table); a folder takes one .npy a parameter",
    )
    chain: str | None = option(None, "--chain K|TEXT", help="Its number from 0, or its text [0]")
    parameter: tuple[str, ...] = option(
        (),
        "--parameter GLOB",
        help="Only parameters of these names, in a table their norms, too",
    )
    samples: values.Samples | None = same("compute", "samples", None)
    overwrite: bool = OVERWRITE
    as_json: bool = JSON
