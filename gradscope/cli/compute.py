"""`gradscope compute`: a checkpoint and a data set in, a result file out."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradscope.cli import options, stopping
from gradscope.config import this_worker
from gradscope.core import streams
from gradscope.errors import SpecError

if TYPE_CHECKING:
    from gradscope.config import RunSpec, Worker
    from gradscope.run import Job, Run
    from gradscope.stats import RunReport

NONFINITE = 7


def compute(
    checkpoint: options.Checkpoint = None,
    dataset: options.Data = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.h5", help="The result file.")
    ] = None,
    config: options.Config = None,
    model: options.Model = None,
    key: options.Key = None,
    ignore: options.Ignore = None,
    unsafe_pickle: options.UnsafePickle = None,
    loss: options.Loss = None,
    transform: Annotated[
        list[str] | None,
        typer.Option(
            "--transform",
            "-t",
            metavar="CHAIN",
            help='Such as "clip:max_norm=1.0 | mean"; repeatable [identity].',
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", metavar="NAME", help="See `gradscope list backends` [auto]."),
    ] = None,
    parameters: options.Parameters = None,
    samples: options.Samples = None,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Only part I, from 0, of N; workers of torchrun take theirs by themselves.",
        ),
    ] = None,
    batch_size: options.BatchSize = None,
    memory: options.Memory = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    mode: options.Mode = None,
    seed: options.Seed = None,
    compile: options.Compile = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout", metavar="auto|dense|factored", help="How rows are stored [dense]."
        ),
    ] = None,
    compression: Annotated[
        str | None,
        typer.Option(
            "--compression",
            metavar="gzip|zstd|blosc2[:LEVEL]",
            help="Compress rows [they are stored as they are].",
        ),
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            "--verify",
            metavar="audit|first|always|never",
            help="Which batches are proved; audit: the first, the last, some between [audit].",
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            "--labels",
            metavar="data|sampled|exact",
            help="The data's, drawn from the model's predictions, or all classes [data].",
        ),
    ] = None,
    coupling: Annotated[
        str | None,
        typer.Option(
            "--coupling",
            metavar="refuse|own-loss|frozen",
            help="What to do when samples depend on their batch [refuse].",
        ),
    ] = None,
    nonfinite: Annotated[
        str | None,
        typer.Option(
            "--nonfinite",
            metavar="skip|fail|keep",
            help="What reducers do with samples that are not finite [skip].",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stopped run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.h5.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    dry_run: options.DryRun = False,
) -> None:
    """Compute per-sample gradients, transform them, and write an HDF5 file."""
    worker = None if shard is not None else this_worker(os.environ)
    spec = options.run_spec(
        config,
        checkpoint=checkpoint,
        dataset=dataset,
        model=model,
        key=key,
        ignore=ignore,
        unsafe_pickle=unsafe_pickle,
        loss=loss,
        transform=transform,
        backend=backend,
        parameters=parameters,
        samples=samples,
        shard=shard if worker is None else str(worker.shard),
        batch_size=batch_size,
        memory=memory,
        dtype=dtype,
        device=device,
        mode=mode,
        seed=seed,
        compile=compile,
        layout=layout,
        compression=compression,
        labels=labels,
        coupling=coupling,
        nonfinite=nonfinite,
        verify=verify,
    )
    if output is None and not dry_run:
        raise SpecError("no result file is named", remedy="Give -o OUT.h5, or --dry-run.")
    if resume and overwrite:
        raise SpecError("--resume and --overwrite contradict each other", remedy="Give one.")
    if worker is not None:
        spec = _of_worker(spec, worker)
        resume = resume or worker.restarted
        quiet = quiet or worker.shard.index > 0
    from gradscope.run import prepare
    from gradscope.storage import LONGEST, require_place

    stopping.unwinding()
    with stopping.told(lambda: _nothing_new(resume)):
        here = Path.cwd()
        job = prepare(spec)
        if output is not None:  # the user's code may have gone to another folder
            output = job.place(output if Path.cwd() == here else here / output)
            require_place(output, LONGEST)
        if dry_run:
            _plan(job, output, json)
            return
        assert output is not None
        _check_room(job, output, overwrite=overwrite, quiet=quiet or json)
    report = _run(job, output, resume=resume, overwrite=overwrite, quiet=quiet or json)
    with stopping.told(lambda: f"stopped; {output} is complete"):
        _show(report, json, quiet)
    broken = report.nonfinite or any(report.chains_nonfinite)
    if broken and job.shard is None:  # of shards, merge says so: others wait for these
        raise typer.Exit(NONFINITE)


def _of_worker(spec: "RunSpec", worker: "Worker") -> "RunSpec":
    """Give a worker its own GPU."""
    device = worker.device(spec.compute.device)
    compute = spec.compute.model_copy(update={"device": device})
    return spec.model_copy(update={"compute": compute})


def _check_room(job: "Job", output: Path, *, overwrite: bool, quiet: bool) -> None:
    """Before a large run, say what it will write; refuse what does not fit."""
    from gradscope.report.console import console
    from gradscope.report.plan import render_room
    from gradscope.run import preflight

    room = preflight(job, output, overwrite=overwrite)
    if room is not None and not quiet:
        render_room(room, console(stderr=True))


def _run(job: "Job", output: Path, *, resume: bool, overwrite: bool, quiet: bool) -> "RunReport":
    from gradscope.report.progress import track
    from gradscope.run import start

    run: Run | None = None
    with (
        stopping.told(lambda: _stopped(job, run, output, resume)),
        start(job, output, resume=resume, overwrite=overwrite) as opened,
    ):
        run = opened
        if not quiet:
            for note in run.notes:
                typer.echo(note, file=streams.err())
        total = len(job.rows) - run.writer.completed
        for batch in track(run.remaining(), total, quiet=quiet):
            run.add(batch)
            stopping.once_more()
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
    return f"stopped after {finished:,} of {len(job.rows):,} samples; go on with\n  {command}"


def _nothing_new(resume: bool) -> str:
    kept = "what was finished earlier is kept" if resume else "nothing was written"
    return f"stopped before the first batch was finished; {kept}"


def _plan(job: "Job", output: Path | None, json: bool) -> None:
    from gradscope.report.console import console
    from gradscope.report.plan import render_plan
    from gradscope.run import estimate

    found = estimate(job, output)
    if json:
        options.print_json(found.to_json())
    else:
        render_plan(found, console())
    found.room.require(output or Path.cwd())


def _show(report: "RunReport", json: bool, quiet: bool) -> None:
    from gradscope.report.console import console
    from gradscope.report.run import render_run

    if json:
        options.print_json(report.to_json())
    elif not quiet:
        render_run(report, console())
