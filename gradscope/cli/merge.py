"""`gradscope merge`: the files of many workers become one."""

import glob
import os
import re
from pathlib import Path
from typing import Annotated

from gradscope.cli import options
from gradscope.cli.options import option
from gradscope.core import stops
from gradscope.errors import ResultFileError

_SHARD = re.compile(r"\.shard-\d+-of-\d+(\.[^.]+)?$")
_UNFINISHED = (".part", ".progress", ".tmp")


def merge(
    shards: Annotated[
        list[Path], option("SHARD...", "Result files, folders with shards, or patterns.")
    ],
    output: Annotated[Path, options.OUTPUT],
    virtual: Annotated[
        bool, option("--virtual", "Refer to the shards' rows instead of copying them.")
    ] = False,
    code: Annotated[
        list[Path] | None,
        option(
            "--code FILE.py", "Code that reducers of yours are in and that may be run; repeatable."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        option(
            "--config RUN.toml",
            "Compute a few samples of each shard anew from this run file, and compare.",
        ),
    ] = None,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Join the shards of one run into the file that one process would have written."""
    anew = None if config is None else options.run_spec(config, {})
    from gradscope.report import render_merge, track
    from gradscope.run import merging

    stops.unwinding()
    files = [file for place in shards for file in _files_in(place)]
    how = {"overwrite": overwrite, "virtual": virtual}
    with (
        stops.told(lambda: "stopped; nothing was written"),
        merging(files, output, **how, code=code or [], anew=anew) as under_way,
    ):
        total = len(under_way.parts)
        unit = f"{under_way.parts.noun}s"
        for part in track(under_way.parts.files, total, unit=unit, quiet=quiet or json):
            under_way.add(part)
        report = under_way.finish()
    with stops.told(lambda: f"stopped; {output} is complete"):
        options.show(report, render_merge, json=json, quiet=quiet)
    options.exit_of(report)


def _files_in(place: Path) -> list[Path]:
    """Return the files that an argument names: one, a folder's shards, or a pattern's matches."""
    if os.path.isdir(place):  # noqa: PTH112 (which raises where a name is too long)
        found = [path for path in place.iterdir() if _SHARD.search(path.name)]
        what = "the folder holds no shards"
    elif glob.has_magic(str(place)) and not os.path.lexists(place):
        found = [Path(name) for name in glob.glob(str(place))]  # noqa: PTH207 (it may be absolute)
        what = "no file matches"
    else:
        return [place]
    found = [path for path in found if path.suffix not in _UNFINISHED]
    if not found:
        remedy = "Shards are called OUT.shard-I-of-N.h5; name files of another name."
        raise ResultFileError(what, where=str(place), remedy=remedy)
    return sorted(found)
