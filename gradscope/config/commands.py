"""The options of each command: one spec a command.

`option` describes an option once. Its flag, its help, the message for a wrong value and its line
in docs/reference.md are generated from it. A command that computes gradients also takes the
settings of a run.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradscope.config import values
from gradscope.config.resolve import combine_errors, short_repr
from gradscope.config.spec import RunSpec, option, options_of, same
from gradscope.errors import SpecError

T = TypeVar("T", bound="Options")
Kind = StrEnum("Kind", ["BACKENDS", "TRANSFORMS", "REDUCERS", "LOSSES", "FORMATS"])
AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]

_FILES = "OUT.h5 [OTHER.h5]"
_RESULT = "a path for an HDF5 file, such as OUT.h5; gradscope export writes other formats"

CONFIG: Any = option(None, "--config RUN.toml", help="A run file; flags override its settings")
JSON: Any = option(False, "--json", help="Print a single JSON document to stdout")
QUIET: Any = option(False, "--quiet -q", help="Print no progress and no notices")
VERBOSE: Any = option(False, "--verbose", help="Show the chosen kernels and their times")
DRY_RUN: Any = option(
    False, "--dry-run", help="Load, choose a backend, prove and estimate, but write nothing"
)
OVERWRITE: Any = option(False, "--overwrite", help="Replace an existing output of the same kind")


class Options(BaseModel):
    """The options of a command.

    A field `spec` stands for the settings of a run. The command then has a flag for each setting
    with the command in its `commands`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    # {section: {key: value}}: example values for required settings that may be missing
    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def of(cls: type[T], given: Mapping[str, Any]) -> T:
        """Return the options for {key: value}; None and [] mean that a value is not given.

        Raises:
            SpecError: A value is not accepted. The error lists all such values.
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
    """The options of `gradscope list`."""

    kind: Kind = option(..., "kind", help="What to list")
    as_json: bool = JSON


class InitOptions(Options):
    """The options of `gradscope init`."""

    examples = {"model": {"factory": values.FROM_CHECKPOINT}, "loss": {"name": "mse"}}

    checkpoint: values.SomePath = same("checkpoint", "path", ...)
    dataset: values.SomePath = same("dataset", "path", ...)
    arguments: tuple[str, ...] = option(
        (),
        "ARGUMENTS",
        help="After --: the command-line arguments of the training, if the script parses any",
    )
    output: Path = option(Path("run.toml"), "--output -o RUN.toml", help="The run file to write")
    spec: RunSpec
    overwrite: bool = OVERWRITE
    as_json: bool = JSON


class CheckOptions(Options):
    """The options of `gradscope check`."""

    config: Path | None = CONFIG
    spec: RunSpec
    as_json: bool = JSON
    verbose: bool = VERBOSE


class ComputeOptions(Options):
    """The options of `gradscope compute`."""

    output: values.ResultPath | None = option(
        None, "--output -o OUT.h5", help="The result file", accepted=_RESULT
    )
    config: Path | None = CONFIG
    spec: RunSpec
    resume: bool = option(False, "--resume", help="Continue a stopped run")
    overwrite: bool = OVERWRITE
    as_json: bool = JSON
    quiet: bool = QUIET
    verbose: bool = VERBOSE
    dry_run: bool = DRY_RUN


class MergeOptions(Options):
    """The options of `gradscope merge`."""

    shards: tuple[Path, ...] = option(
        ..., "SHARD...", help="Result or score files, folders with shards, or file name patterns"
    )
    output: values.ResultPath = option(
        ..., "--output -o OUT.h5", help="The result file", accepted=_RESULT
    )
    virtual: bool = option(
        False, "--virtual", help="Link to the rows in the shards instead of copying them"
    )
    code: tuple[Path, ...] = option(
        (), "--code FILE.py", help="A file with your own reducers, which gradscope may execute"
    )
    config: Path | None = option(
        None,
        "--config RUN.toml",
        help="Recompute a few samples of each shard from this run file, and compare them",
    )
    overwrite: bool = OVERWRITE
    as_json: bool = JSON
    quiet: bool = QUIET


class CompareOptions(Options):
    """The options of `gradscope compare`."""

    config: Path | None = CONFIG
    spec: RunSpec
    against: tuple[str, ...] = option(
        (),
        "--against FILE.py:FUNCTION|RESULT.h5|opacus|backpack",
        help="Also compare with your own function, a stored result, or another library",
    )
    as_json: bool = JSON
    quiet: bool = QUIET
    verbose: bool = option(
        False,
        "--verbose",
        help="Show all parameters that disagree, the chosen kernels, and their times",
    )
    dry_run: bool = DRY_RUN


class AttributeOptions(Options):
    """The options of `gradscope attribute`."""

    train: Path = option(
        ...,
        "TRAIN",
        help="A result file with rows (gradients or projections) of the training samples, or "
        "their run file: rows are then computed without being stored",
    )
    query: Path = option(
        ...,
        "QUERY",
        help="A result file of the same model and chain, or a run file, dataset.toml or data "
        "file: gradients are then computed without being stored",
    )
    output: values.ResultPath | None = option(
        None, "--output -o SCORES.h5", help="The score file", accepted=_RESULT
    )
    curvature: str = option(
        "auto",
        "--curvature NAME",
        help="H in gᵀ(H + λ)⁻¹g: mean, shrunk, fisher, blockfisher, ekfac, kfac, diagonal, adam or "
        "identity; auto: mean (of EK-FAC and a shrunk Fisher), or ekfac if there are too many "
        "samples",
    )
    damping: Literal["auto"] | float = option(
        "auto",
        "--damping auto|NUMBER",
        help="λ, relative to H's mean eigenvalue",
        accepted="auto, or a number such as 0.1",
    )
    score: Literal["influence", "relative", "cosine"] = option(
        "influence",
        "--score",
        help="The change of the query's loss; relative: divided by the root of the training "
        "sample's self-influence; cosine: also by the query's",
    )
    query_loss: values.LossName | None = option(
        None,
        "--query-loss LOSS",
        help="Measure the queries with this loss, a name or FILE.py:LOSS, then options as "
        ":key=value,...; a positive score means that the training sample lowers it [the loss of "
        "the run]",
        accepted=f"a name from `gradscope list losses`, or {values.REFERENCE_FORMS}; then options "
        "as :key=value,...",
    )
    chain: str | None = option(
        None, "--chain K|TEXT", help="The chain whose rows are scored [the first chain with rows]"
    )
    more: tuple[Path, ...] = option((), "MORE")  # the further files of `--checkpoints *.h5`
    checkpoints: tuple[Path, ...] = option(
        (),
        "--checkpoints TRAIN...",
        help="Result files of the training samples at further checkpoints; scores are summed",
    )
    weights: values.Numbers | None = option(
        None,
        "--weights W,W,...",
        help="A weight for TRAIN and for each of --checkpoints, such as learning rates [the mean]",
    )
    factors: Path | None = option(
        None,
        "--factors FILE.h5",
        help="A result file with the chain ekfac, kfac:bias=column or second_moment",
    )
    stream: bool = option(
        False, "--stream", help="Recompute the training gradients from TRAIN's run; read no rows"
    )
    samples: values.Samples | None = same("compute", "samples", None)
    shard: values.ShardText | None = option(
        None,
        "--shard I/N",
        help="Score only part I of N of the training samples, counted from 0; torchrun sets this "
        "for its workers",
    )
    refine: AtLeast0 = option(
        0,
        "--refine K",
        help="With projections: score the K most helpful and K most harmful samples of each "
        "query again with full gradients and --curvature [ekfac]",
    )
    query_rank: AtLeast0 = option(
        0,
        "--query-rank R",
        help="With ekfac or kfac: keep each matrix of a query's row (H + λ)⁻¹g as R outer "
        "products, so that one pass over the training samples scores many queries; shows the norm "
        "that this drops; 0: keep all numbers",
    )
    memory: values.Memory | None = option(
        None, "--memory SIZE", help="Memory for the queries computed at a time, such as 2GB"
    )
    top: AtLeast1 = option(3, "--top K", help="The number of samples to show for each query")
    resume: bool = option(False, "--resume", help="Continue a stopped attribution")
    overwrite: bool = OVERWRITE
    as_json: bool = JSON
    quiet: bool = QUIET


class ValidateOptions(Options):
    """The options of `gradscope validate`."""

    scores: Path = option(..., "SCORES.h5", help="A score file written by gradscope attribute -o")
    train: str = option(
        ...,
        "--train FILE.py:FIT",
        help="A function FIT(indices, seed) that trains on the samples at these positions of the "
        "training data and returns the model in the mode for evaluation",
    )
    retrainings: int = option(
        50, "--retrainings N", help="The number of retrainings, each on a random subset"
    )
    fraction: float = option(
        0.5, "--fraction SHARE", help="The share of the training samples in a subset"
    )
    width: float = option(
        0.02, "--width WIDTH", help="Print how many retrainings give an interval of this width"
    )
    removal: AtLeast0 = option(
        0,
        "--removal K",
        help="For a few queries, also train without up to K of the most helpful samples",
    )
    workers: AtLeast1 = option(
        1, "--workers N", help="The number of processes that train at the same time"
    )
    seed: AtLeast0 = option(0, "--seed N", help="The seed of subsets and trainings")
    folder: Path | None = option(
        None,
        "--folder FOLDER",
        help="The folder for retrainings, also used for further scores of the same samples "
        "[SCORES.validation]",
    )
    overwrite: bool = OVERWRITE
    as_json: bool = JSON
    quiet: bool = QUIET


class StatsOptions(Options):
    """The options of `gradscope stats`."""

    files: tuple[Path, ...] = option(
        ...,
        _FILES,
        help="A result file, two result files to compare, a score file, or training histories "
        "(*.jsonl)",
    )
    top: AtLeast1 | None = option(
        None, "--top K", help="The number of samples to list [10; 5 for each query]"
    )
    nearest: int | None = option(
        None, "--nearest I", help="List the nearest neighbours of sample I"
    )
    lr: float | None = option(
        None, "--lr RATE", help="The learning rate, used to suggest a batch size"
    )
    clip: tuple[float, ...] = option(
        (), "--clip NORM", help="Print how many samples this clipping norm clips"
    )
    by: str | None = option(
        None, "--by COLUMN", help="Sum scores for each value of this column of the training samples"
    )
    rows: bool = option(True, "--rows/--no-rows", help="Read the stored gradients, or skip them")
    full: bool = option(False, "--full", help="Show everything, also what exceeds the screen")
    follow: bool = option(
        False,
        "--follow",
        help="Show a history (*.jsonl) while it grows, until its training ends",
    )
    as_json: bool = JSON
    plot: Path | None = option(None, "--plot FILE", help="Draw to a png, svg or pdf file")
    html: Path | None = option(None, "--html FILE", help="Write an HTML page with everything")


class ViewOptions(Options):
    """The options of `gradscope view`."""

    files: tuple[Path, ...] = option(
        ...,
        _FILES,
        help="A result file, or two result files of the same data to compare each sample",
    )
    scores: Path | None = option(
        None,
        "--scores SCORES.h5",
        help="Attribution scores: show which training samples helped or harmed a sample",
    )
    output: Path | None = option(None, "--output -o FILE.html", help="The page to write [OUT.html]")
    serve: bool = option(
        False, "--serve", help="Serve the page on localhost, with any number of samples"
    )
    port: Annotated[int, Field(ge=0, le=65535)] = option(
        0, "--port N", help="The port of --serve; 0: any free port"
    )
    as_json: bool = JSON


class ExportOptions(Options):
    """The options of `gradscope export`."""

    file: Path = option(..., "RESULT.h5", help="A result file")
    output: Path = option(
        ...,
        "--output -o FILE|FOLDER",
        help="The file to write; its ending is the format: .npy, .safetensors, .parquet or .csv "
        "(the sample table). A folder gets a .npy file for each parameter",
    )
    chain: str | None = option(
        None, "--chain K|TEXT", help="The chain's number, from 0, or its text [0]"
    )
    parameter: tuple[str, ...] = option(
        (),
        "--parameter GLOB",
        help="Export only parameters with these names; add their norms to a table",
    )
    samples: values.Samples | None = same("compute", "samples", None)
    overwrite: bool = OVERWRITE
    as_json: bool = JSON
