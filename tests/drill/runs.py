"""Small runs of every kind, each a function of the folder that its result goes to."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gradscope.blocks import Gradients
from gradscope.cli import main
from gradscope.cli.app import show_error
from gradscope.errors import GradscopeError
from gradscope.storage import FilePlan
from gradscope.storage.write import journal
from tests.cli import forked
from tests.run import project
from tests.storage.example import PLAN, changing, gradients, with_layout, write

SAMPLES, BATCH, SHARDS = 28, 7, 3
RESULT, SHARD = "o.h5", f"o.shard-1-of-{SHARDS}.h5"
ROWS = ("identity",)
SEVERAL = (
    "identity",
    "clip:max_norm=1 | mean",
    "var | norm:p=1",
    "project:dim=6,seed=1 | gram",
)

Step = Callable[[Path], None]  # what a process does, with its result in this folder
Make = Callable[[int, int], Gradients]


@dataclass(frozen=True)
class Job:
    """What is stopped, and how it goes on."""

    name: str  # what is special about it
    start: Step  # the command
    again: Step  # the command that goes on; given to whoever does not find the result
    before: Step | None = None  # what makes another result that is there, and is to be replaced
    result: str = RESULT  # the file's name
    # whether it may also go on where the result is there: it finds nothing to do
    goes_on: bool = False


def load() -> None:
    """Import everything, once for all forks, and let every batch be committed."""
    forked.load()
    vars(journal).update(COMMIT_SECONDS=0.0, COMMIT_SHARE=0)
    torch.set_num_threads(1)


def prepared(scratch: Path, samples: int = SAMPLES) -> Path:
    """Return the folder with model, weights, data, shards and a result that all jobs read."""
    inputs = scratch / "inputs"
    if inputs.exists():
        return inputs
    inputs.mkdir()
    project.write(inputs, samples)
    for k in range(SHARDS):
        finished(compute(inputs, SEVERAL, "--shard", f"{k}/{SHARDS}"), inputs)
    finished(compute(inputs, SEVERAL), inputs)
    return inputs


def finished(step: Step, folder: Path) -> None:
    """Take a step that must succeed."""
    done = forked.apart(lambda: step(folder))
    assert done.code == 0, done


def command(*words: object) -> None:
    """Be the process `gradscope WORDS`."""
    import sys

    sys.argv = ["gradscope", *map(str, words)]
    main()


def compute(inputs: Path, chains: tuple[str, ...], *words: str) -> Step:
    """Return a small run."""
    fixed = (
        *("compute", f"{inputs}/weights.pt", f"{inputs}/data.npz", "-q"),
        *("--model", f"{inputs}/model.py:build", "--loss", f"{inputs}/model.py:loss"),
        *("--batch-size", str(BATCH), "--dtype", "float64"),
        *(word for chain in chains for word in ("-t", chain)),
    )
    return lambda folder: command(*fixed, *words, "-o", folder / RESULT)


def merge(inputs: Path, *words: str) -> Step:
    """Return the merge of the run's shards."""
    shards = [inputs / f"o.shard-{k}-of-{SHARDS}.h5" for k in range(SHARDS)]
    return lambda folder: command("merge", *shards, "-q", *words, "-o", folder / RESULT)


def export(inputs: Path, name: str) -> Step:
    """Return an export of the run."""
    return lambda folder: command("export", inputs / RESULT, "-o", folder / name)


def command_jobs(inputs: Path) -> list[Job]:
    """Return what the command line does that writes files."""
    kinds: dict[str, tuple[tuple[str, ...], ...]] = {
        "gzip": (ROWS, ("--compression", "gzip")),
        "a shard of several chains": (SEVERAL, ("--shard", f"1/{SHARDS}")),
    }
    jobs = []
    for name, (chains, words) in kinds.items():
        steps = (compute(inputs, chains, *words, *more) for more in ((), ("--resume",)))
        result = SHARD if "--shard" in words else RESULT
        jobs.append(Job(name, *steps, result=result, goes_on=True))
    new, other = (compute(inputs, ROWS, *w) for w in (["--overwrite"], ["--seed", "5"]))
    jobs.append(Job("over another result", new, new, before=other, goes_on=True))
    jobs.append(Job("merge", *[merge(inputs)] * 2))
    jobs += [
        Job(f"export {name}", *[export(inputs, name)] * 2, result=name)
        for name in ("e.safetensors", "e.csv")
    ]
    return jobs


def writer_jobs() -> list[Job]:
    """Return runs that are written without being computed, which takes less time."""
    kinds: list[tuple[str, FilePlan, Make]] = [
        ("factored", with_layout("factored"), gradients),
        ("laid out anew", PLAN, changing),
    ]
    return [
        Job(name, *(partial(_written, plan, make, a) for a in (False, True)), goes_on=True)
        for name, plan, make in kinds
    ]


def _written(plan: FilePlan, make: Make, resume: bool, folder: Path) -> None:
    try:
        write(folder / RESULT, plan, size=25, make=make, resume=resume)
    except GradscopeError as error:
        raise SystemExit(show_error(error)) from error
