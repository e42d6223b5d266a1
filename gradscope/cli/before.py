"""Commands to prepare a run: `gradscope list`, `gradscope init` and `gradscope check`."""

import re
import shlex
from functools import partial
from typing import Any

import typer

from gradscope.cli.names import registries
from gradscope.cli.options import NONFINITE, UNPROVED, show, with_flags
from gradscope.config import RunSpec, function_of
from gradscope.config.commands import CheckOptions, InitOptions, ListOptions
from gradscope.process import stops, streams

AUTO_SUMMARY = "hooks, or the fastest other backend if it refuses; the first batch must be proved."


@with_flags
def list_(options: ListOptions) -> None:
    """List the available backends, transforms, reducers, losses or formats."""
    from gradscope.report.terminal import print_facts

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
    """Write a commented run file with settings found in your files; your code is not run.

    With --unsafe-pickle, reading a checkpoint may execute code.
    """
    from gradscope.core.texts import listed
    from gradscope.report.terminal import print_facts
    from gradscope.run import resolve_names
    from gradscope.sources.draft import draft
    from gradscope.storage import require_free, require_place, written

    output = options.output
    require_place(output)
    known = re.compile(rb"^version *= *\d", re.MULTILINE).search
    require_free(
        output, overwrite=options.overwrite, kind="run file", known=lambda h: bool(known(h))
    )
    resolve_names(_without_code(options.spec))
    model = options.spec.model.model_copy(update={"argv": options.arguments})
    spec = options.spec.model_copy(update={"model": model})
    found = draft(spec, options.dataset, output.parent)
    for name, text in {**found.files, output.name: found.text}.items():
        written(output.with_name(name), partial(_write_text, text))
    told = {"path": str(output), "files": [*found.files], "guessed": found.guessed}
    told |= {"missing": [*found.missing], "unused": found.unused}
    rows = [*found.guessed.items(), *found.missing.items()]
    if found.missing:
        rows.append(
            (
                "or",
                f"gradscope init {shlex.quote(str(spec.checkpoint.path))} SCRIPT.py "
                "-- ARGUMENTS: takes all of it from the first steps of your training script",
            )
        )
    rows += [("not used", f"{name}: {why}") for name, why in found.unused.items()]
    following = f"gradscope check --config {shlex.quote(str(output))}"
    places = listed([str(output), *(str(output.with_name(name)) for name in found.files)])
    rows += [("written", places), ("next", following)]
    document = {"schema": "gradscope.init", "version": 1, **told}
    show(document, lambda _, console: print_facts(console, rows), json=options.as_json)


def _write_text(text: str, file: Any) -> None:
    file.write(text.encode())


def _without_code(spec: RunSpec) -> RunSpec:
    """Return the settings of a run without chains and loss that are the user's code."""
    chains = tuple(text for text in spec.compute.transform if ".py:" not in text)
    kept = spec.computing(transform=chains or ("identity",))
    if function_of(spec.loss.stage.name) is None:
        return kept
    return kept.model_copy(update={"loss": spec.loss.model_copy(update={"name": "mse"})})


@with_flags
def check(options: CheckOptions) -> None:
    """Load all inputs, prove the first batch, and print the cost of a run. Writes no file."""
    spec = options.spec
    if spec.compute.verify == "never":
        spec = spec.computing(verify="first")
    from gradscope.report.screens import render_inspection
    from gradscope.run import inspect, prepare

    stops.raise_on_signal()
    job = prepare(spec)
    if job.dataset.unused:
        typer.echo(job.dataset.unused, file=streams.err())
    found = inspect(job)
    show(found, render_inspection, json=options.as_json, verbose=options.verbose)
    if found.first.nonfinite:
        raise typer.Exit(NONFINITE)
    if not found.certificate["proves"]:  # every gradient is zero
        raise typer.Exit(UNPROVED)
