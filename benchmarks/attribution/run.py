"""One way to attribute one task: its scores, seconds and memory, in a process of its own."""

import json
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.attribution.methods import METHODS, checkpoints
from benchmarks.attribution.tasks import TASKS, Task
from benchmarks.attribution.truth import FOLDER, Truth, load
from gradscope.attribution.lds import Lds, lds
from gradscope.process.memory import peak_memory

_LIMIT = 900.0  # seconds of a process


@dataclass(frozen=True)
class Cell:
    """What a method reached on a task.

    Attributes:
        one: LDS of one model, the mean over the models that were explained.
        several: LDS of the mean of their scores; None of one.
        seconds: Of the processor a model, imports not counted.
        peak_bytes: Of memory above what the process had after the imports; None where unknown.
        reason: Why there is nothing, in a line.
    """

    one: Lds | None = None
    several: Lds | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    reason: str = ""


def measure(name: str, method: str, seeds: tuple[int, ...], folder: Path) -> Cell:
    """Run a method in a process of its own, with one thread, and return what it reached."""
    if not METHODS[method].present:
        return Cell(reason=f"{METHODS[method].needs} is not installed")
    out = folder / "scores.npz"
    words = [name, method, ",".join(map(str, seeds)), str(folder), str(out)]
    command = [sys.executable, "-m", "benchmarks.attribution.run", *words]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return Cell(reason=f"it took more than {_LIMIT:.0f} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Cell(reason=lines[-1] if lines else f"exit code {done.returncode}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    with np.load(out) as data:
        scores = data["scores"]
    out.unlink()
    return cell(scores, load(FOLDER / f"{name}.npz"), told)


def cell(scores: np.ndarray, truth: Truth, told: dict[str, float | int | None]) -> Cell:
    """Return the cell of scores (K, M, N) of K models."""
    each = [lds(one, truth.subsets, truth.mean) for one in scores]
    several = lds(scores.mean(0), truth.subsets, truth.mean) if len(scores) > 1 else None
    seconds, peak = told["seconds"], told["peak_bytes"]
    return Cell(
        mean_of(each),
        several,
        None if seconds is None else float(seconds) / len(scores),
        None if peak is None else int(peak),
    )


def mean_of(each: list[Lds]) -> Lds:
    """Return the mean over models; the ends of the interval are averaged likewise."""
    return Lds(
        np.mean([one.by_query for one in each], 0),
        float(np.mean([one.mean for one in each])),
        float(np.mean([one.low for one in each])),
        float(np.mean([one.high for one in each])),
        each[0].subsets,
    )


def _scored(
    task: Task, method: str, seeds: tuple[int, ...], folder: Path
) -> tuple[list[np.ndarray], dict[str, float | int | None]]:
    models, way = checkpoints(task, seeds, folder), METHODS[method]
    few = replace(task, size=20, queries=5)
    way.scores(few, checkpoints(task, seeds[:1], folder)[0])  # imports what is imported late
    found = []
    with peak_memory(torch.device("cpu")) as peak:
        before = time.process_time()
        for model in models:
            found.append(way.scores(task, model))
        seconds = time.process_time() - before
    return found, {"seconds": seconds, "peak_bytes": peak[0] if peak else None}


def main(words: list[str]) -> int:
    """Score a task by a method: TASK METHOD SEEDS FOLDER OUT."""
    name, method, seeds, folder, out = words
    torch.set_num_threads(1)
    torch.manual_seed(0)  # of labels and projections that a library draws
    chosen = tuple(int(seed) for seed in seeds.split(","))
    try:
        found, told = _scored(TASKS[name], method, chosen, Path(folder))
    except Exception as error:  # a library's, whatever it is: it goes into the table
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    np.savez(out, scores=np.stack(found))
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
