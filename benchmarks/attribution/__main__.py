"""`python -m benchmarks.attribution`."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks import machine
from benchmarks.attribution import size
from benchmarks.attribution.methods import METHODS, checkpoints
from benchmarks.attribution.run import Cell, measure
from benchmarks.attribution.tasks import CHECKPOINTS, TASKS
from benchmarks.attribution.truth import FOLDER, load
from gradscope.attribution.lds import Lds, lds

Found = Mapping[str, Mapping[str, Cell]]  # {method: {task: cell}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Score every task by every method, and print the table in Markdown."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    if options.size is not None:
        size.main(options.size or list(size.SIZES))
        return 0
    seeds = CHECKPOINTS[: options.models]
    found: dict[str, dict[str, Cell]] = {method: {} for method in options.methods}
    with TemporaryDirectory() as scratch:
        for name in options.tasks:
            folder = Path(scratch) / name
            folder.mkdir()
            checkpoints(TASKS[name], seeds, folder)
            for method in options.methods:
                found[method][name] = measure(name, method, seeds, folder)
                print(f"{name}, {method}: {word(found[method][name])}", file=sys.stderr)
    print("\n".join([*table(found, options.tasks, len(seeds)), "", *_facts(options.tasks)]))
    if options.json:
        options.json.write_text(json.dumps(document(found), indent=1))
    return 0


def table(found: Found, tasks: Sequence[str], models: int) -> list[str]:
    """Return the lines of two tables, methods down and tasks across: LDS, and what it costs.

    The best LDS of a column is bold.
    """
    notes = list(
        dict.fromkeys(c.reason for row in found.values() for c in row.values() if c.reason)
    )
    best = {name: _best([cells[name] for cells in found.values()]) for name in tasks}
    titles = [TASKS[name].title for name in tasks]
    agreeing = {
        method: [entry for name in tasks for entry in _entries(cells[name], best[name], notes)]
        for method, cells in found.items()
    }
    costing = {
        method: [entry for name in tasks for entry in _costs(cells[name])]
        for method, cells in found.items()
    }
    lines = [
        *_lines("LDS", [head for t in titles for head in (t, f"{models} models")], agreeing),
        "",
        *_lines("Cost of one model", [head for t in titles for head in (f"{t}, s", "MB")], costing),
    ]
    return [*lines, *(["", *(f"{k}. {note}" for k, note in enumerate(notes, 1))] if notes else [])]


def _lines(title: str, heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    every = [" | ".join([method, *entries]) for method, entries in rows.items()]
    return [
        f"| {' | '.join([title, *heads])} |",
        "|---" + "|---:" * len(heads) + "|",
        *(f"| {line} |" for line in every),
    ]


def _best(cells: Sequence[Cell]) -> tuple[float, float]:
    ones = [c.one.mean for c in cells if c.one is not None]
    several = [c.several.mean for c in cells if c.several is not None]
    return max(ones, default=np.inf), max(several, default=np.inf)


def _entries(cell: Cell, best: tuple[float, float], notes: list[str]) -> list[str]:
    if cell.one is None:
        return [f"({notes.index(cell.reason) + 1})", ""]
    return [_told(cell.one, best[0]), _told(cell.several, best[1])]


def _costs(cell: Cell) -> list[str]:
    return [
        "" if cell.seconds is None else f"{cell.seconds:.2f}",
        "" if cell.peak_bytes is None else f"{cell.peak_bytes / 1e6:.0f}",
    ]


def _told(found: Lds | None, best: float) -> str:
    if found is None:
        return ""
    mean = f"**{found.mean:.3f}**" if found.mean >= best else f"{found.mean:.3f}"
    return f"{mean} ({found.low:.3f} to {found.high:.3f})"


def word(cell: Cell) -> str:
    """Say what a cell holds, in a line."""
    if cell.one is None:
        return cell.reason
    return f"{cell.one.mean:.3f} ({cell.one.low:.3f} to {cell.one.high:.3f}), {cell.seconds:.2f} s"


def _facts(tasks: Sequence[str]) -> list[str]:
    lines = []
    for name in tasks:
        task, truth = TASKS[name], load(FOLDER / f"{name}.npz")
        seeds, subsets, _ = truth.complete.shape
        lines.append(
            f"{task.title}: {task.size} training samples, {task.queries} queries, {subsets} random "
            f"halves with {seeds} seeds each; two groups of {seeds // 2} seeds agree with each "
            f"other by {_agreement(truth.complete):.2f}."
        )
    return [*lines, machine.line(machine.describe("cpu"))]


def _agreement(losses: np.ndarray) -> float:
    """Return the rank correlation of two groups of seeds, mean over the queries."""
    half = len(losses) // 2
    first, second = losses[:half].mean(0), losses[half : 2 * half].mean(0)  # (S, M)
    every = np.eye(len(first), dtype=bool)
    return lds(-first.T, every, second).mean


def document(found: Found) -> dict[str, object]:
    """Return everything as plain data."""
    cells = [
        {"method": method, "task": name, **_plain(cell)}
        for method, row in found.items()
        for name, cell in row.items()
    ]
    return {"format": "gradscope-attribution-benchmark", "version": 1, "cells": cells}


def _plain(cell: Cell) -> dict[str, object]:
    every = asdict(cell)
    for key in ("one", "several"):
        if every[key] is not None:
            del every[key]["by_query"]
    return every


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attribution",
        description="Compare attributions with what retraining does (LDS), with seconds of the "
        "processor (one thread) and peak memory of one model; each in a process of its own.",
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument(
        "--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD"
    )
    parser.add_argument(
        "--models", type=int, default=len(CHECKPOINTS), help=f"explained [{len(CHECKPOINTS)}]"
    )
    parser.add_argument(
        "--size",
        nargs="*",
        choices=list(size.SIZES),
        metavar="SIZE",
        help=f"measure EK-FAC of larger models instead ({', '.join(size.SIZES)})",
    )
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="write the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
