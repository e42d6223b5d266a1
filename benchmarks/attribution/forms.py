"""Which form of a score is better for what: `python -m benchmarks.attribution.forms`.

Five measurements of each form and curvature, on images of digits, means over the models:

- LDS: as in `python -m benchmarks.attribution`, from the same ground truth.
- Wrong labels: a tenth of the training labels is wrong. Their share among the three samples that
  harmed a query most, over the queries that the model predicts wrongly.
- By sum: the share of the wrong labels among the samples with the lowest sum of scores over all
  queries, as many samples as there are wrong labels.
- Outliers: ten images of noise stand in the training data twice, with two labels, so their
  gradients stay large. Their share among the five samples that helped a query most.
- Copies: each query has a noisy copy with the same label in the training data. The share of queries
  whose copy is the sample that helped most.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradscope
from benchmarks.attribution.tasks import CHECKPOINTS, TASKS, Task
from benchmarks.attribution.truth import FOLDER, Truth, load
from gradscope.attribution.lds import lds

FORMS = ("influence", "relative", "cosine")
CURVATURES = ("identity", "ekfac", "shrunk", "auto")
COLUMNS = ("LDS", "wrong labels", "by sum", "outliers", "copies")
_FAULTS, _OUTLIERS, _NOISE = 0.1, 10, 0.1

Way = tuple[str, str]  # curvature and form


def planted(task: Task, kind: str, seed: int) -> tuple[Task, np.ndarray]:
    """Return the task with planted faults, outliers or copies, and their places (k,)."""
    draw = np.random.default_rng(seed)
    inputs, labels = (values.clone() for values in task.train)
    count = {"faults": int(_FAULTS * task.size), "outliers": 2 * _OUTLIERS, "copies": task.queries}
    places = draw.permutation(task.size)[: count[kind]]
    if kind == "faults":
        labels[places] = (labels[places] + torch.from_numpy(draw.integers(1, 10, len(places)))) % 10
    elif kind == "outliers":
        first, second = np.split(places, 2)
        inputs[first] = torch.from_numpy(draw.random((_OUTLIERS, *inputs.shape[1:]))).to(inputs)
        labels[first] = torch.from_numpy(draw.integers(0, 10, _OUTLIERS))
        other = torch.from_numpy(draw.integers(1, 10, _OUTLIERS))
        inputs[second], labels[second] = inputs[first], (labels[first] + other) % 10
    else:
        query, own = task.query
        noise = torch.from_numpy(draw.normal(size=tuple(query.shape), scale=_NOISE))
        inputs[places], labels[places] = query + noise.to(query), own
    made = replace(task)
    vars(made)["train"] = inputs, labels  # instead of the cached property
    return made, places


def scores(task: Task, model: nn.Module, curvature: Any, form: Any) -> np.ndarray:
    """Return the scores (M, N) of a trained model."""
    scope = gradscope.Scope(model, task.loss)
    sides = (scope, *task.train), (scope, *task.query)
    return np.asarray(gradscope.attribute(*sides, curvature, score=form).values)


def best(values: np.ndarray, k: int) -> np.ndarray:
    """Return the places (M, k) of the largest scores."""
    return np.argsort(-values, 1, kind="stable")[:, :k]


def shares(kind: str, values: np.ndarray, places: np.ndarray, wrong: np.ndarray) -> list[float]:
    """Return what scores (M, N) reach on planted samples: the columns of that kind.

    Args:
        kind: faults, outliers or copies.
        values: The scores.
        places: The planted samples.
        wrong: Whether the model predicts a query wrongly (M,).
    """
    if kind == "faults":
        lowest = best(-values.sum(0, keepdims=True), len(places))
        lists = [best(-values[wrong], 3), lowest]
        return [float(np.isin(one, places).mean()) for one in lists]
    if kind == "outliers":
        return [float(np.isin(best(values, 5), places).mean())]
    return [float((best(values, 1)[:, 0] == places).mean())]


def measure(task: Task, truth: Truth, seeds: Sequence[int]) -> dict[Way, np.ndarray]:
    """Return {(curvature, form): the five measurements}, means over the models of the seeds."""
    ways = [(curvature, form) for curvature in CURVATURES for form in FORMS]
    found: dict[Way, list[float]] = {way: [] for way in ways}
    for seed in seeds:
        for kind in ("", "faults", "outliers", "copies"):
            own, places = planted(task, kind, seed) if kind else (task, np.arange(0))
            model = own.fit(np.arange(own.size), seed)
            wrong = _wrong(own.query, model)
            for way in ways:
                values = scores(own, model, *way)
                if kind:
                    found[way] += shares(kind, values, places, wrong)
                else:
                    found[way].append(lds(values, truth.subsets, truth.mean).mean)
    return {way: np.reshape(row, (len(seeds), -1)).mean(0) for way, row in found.items()}


def _wrong(query: tuple[Tensor, Tensor], model: nn.Module) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = (model(query[0]).argmax(1) != query[1]).numpy()
    return found


def table(title: str, found: Mapping[Way, np.ndarray]) -> list[str]:
    """Return the lines of a table in Markdown; forms with the same ranking share a line."""
    lines = [
        f"| {title} | score | {' | '.join(COLUMNS)} |",
        "|---|---|" + "---:|" * len(COLUMNS),
    ]
    for curvature in CURVATURES:
        influence, relative, cosine = (found[curvature, form] for form in FORMS)
        lines.append(f"| {curvature} | influence | {' | '.join(_cells(influence))} |")
        cells = _cells(cosine)
        cells[2] = f"{relative[2]:.0%}, {cells[2]}"
        lines.append(f"| {curvature} | relative, cosine | {' | '.join(cells)} |")
    return lines


def _cells(row: np.ndarray) -> list[str]:
    return [f"{row[0]:.3f}", *(f"{share:.0%}" for share in row[1:])]


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attribution.forms",
        description="Compare the forms of scores on digits with planted samples.",
    )
    known = ("mlp", "cnn")
    parser.add_argument("--tasks", nargs="+", choices=known, default=list(known))
    parser.add_argument("--models", type=int, default=2, help="trained for each measurement [2]")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the tasks that were asked for, and print a table of each."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.tasks:
        task = TASKS[name]
        found = measure(task, load(FOLDER / f"{name}.npz"), CHECKPOINTS[: options.models])
        print("\n".join([*table(task.title, found), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
