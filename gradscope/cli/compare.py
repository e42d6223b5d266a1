"""`gradscope compare`: backends and other implementations against the float64 loop."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gradscope.cli.options import show, with_flags
from gradscope.config.commands import CompareOptions
from gradscope.core.texts import count
from gradscope.errors import RefusedError, ResultFileError, SpecError
from gradscope.process import stops, streams

if TYPE_CHECKING:
    from gradscope.comparison import Comparison
    from gradscope.core.batch import Batch
    from gradscope.run import Job

DISAGREEMENT = 5
_SAMPLES = 32  # the default number of samples


@with_flags
def compare(options: CompareOptions) -> None:
    """Compare the backends with a float64 loop: errors, time and memory on the same samples.

    The first 32 samples are used, or all of --samples.
    """
    from gradscope.comparison import PEERS, peer_version
    from gradscope.report.agreement import render_comparison
    from gradscope.run import prepare
    from gradscope.run.job import read
    from gradscope.sources.code import code_digests

    stops.raise_on_signal()
    spec = options.spec
    job = prepare(spec)
    size = spec.compute.batch_size if spec.is_flag("compute", "batch_size") else _SAMPLES
    rows = job.samples if spec.compute.samples else job.samples[:size]
    batch: Batch | None = None
    if job.groups is not None:
        most = job.work() if spec.compute.samples else max(size or _SAMPLES, job.least)
        batch = job.load(0, most)
        rows = range(len(batch))
    others = {name: _loaded(name, rows, job) for name in options.against}
    if options.dry_run:
        names, noun = ", ".join(spec.compare.backends), "sample" if batch is None else "group"
        typer.echo(f"would compare {names} on {count(len(rows), noun)}", file=streams.out())
        return
    batch = batch or read(job.dataset, job.session.problem, rows)
    result = _compared(job, batch, others)
    found: Any = result
    if options.as_json:
        codes = {name: code_digests(name, "implementation") for name in others if ":" in name}
        versions = {name: peer_version(name) for name in others if name in PEERS}
        found = result.to_json() | {"digests": job.digests | codes, "libraries": versions}
    ways = {"quiet": options.quiet and result.agrees, "verbose": options.verbose}
    show(found, render_comparison, json=options.as_json, **ways)
    if not result.agrees:
        raise typer.Exit(DISAGREEMENT)
    if result.coupled:
        raise typer.Exit(RefusedError.exit_code)


def _compared(job: "Job", batch: "Batch", others: dict[str, Any]) -> "Comparison":
    """Compare the backends of the run's spec and the implementations of --against."""
    from gradscope.comparison import COMPILED, compare, compiled

    asked, problem = job.spec.compute, job.session.problem
    if asked.compile:
        others = others | {COMPILED: compiled(asked.parameters)}
    return compare(
        problem.model,
        problem.loss,
        batch if job.groups is not None else batch.inputs,
        batch.targets,
        backends=job.spec.compare.backends,
        parameters=None if asked.parameters is None else list(asked.parameters),
        against=others,
        randomness=asked.randomness,
        seed=asked.seed,
        index=batch.index,
        rows=asked.rows,
    )


def _loaded(reference: str, samples: range, job: "Job") -> Any:
    """Return the implementation of a user or a library, or the rows of a result file."""
    from gradscope.comparison import PEERS, peer

    if reference in PEERS:
        return peer(reference, job.noun)
    if ":" in reference:
        from gradscope.sources.code import load_function

        return load_function(reference, "implementation")
    from gradscope.storage import open_file

    if not os.path.exists(reference):  # noqa: PTH110 (which raises where a name is too long)
        raise ResultFileError(
            "this is neither a known library nor an existing file",
            where=f"against {reference}",
            remedy=f"Give {', '.join(sorted(PEERS))}, FILE.py:FUNCTION or a result file.",
        )
    with open_file(Path(reference)) as file:
        chain = next((c for c in file.chains if c.text == "identity"), None)
        if chain is None:
            raise SpecError(
                "the result file has no per-sample gradients (chain identity)",
                where=reference,
                remedy="Run gradscope compute -t identity.",
            )
        if dict(file.run).get("groups") != job.record().get("groups"):
            raise SpecError(
                "the result file has other groups",
                where=reference,
                remedy="Compute it with the same data, --samples, --rows and --group.",
            )
        # with rows of tokens, a sample may have several rows or none
        places: dict[int, list[int]] = {
            k: [] for k in range(*file.run.get("tokens", {}).get("samples", (0, 0)))
        }
        for row, k in enumerate(file.samples.get("sample", file.samples["index"])):
            places.setdefault(int(k), []).append(row)
        missing = [k for k in samples if k not in places]
        if missing:
            raise SpecError(
                f"the result file lacks sample {missing[0]}",
                where=reference,
                remedy="Select samples that it contains with --samples A:B.",
            )
        wanted = [row for k in samples for row in places[k]]
        return {name: array[wanted] for name, array in chain.items()}
