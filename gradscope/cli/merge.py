"""`gradscope merge`: the files of many workers become one."""

import glob
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradscope.cli import options, stopping
from gradscope.errors import ResultFileError

if TYPE_CHECKING:
    from gradscope.run import MergeReport

NONFINITE = 7
_SHARD = re.compile(r"\.shard-\d+-of-\d+(\.[^.]+)?$")
_UNFINISHED = (".part", ".progress", ".tmp")


def merge(
    shards: Annotated[
        list[Path],
        typer.Argument(metavar="SHARD...", help="Result files, folders with shards, or patterns."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.h5", help="The result file.")
    ],
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Refer to the shards' rows instead of copying them.")
    ] = False,
    code: Annotated[
        list[Path] | None,
        typer.Option(
            "--code",
            metavar="FILE.py",
            help="Code that reducers of yours are in and that may be run; repeatable.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="RUN.toml",
            help="Compute a few samples of each shard anew from this run file, and compare.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.h5.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Join the shards of one run into the file that one process would have written."""
    anew = None if config is None else options.run_spec(config)
    from gradscope.report import track
    from gradscope.run import merging

    stopping.unwinding()
    files = [file for place in shards for file in found_in(place)]
    how = {"overwrite": overwrite, "virtual": virtual}
    with (
        stopping.told(lambda: "stopped; nothing was written"),
        merging(files, output, **how, code=code or [], anew=anew) as under_way,
    ):
        total = len(under_way.parts)
        for part in track(under_way.remaining(), total, quiet=quiet or json):
            under_way.add(part)
        report = under_way.finish()
    with stopping.told(lambda: f"stopped; {output} is complete"):
        _show(report, json, quiet)
    if report.nonfinite or any(report.chains_nonfinite):
        raise typer.Exit(NONFINITE)


def found_in(place: Path) -> list[Path]:
    """Return the files that an argument names: itself, a folder's shards, or a pattern's matches.

    Raises:
        ResultFileError: A folder or pattern has none.
    """
    if os.path.isdir(place):  # noqa: PTH112 (which raises where a name is too long)
        found = [path for path in place.iterdir() if _SHARD.search(path.name)]
        kind = "the folder holds no shards"
    elif glob.has_magic(str(place)) and not os.path.lexists(place):
        found = [Path(name) for name in glob.glob(str(place))]  # noqa: PTH207 (it may be absolute)
        kind = "no file matches"
    else:
        return [place]
    found = [path for path in found if path.suffix not in _UNFINISHED]
    if not found:
        raise ResultFileError(
            kind,
            where=str(place),
            remedy="Shards are called OUT.shard-I-of-N.h5; name files of another name.",
        )
    return sorted(found)


def _show(report: "MergeReport", json: bool, quiet: bool) -> None:
    from gradscope.report import console, render_merge

    if json:
        options.print_json(report.to_json())
    elif not quiet:
        render_merge(report, console())
