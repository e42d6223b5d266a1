"""`gradscope check`: load, check, plan and prove, without computing or writing anything."""

from typing import Annotated

import typer

from gradscope.cli import options, stopping

NONFINITE = 7


def check(
    checkpoint: options.Checkpoint = None,
    dataset: options.Data = None,
    config: options.Config = None,
    model: options.Model = None,
    key: options.Key = None,
    ignore: options.Ignore = None,
    unsafe_pickle: options.UnsafePickle = None,
    loss: options.Loss = None,
    transform: Annotated[
        list[str] | None,
        typer.Option("--transform", "-t", metavar="CHAIN", help="Repeatable [identity]."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", metavar="NAME", help="See `gradscope list backends` [auto]."),
    ] = None,
    parameters: options.Parameters = None,
    samples: options.Samples = None,
    batch_size: options.BatchSize = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    mode: options.Mode = None,
    seed: options.Seed = None,
    json: options.Json = False,
) -> None:
    """Load everything, prove the first batch, say what a run would cost; write nothing."""
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
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        mode=mode,
        seed=seed,
    )
    if spec.compute.verify == "never":
        spec = spec.model_copy(update={"compute": spec.compute.model_copy(update=_PROVED)})
    from gradscope.report import console, render_inspection
    from gradscope.run import inspect, prepare

    stopping.unwinding()
    found = inspect(prepare(spec))
    if json:
        options.print_json(found.to_json())
    else:
        render_inspection(found, console())
    if found.first.nonfinite:
        raise typer.Exit(NONFINITE)


_PROVED = {"verify": "first"}
