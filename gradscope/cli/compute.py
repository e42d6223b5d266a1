"""`gradscope compute` and `merge`: a result file of a checkpoint and a data set, or of shards."""

import glob
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradscope.cli import options
from gradscope.cli.options import option
from gradscope.config import RunSpec, this_worker
from gradscope.errors import ResultFileError, SpecError
from gradscope.process import stops, streams

if TYPE_CHECKING:
    from gradscope.run import Job, Run, RunReport

_SHARD = re.compile(r"\.shard-\d+-of-\d+(\.[^.]+)?$")
_UNFINISHED = (".part", ".progress", ".tmp")


@options.with_settings
def compute(
    *,
    output: Annotated[Path | None, options.OUTPUT] = None,
    spec: RunSpec,
    resume: Annotated[bool, option("--resume", "Go on with a stopped run.")] = False,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    dry_run: options.DryRun = False,
) -> None:
    """Compute per-sample gradients, transform them, and write an HDF5 file."""
    if output is None and not dry_run:
        raise SpecError("no result file is named", remedy="Give -o OUT.h5, or --dry-run.")
    if resume and overwrite:
        raise SpecError("--resume and --overwrite contradict each other", remedy="Give one.")
    worker = None if spec.is_flag("compute", "shard") else this_worker(os.environ)
    if worker is not None:
        device = worker.device(spec.compute.device)
        spec = spec.computing(shard=str(worker.shard), device=device)
        resume, quiet = resume or worker.restarted, quiet or worker.shard.index > 0
    from gradscope.report import console, render_disk_space, render_merge, render_plan, render_run
    from gradscope.run import compute_model_parallel, estimate, preflight, prepare
    from gradscope.storage import LONGEST, require_place

    stops.raise_on_signal()
    if output is not None:
        require_place(output, LONGEST)
    if spec.compute.sharded and output is not None and not dry_run:
        restarted = worker is not None and worker.restarted
        merged = compute_model_parallel(spec, output, overwrite=overwrite, restarted=restarted)
        if merged is None:
            return
        with stops.stop_message(lambda: f"stopped; {output} is complete"):
            options.show(merged, render_merge, json=json, quiet=quiet)
        options.exit_of(merged)
        return
    with stops.stop_message(lambda: _nothing_new(resume)):
        here = Path.cwd()
        job, place = prepare(spec), None
        if output is not None:
            place = job.place(output if Path.cwd() == here else here / output)  # code may chdir
            require_place(place, LONGEST)
        if dry_run or place is None:
            plan = estimate(job, place)
            options.show(plan, render_plan, json=json, verbose=verbose)
            plan.room.require(place or Path.cwd())
            return
        room = preflight(job, place, overwrite=overwrite)
        if room is not None and not (quiet or json):
            render_disk_space(room, console(stderr=True))
    report = _run(job, place, resume=resume, overwrite=overwrite, quiet=quiet or json)
    with stops.stop_message(lambda: f"stopped; {place} is complete"):
        options.show(report, render_run, json=json, quiet=quiet)
    if job.shard is None:  # of shards, merge says so: others wait for these
        options.exit_of(report)


def _run(job: "Job", output: Path, *, resume: bool, overwrite: bool, quiet: bool) -> "RunReport":
    from gradscope.report import console, track
    from gradscope.run import start

    run: Run | None = None
    with (
        stops.stop_message(lambda: _stopped(job, run, output, resume)),
        start(job, output, resume=resume, overwrite=overwrite) as opened,
    ):
        run = opened
        if not quiet:
            for note in run.notes:
                typer.echo(note, file=streams.err())
        total, screen = len(job.rows) - run.writer.completed, console(stderr=True)
        unit, told = f"{job.spec.compute.rows}s", set[str]()
        for batch in track(run.remaining(), total, unit=unit, quiet=quiet, console=screen):
            run.add(batch)
            for note in () if quiet else [*run.zeros]:
                if note not in told:
                    screen.print(note, soft_wrap=True)
                    told.add(note)
            stops.raise_pending()
        return run.finish()


def _stopped(job: "Job", run: "Run | None", output: Path, resume: bool) -> str:
    """Say how far a stopped run has come, and how it goes on."""
    finished = 0 if run is None else run.writer.completed
    if not finished:
        return _nothing_new(resume)
    if finished == len(job.rows) and not os.path.exists(f"{output}.part"):  # noqa: PTH110
        return f"stopped; {output} is complete"
    words = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
    command = shlex.join(["gradscope", *words, "--resume"])
    far = f"{finished:,} of {len(job.rows):,} {job.spec.compute.rows}s"
    return f"stopped after {far}; go on with\n  {command}"


def _nothing_new(resume: bool) -> str:
    kept = "what was finished earlier is kept" if resume else "nothing was written"
    return f"stopped before the first batch was finished; {kept}"


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

    stops.raise_on_signal()
    files = [file for place in shards for file in _files_in(place)]
    how = {"overwrite": overwrite, "virtual": virtual}
    with (
        stops.stop_message(lambda: "stopped; nothing was written"),
        merging(files, output, **how, code=code or [], anew=anew) as under_way,
    ):
        total = len(under_way.parts)
        unit = f"{under_way.parts.noun}s"
        for part in track(under_way.parts.files, total, unit=unit, quiet=quiet or json):
            under_way.add(part)
        report = under_way.finish()
    with stops.stop_message(lambda: f"stopped; {output} is complete"):
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
