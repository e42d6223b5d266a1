"""What comes before a run: `gradscope list`, `gradscope init` and `gradscope check`."""

import re
import shlex
from typing import TYPE_CHECKING

import typer

from gradscope.cli.names import registries
from gradscope.cli.options import NONFINITE, run_spec, show, with_flags
from gradscope.config import FROM_CHECKPOINT
from gradscope.config.commands import CheckOptions, InitOptions, ListOptions
from gradscope.process import stops, streams

if TYPE_CHECKING:
    pass

AUTO_SUMMARY = "The first of them that does not refuse and whose first batch is proved."


@with_flags
def list_(options: ListOptions) -> None:
    """List the backends, transforms, reducers, losses or formats there are."""
    from gradscope.report import print_facts

    rows = [
        {"name": name, "summary": registry.summary(name)}
        for registry in registries()[options.kind]
        for name in registry.names()
    ]
    if options.kind == "backends":
        rows.insert(0, {"name": "auto", "summary": AUTO_SUMMARY})
    document = {"schema": "gradscope.list", "version": 1, "kind": options.kind, "entries": rows}
    facts = [(row["name"], row["summary"]) for row in rows]
    show(document, lambda _, console: print_facts(console, facts), json=options.as_json)


@with_flags
def init(options: InitOptions) -> None:
    """Write a commented run file, guessing what can be guessed; nothing of yours is executed."""
    from gradscope.report import print_facts
    from gradscope.sources.draft import draft
    from gradscope.stages.losses import bound, losses
    from gradscope.storage import require_free, require_place, written

    output, model, loss = options.output, options.model, options.loss
    require_place(output)
    known = re.compile(rb"^version *= *\d", re.MULTILINE).search
    require_free(
        output, overwrite=options.overwrite, kind="run file", known=lambda h: bool(known(h))
    )
    given = {"checkpoint": options.checkpoint, "dataset": options.dataset}
    # what is wrong with an option is told before anything is written
    asked = run_spec(None, {**given, "model": model or FROM_CHECKPOINT, "loss": loss or "mse"})
    stage = asked.loss.stage
    if ":" not in stage.name:  # else it is code of yours, which is not executed
        bound(losses.get(stage.name), stage)
    found = draft(
        options.checkpoint,
        options.dataset,
        output.parent,
        model=model,
        loss=loss,
        unsafe_pickle=options.unsafe_pickle,
    )
    written(output, lambda file: file.write(found.text.encode()))
    told = {"path": str(output), "guessed": found.guessed, "missing": found.missing}
    told["unused"] = found.unused
    rows = [*found.guessed.items(), *((key, "an example: write your own") for key in found.missing)]
    rows += [("not used", f"{name}: {why}") for name, why in found.unused.items()]
    following = shlex.join(["gradscope", "check", "--config", str(output)])
    rows += [("written", str(output)), ("next", following)]
    document = {"schema": "gradscope.init", "version": 1, **told}
    show(document, lambda _, console: print_facts(console, rows), json=options.as_json)


@with_flags
def check(options: CheckOptions) -> None:
    """Load everything, prove the first batch, say what a run would cost; write nothing."""
    spec = options.spec
    if spec.compute.verify == "never":
        spec = spec.computing(verify="first")
    from gradscope.report import render_inspection
    from gradscope.run import inspect, prepare

    stops.raise_on_signal()
    job = prepare(spec)
    if job.dataset.unused:
        typer.echo(job.dataset.unused, file=streams.err())
    found = inspect(job)
    show(found, render_inspection, json=options.as_json, verbose=options.verbose)
    if found.first.nonfinite:
        raise typer.Exit(NONFINITE)
