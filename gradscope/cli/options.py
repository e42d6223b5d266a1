"""The options that `compute` and `compare` share, and how they become a run spec."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gradscope.config import RunSpec, resolve
from gradscope.core import streams
from gradscope.core.texts import printable
from gradscope.errors import GradscopeError, SpecError

Checkpoint = Annotated[
    Path | None,
    typer.Argument(show_default=False, help="A file with the model's weights, or its folder."),
]
Data = Annotated[
    Path | None,
    typer.Argument(
        metavar="[DATASET]", show_default=False, help="A data file, or a dataset spec (.toml)."
    ),
]
Config = Annotated[
    Path | None, typer.Option("--config", metavar="RUN.toml", help="A run file; flags win over it.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FILE.py:FACTORY",
        help="A function that returns the model; or checkpoint: the model that CHECKPOINT holds.",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="KEY", help="Where in CHECKPOINT the weights are, such as ema.module."
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="GLOB",
        help="Leave out names in CHECKPOINT that the model does not have; repeatable.",
    ),
]
UnsafePickle = Annotated[
    bool | None,
    typer.Option(
        "--unsafe-pickle/--no-unsafe-pickle",
        show_default=False,
        help="Load CHECKPOINT even if it can execute code: pickled objects, programs.",
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="LOSS",
        help="A name (`gradscope list losses`) or FILE.py:LOSS; :key=value,... may follow.",
    ),
]
Mode = Annotated[
    str | None, typer.Option("--mode", metavar="eval|train", help="The model's mode [eval].")
]
Parameters = Annotated[
    list[str] | None,
    typer.Option(
        "--parameters", metavar="GLOB", help="Only parameters of these names; repeatable."
    ),
]
Samples = Annotated[
    str | None, typer.Option("--samples", metavar="A:B", help="Only samples A up to, not with, B.")
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", metavar="N", help="Samples computed at a time.")
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="What a run may take beside model and data, such as 2GB; it sets the batch size.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="float32, float64, float16 or bfloat16."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N [cpu].")
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        show_default=False,
        help="Compile gradient and reduction where that can be done; with auto, where it pays.",
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="For anything random [0].")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to stdout, and nothing else.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notices.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Load, choose, prove and estimate; write nothing.")
]


def run_spec(config: Path | None, **flags: Any) -> RunSpec:
    """Return the run file's settings with the given flags over them.

    Args:
        config: The run file, if any.
        flags: By the names below; None means not given.

    Raises:
        SpecError: Anything does not fit; all of it is listed.
    """
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    overrides: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        section, key = _PLACES[name]
        overrides.setdefault(section, {})[key] = value
    if "loss" in given:
        overrides["loss"]["kwargs"] = {}  # those of the run file's loss are not this one's
    return resolve(config, overrides, _wrong_names)


def _wrong_names(spec: RunSpec) -> tuple[SpecError, ...]:
    """Return what is wrong with the names of chains, backends and loss, beside what else is."""
    from gradscope.run.names import resolve_names

    try:
        resolve_names(spec)
    except SpecError as error:
        return error.parts or (error,)
    except GradscopeError:  # of the user's code, which is told when it is all that is wrong
        pass
    return ()


_PLACES = {
    "checkpoint": ("checkpoint", "path"),
    "key": ("checkpoint", "key"),
    "ignore": ("checkpoint", "ignore"),
    "unsafe_pickle": ("checkpoint", "unsafe_pickle"),
    "dataset": ("dataset", "path"),
    "model": ("model", "factory"),
    "mode": ("model", "mode"),
    "loss": ("loss", "name"),
    "backends": ("compare", "backends"),
    **{
        key: ("compute", key)
        for key in (
            "backend",
            "compile",
            "transform",
            "parameters",
            "samples",
            "shard",
            "batch_size",
            "memory",
            "dtype",
            "device",
            "seed",
            "layout",
            "compression",
            "labels",
            "coupling",
            "nonfinite",
            "verify",
        )
    },
}


def print_json(document: dict[str, Any]) -> None:
    """Print one document to stdout, names in their own letters."""
    typer.echo(printable(json.dumps(document, ensure_ascii=False, indent=2)), file=streams.out())
