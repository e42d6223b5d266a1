"""The results as plain data."""

import json
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any

from benchmarks.run import Cell
from benchmarks.scaling import Point

FORMAT, VERSION = "gradscope-benchmark", 1


def document(
    machine: dict[str, Any],
    settings: dict[str, Any],
    cells: list[Cell],
    points: list[Point],
    missed: list[str],
) -> dict[str, Any]:
    """Return everything that was measured."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": machine,
        "settings": settings,
        "cells": [plain(cell) for cell in cells],
        "scaling": [
            {"axis": point.axis, "value": point.value, **plain(point.cell)} for point in points
        ],
        "missed": missed,
    }


def plain(cell: Cell) -> dict[str, Any]:
    """Return one cell; times in seconds, memory in bytes."""
    found: dict[str, Any] = {
        "model": cell.model,
        "task": cell.task,
        "method": cell.method,
        "status": cell.status,
        "reason": cell.reason,
        "error": cell.error if cell.error is None or isfinite(cell.error) else None,
        "sizes": dict(cell.sizes),
    }
    if cell.timing is not None:
        timing = cell.timing
        found |= {
            "ratio": timing.ratio,
            "median_ratio": timing.median,
            "seconds": min(timing.seconds),
            "plain_seconds": min(timing.unit),
            "all_seconds": list(timing.seconds),
            "all_plain_seconds": list(timing.unit),
            "first_seconds": timing.first,
            "compile_seconds": cell.compile_seconds,
            "tokens_per_second": _tokens(cell) / min(timing.seconds),
            "peak_bytes": timing.peak_bytes,
            "result_bytes": cell.result_bytes,
        }
    return found


def _tokens(cell: Cell) -> int:
    """Return the number of tokens in a batch, or of samples if a sample is no sequence."""
    sizes = dict(cell.sizes)
    return int(sizes["n"] * sizes.get("length", 1))


def write(path: Path, value: dict[str, Any]) -> None:
    """Write it as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def by_task(cells: Iterable[Cell]) -> dict[str, dict[tuple[str, str], Cell]]:
    """Return {task: {(method, model): cell}}, in the order they came."""
    found: dict[str, dict[tuple[str, str], Cell]] = {}
    for cell in cells:
        found.setdefault(cell.task, {})[cell.method, cell.model] = cell
    return found
