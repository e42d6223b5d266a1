"""`gradscope compare`: every way to compute the gradients, against the float64 loop."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli import options, stopping
from gradscope.core import streams
from gradscope.errors import RefusedError, SpecError

if TYPE_CHECKING:
    from gradscope.run import Job

DISAGREEMENT = 5
_SAMPLES = 32  # enough to tell a mistake, few enough for the loop


def compare(
    checkpoint: options.Checkpoint = None,
    dataset: options.Data = None,
    config: options.Config = None,
    model: options.Model = None,
    key: options.Key = None,
    ignore: options.Ignore = None,
    unsafe_pickle: options.UnsafePickle = None,
    loss: options.Loss = None,
    backends: Annotated[
        str | None,
        typer.Option("--backends", "--backend", metavar="A,B,...", help="[loop,hooks,vmap,expand]"),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="FILE.py:FUNCTION|RESULT.h5",
            help="Your own implementation, or a stored result, as a further row; repeatable.",
        ),
    ] = None,
    parameters: options.Parameters = None,
    samples: options.Samples = None,
    batch_size: options.BatchSize = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    mode: options.Mode = None,
    seed: options.Seed = None,
    compile: options.Compile = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    dry_run: options.DryRun = False,
) -> None:
    """Cross-check the backends: errors, time and memory, on the same samples.

    The first 32 samples are compared, or all of --samples.
    """
    spec = options.run_spec(
        config,
        checkpoint=checkpoint,
        dataset=dataset,
        model=model,
        key=key,
        ignore=ignore,
        unsafe_pickle=unsafe_pickle,
        loss=loss,
        backends=None if backends is None else [b.strip() for b in backends.split(",")],
        parameters=parameters,
        samples=samples,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        mode=mode,
        seed=seed,
        compile=compile,
    )
    from gradscope.comparison import compare as run
    from gradscope.comparison.run import COMPILED, compiled
    from gradscope.report import console, render_comparison
    from gradscope.run import prepare

    stopping.unwinding()
    job = prepare(spec)
    rows = job.rows if spec.compute.samples else job.rows[: batch_size or _SAMPLES]
    others = _against(against or [], job, rows)
    if spec.compute.compile:
        others[COMPILED] = compiled(spec.compute.parameters)
    if dry_run:
        names = ", ".join(spec.compare.backends)
        typer.echo(f"would compare {names} on {len(rows)} samples", file=streams.out())
        return
    batch = job.dataset.batch(rows).to(job.scope.problem.device, job.dtype)
    problem = job.scope.problem
    result = run(
        problem.model,
        problem.loss,
        batch.inputs,
        batch.targets,
        backends=spec.compare.backends,
        parameters=None if spec.compute.parameters is None else list(spec.compute.parameters),
        against=others,
    )
    if json:
        options.print_json(result.to_json() | {"digests": job.digests | _digests(against or [])})
    elif not quiet or not result.agrees:
        render_comparison(result, console())
    if not result.agrees:
        raise typer.Exit(DISAGREEMENT)
    if result.coupled:
        raise typer.Exit(RefusedError.exit_code)


def _digests(references: list[str]) -> dict[str, Any]:
    """Return the digests of the user's functions, by file."""
    from gradscope.sources import code_digests

    return {name: code_digests(name, "implementation") for name in references if ":" in name}


def _against(references: list[str], job: "Job", rows: range) -> dict[str, Any]:
    """Load the user's functions and stored results, each under the name it was given by."""
    from gradscope.sources.code import load_function

    return {
        reference: (
            load_function(reference, "implementation")
            if ":" in reference
            else _stored(Path(reference), job, rows)
        )
        for reference in references
    }


def _stored(path: Path, job: "Job", rows: range) -> dict[str, Any]:
    """Read the rows of a result's `identity` chain."""
    import numpy as np

    from gradscope.storage import open_file

    with open_file(path) as file:
        chain = next((c for c in file.chains if c.text == "identity"), None)
        if chain is None:
            raise SpecError(
                "the result holds no raw per-sample gradients",
                where=str(path),
                remedy="Compute it with -t identity.",
            )
        places = {int(k): row for row, k in enumerate(file.samples["index"])}
        missing = [k for k in rows if k not in places]
        if missing:
            raise SpecError(
                f"the result does not hold sample {missing[0]}",
                where=str(path),
                remedy="Choose samples that it holds with --samples A:B.",
            )
        wanted = [places[k] for k in rows]
        return {
            name: np.stack([array[k : k + 1][0] for k in wanted]) for name, array in chain.items()
        }
