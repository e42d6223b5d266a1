"""`gradscope compute` writes a result file; `gradscope merge` joins shards into one."""

import glob
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gradscope.cli.options import exit_of, run_spec, show, with_flags
from gradscope.config import this_worker
from gradscope.config.commands import ComputeOptions, MergeOptions
from gradscope.errors import ResultFileError, SpecError
from gradscope.process import stops, streams

if TYPE_CHECKING:
    from gradscope.run import Job, Run, RunReport

_SHARD = re.compile(r"\.shard-\d+-of-\d+(\.[^.]+)?$")
_UNFINISHED = (".part", ".progress", ".tmp")


@with_flags
def compute(options: ComputeOptions) -> None:
    """Compute the gradient of each sample, transform it, and write an HDF5 file."""
    output, spec = options.output, options.spec
    if output is None and not options.dry_run:
        raise SpecError("the output file is missing", remedy="Give -o OUT.h5, or --dry-run.")
    if options.resume and options.overwrite:
        raise SpecError(
            "--resume and --overwrite contradict each other", remedy="Give one of them."
        )
    worker = None if spec.is_flag("compute", "shard") else this_worker(os.environ)
    if worker is not None:
        device = worker.device(spec.compute.device)
        spec = spec.computing(shard=str(worker.shard), device=device)
        resume = options.resume or worker.restarted
        quiet = options.quiet or worker.shard.index > 0
        options = options.model_copy(update={"spec": spec, "resume": resume, "quiet": quiet})
    from gradscope.storage import LONGEST, require_place

    stops.raise_on_signal()
    if output is not None:
        require_place(output, LONGEST)
    if spec.compute.sharded and output is not None and not options.dry_run:
        _compute_divided(options, output, restarted=worker is not None and worker.restarted)
    else:
        _compute_here(options)


def _compute_divided(options: ComputeOptions, output: Path, *, restarted: bool) -> None:
    """Compute with a model that is divided over processes; the first process shows the result."""
    from gradscope.report.screens import render_merge
    from gradscope.run import compute_model_parallel

    merged = compute_model_parallel(
        options.spec, output, overwrite=options.overwrite, restarted=restarted
    )
    if merged is None:
        return
    with stops.stop_message(lambda: f"stopped; {output} is complete"):
        show(merged, render_merge, json=options.as_json, quiet=options.quiet)
    exit_of(merged)


def _compute_here(options: ComputeOptions) -> None:
    """Compute with a model in this process, or print the plan of --dry-run."""
    from gradscope.report.console import console
    from gradscope.report.screens import render_disk_space, render_plan, render_run
    from gradscope.run import estimate, preflight, prepare
    from gradscope.storage import LONGEST, require_place

    with stops.stop_message(lambda: _nothing_new(options.resume)):
        here = Path.cwd()
        job, place = prepare(options.spec), None
        if options.output is not None:  # the user's code may change the directory
            place = job.place(options.output if Path.cwd() == here else here / options.output)
            require_place(place, LONGEST)
        if options.dry_run or place is None:
            plan = estimate(job, place)
            show(plan, render_plan, json=options.as_json, verbose=options.verbose)
            plan.room.require(place or Path.cwd())
            return
        room = preflight(job, place, overwrite=options.overwrite)
        if room is not None and not (options.quiet or options.as_json):
            render_disk_space(room, console(stderr=True))
    report = _run(job, place, options)
    with stops.stop_message(lambda: f"stopped; {place} is complete"):
        show(report, render_run, json=options.as_json, quiet=options.quiet)
    if job.shard is None:  # for shards, `merge` exits with this code
        exit_of(report)


def _run(job: "Job", output: Path, options: ComputeOptions) -> "RunReport":
    from gradscope.report.console import console
    from gradscope.report.progress import track
    from gradscope.run import start

    run: Run | None = None
    quiet = options.quiet or options.as_json
    with (
        stops.stop_message(lambda: _stopped(job, run, output, options.resume)),
        start(job, output, resume=options.resume, overwrite=options.overwrite) as opened,
    ):
        run = opened
        if not quiet:
            for note in run.notes:
                typer.echo(note, file=streams.err())
        total, screen = len(job.rows) - run.writer.completed, console(stderr=True)
        unit, shown = f"{job.noun}s", set[str]()
        for batch in track(run.remaining(), total, unit=unit, quiet=quiet, console=screen):
            run.add(batch)
            for note in () if quiet else run.warnings:
                if note not in shown:
                    screen.print(note, soft_wrap=True)
                    shown.add(note)
            stops.raise_pending()
        return run.finish()


def _stopped(job: "Job", run: "Run | None", output: Path, resume: bool) -> str:
    """Return how far a stopped run has come, and the command that continues it."""
    finished = 0 if run is None else run.writer.completed
    if not finished:
        return _nothing_new(resume)
    if finished == len(job.rows) and not os.path.exists(f"{output}.part"):  # noqa: PTH110
        return f"stopped; {output} is complete"
    words = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
    command = shlex.join(["gradscope", *words, "--resume"])
    far = f"{finished:,} of {len(job.rows):,} {job.noun}s"
    return f"stopped after {far}; continue with\n  {command}"


def _nothing_new(resume: bool) -> str:
    kept = "earlier batches are kept" if resume else "nothing was written"
    return f"stopped before the first batch was finished; {kept}"


@with_flags
def merge(options: MergeOptions) -> None:
    """Join the shards of a run into the file that a single process would have written."""
    output = options.output
    recompute = None if options.config is None else run_spec(options.config, {})
    from gradscope.report.progress import track
    from gradscope.report.screens import render_merge
    from gradscope.run import merging

    stops.raise_on_signal()
    files = [file for place in options.shards for file in _files_in(place)]
    if _are_scores(files):
        _merge_scores(files, options)
        return
    how = {"overwrite": options.overwrite, "virtual": options.virtual}
    quiet = options.quiet or options.as_json
    with (
        stops.stop_message(lambda: "stopped; nothing was written"),
        merging(files, output, **how, code=options.code, recompute=recompute) as under_way,
    ):
        total = len(under_way.parts)
        unit = f"{under_way.parts.noun}s"
        for part in track(under_way.parts.files, total, unit=unit, quiet=quiet):
            under_way.add(part)
        report = under_way.finish()
    with stops.stop_message(lambda: f"stopped; {output} is complete"):
        show(report, render_merge, json=options.as_json, quiet=options.quiet)
    exit_of(report)


def _are_scores(files: list[Path]) -> bool:
    """Whether the first file holds scores; `merging` reports a file that cannot be read."""
    from gradscope.storage import open_file

    try:
        with open_file(files[0]) as file:
            return "attribution" in file.run
    except ResultFileError:
        return False


def _merge_scores(files: list[Path], options: MergeOptions) -> None:
    from gradscope.attribution import merge_scores
    from gradscope.report.screens import render_merge

    for flag, given in (("--virtual", options.virtual), ("--config", options.config)):
        if given:
            what = f"{flag} applies to gradients, and the files hold scores"
            raise SpecError(what, remedy="Leave it out.")
    with stops.stop_message(lambda: "stopped"):
        report = merge_scores(files, options.output, overwrite=options.overwrite)
    show(report, render_merge, json=options.as_json, quiet=options.quiet)


def _files_in(place: Path) -> list[Path]:
    """Return the files of an argument: a file, the shards in a folder, or a pattern's matches."""
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
        remedy = "Shards are called OUT.shard-I-of-N.h5; list files with other names one by one."
        raise ResultFileError(what, where=str(place), remedy=remedy)
    return sorted(found)
