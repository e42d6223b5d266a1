"""The ground truth: every query's loss after retraining on random halves of the training samples.

`python -m benchmarks.attribution.truth` makes the files in `truth/` that the benchmark reads; a run
that was stopped goes on where it was.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.attribution.tasks import TASKS, Task

FOLDER = Path(__file__).resolve().parent / "truth"
SUBSETS = 100
FIRST_SEED = 1000  # of the retrainings: far from those of the models that are explained
_SAVED_EVERY = 30.0  # seconds


@dataclass(frozen=True)
class Truth:
    """What retraining did.

    Attributes:
        subsets: (S, N), true where a subset holds a training sample.
        losses: (K, S, M), the loss of each query after training on each subset with each of K
            seeds; NaN where that has not been done yet.
    """

    subsets: np.ndarray
    losses: np.ndarray

    @property
    def complete(self) -> np.ndarray:
        """The losses with the seeds that are through (K', S, M)."""
        found: np.ndarray = self.losses[np.isfinite(self.losses).all((1, 2))]
        return found

    @property
    def mean(self) -> np.ndarray:
        """Mean over these seeds (S, M)."""
        averaged: np.ndarray = self.complete.mean(0, dtype=np.float64)
        return averaged


def halves(size: int, count: int, seed: int = 0) -> np.ndarray:
    """Draw random halves of `size` samples: (count, size), bool."""
    generator = np.random.default_rng(seed)
    chosen = np.zeros((count, size), bool)
    for row in chosen:
        row[generator.permutation(size)[: size // 2]] = True
    return chosen


def load(path: Path) -> Truth:
    """Read a file that `save` wrote."""
    with np.load(path) as data:
        subsets = np.unpackbits(data["subsets"], axis=1, count=int(data["size"])).astype(bool)
        losses = data["losses"].astype(np.float32)
        if "centre" in data:
            losses += data["centre"].astype(np.float32)
        return Truth(subsets, losses)


def save(path: Path, truth: Truth, centre: float | np.ndarray = 0.0, **more: np.ndarray) -> None:
    """Write it, subsets as bits and losses in half precision; the file appears when it is whole.

    What is stored of the losses is their difference from `centre` (M,).
    """
    part = path.with_suffix(".part.npz")
    np.savez_compressed(
        part,
        size=truth.subsets.shape[1],
        subsets=np.packbits(truth.subsets, axis=1),
        losses=(truth.losses - centre).astype(np.float16),
        centre=centre,
        **more,
    )
    part.replace(path)


def retrain(task: Task, truth: Truth) -> Iterator[tuple[int, int]]:
    """Fill in what is still NaN, a retraining at a time; yields (seed number, subset number)."""
    for k, s in np.argwhere(np.isnan(truth.losses).any(2)):
        model = task.fit(np.flatnonzero(truth.subsets[s]), FIRST_SEED + int(k))
        truth.losses[k, s] = task.losses(model)
        yield int(k), int(s)


def start(path: Path, task: Task, seeds: int, subsets: int) -> Truth:
    """Take up the file at that path, or begin; room for `seeds` retrainings of each subset."""
    losses = np.full((seeds, subsets, task.queries), np.nan, np.float32)
    if not path.exists():
        return Truth(halves(task.size, subsets), losses)
    before = load(path)
    kept = before.losses[:seeds]
    losses[: len(kept)] = kept
    return Truth(before.subsets, losses)


def make(path: Path, task: Task, seeds: int, subsets: int) -> Truth:
    """Make or complete a file of ground truth, and report on stderr."""
    truth = start(path, task, seeds, subsets)
    begun = saved = time.perf_counter()
    for k, s in retrain(task, truth):
        now = time.perf_counter()
        if now - saved > _SAVED_EVERY:
            save(path, truth)
            print(f"{path.stem}: seed {k}, subset {s}, {now - begun:.0f} s", file=sys.stderr)
            saved = now
    save(path, truth)
    return truth


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the ground truth of the tasks that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attribution.truth")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"{', '.join(TASKS)} [all]")
    parser.add_argument("--seeds", type=int, default=5, help="retrainings of each subset [5]")
    parser.add_argument("--subsets", type=int, default=SUBSETS, help=f"[{SUBSETS}]")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.tasks or TASKS:
        make(options.folder / f"{name}.npz", TASKS[name], options.seeds, options.subsets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
