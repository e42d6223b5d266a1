"""What comes before a run: `gradscope list`, `gradscope init` and `gradscope check`."""

import re
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli import options
from gradscope.cli.options import option
from gradscope.config import HELD, RunSpec
from gradscope.process import stops, streams

if TYPE_CHECKING:
    from gradscope.core.registry import Registry

Kind = StrEnum("Kind", ["BACKENDS", "TRANSFORMS", "REDUCERS", "LOSSES", "FORMATS"])
AUTO_SUMMARY = "The first of them that does not refuse and whose first batch is proved."


def list_(
    kind: Annotated[Kind, typer.Argument(show_default=False, help="What to list.")],
    json: options.Json = False,
) -> None:
    """List the backends, transforms, reducers, losses or formats there are."""
    from gradscope.report import print_facts

    rows = [
        {"name": name, "summary": registry.summary(name)}
        for registry in registries()[kind]
        for name in registry.names()
    ]
    if kind == "backends":
        rows.insert(0, {"name": "auto", "summary": AUTO_SUMMARY})
    document = {"schema": "gradscope.list", "version": 1, "kind": kind, "entries": rows}
    facts = [(row["name"], row["summary"]) for row in rows]
    options.show(document, lambda _, console: print_facts(console, facts), json=json)


def registries() -> "dict[str, list[Registry[Any]]]":
    """Return the registries of each kind."""
    from gradscope.backends.base import backends
    from gradscope.sources.formats import checkpoint_readers, dataset_readers
    from gradscope.stages.losses import losses
    from gradscope.stages.reducers.base import reducers
    from gradscope.stages.transforms.base import transforms

    return {
        "backends": [backends],
        "transforms": [transforms],
        "reducers": [reducers],
        "losses": [losses],
        "formats": [checkpoint_readers, dataset_readers],
    }


def init(
    checkpoint: Annotated[Path, options.flag("checkpoint", "path")],
    dataset: Annotated[Path, options.flag("dataset", "path")],
    output: Annotated[Path, option("--output -o RUN.toml", "The run file.")] = Path("run.toml"),
    model: Annotated[str | None, options.flag("model", "factory")] = None,
    loss: Annotated[str | None, options.flag("loss", "name")] = None,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
) -> None:
    """Write a commented run file, guessing what can be guessed; nothing of yours is executed."""
    from gradscope.report import print_facts
    from gradscope.sources.draft import draft
    from gradscope.stages.losses import bound, losses
    from gradscope.storage import require_free, require_place, written

    require_place(output)
    known = re.compile(rb"^version *= *\d", re.MULTILINE).search
    require_free(output, overwrite=overwrite, kind="run file", known=lambda h: bool(known(h)))
    given = {"checkpoint": checkpoint, "dataset": dataset}
    # what is wrong with an option is told before anything is written
    asked = options.run_spec(None, {**given, "model": model or HELD, "loss": loss or "mse"})
    stage = asked.loss.stage
    if ":" not in stage.name:  # else it is code of yours, which is not executed
        bound(losses.get(stage.name), stage)
    found = draft(checkpoint, dataset, output.parent, model=model, loss=loss)
    written(output, lambda file: file.write(found.text.encode()))
    told = {"path": str(output), "guessed": found.guessed, "missing": found.missing}
    told["unused"] = found.unused
    rows = [*found.guessed.items(), *((key, "an example: write your own") for key in found.missing)]
    rows += [("not used", f"{name}: {why}") for name, why in found.unused.items()]
    following = shlex.join(["gradscope", "check", "--config", str(output)])
    rows += [("written", str(output)), ("next", following)]
    document = {"schema": "gradscope.init", "version": 1, **told}
    options.show(document, lambda _, console: print_facts(console, rows), json=json)


@options.with_settings
def check(*, spec: RunSpec, json: options.Json = False, verbose: options.Verbose = False) -> None:
    """Load everything, prove the first batch, say what a run would cost; write nothing."""
    if spec.compute.verify == "never":
        spec = spec.computing(verify="first")
    from gradscope.report import render_inspection
    from gradscope.run import inspect, prepare

    stops.raise_on_signal()
    job = prepare(spec)
    if job.dataset.unused:
        typer.echo(job.dataset.unused, file=streams.err())
    found = inspect(job)
    options.show(found, render_inspection, json=json, verbose=verbose)
    if found.first.nonfinite:
        raise typer.Exit(options.NONFINITE)
