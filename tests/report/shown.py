"""What is shown of results, and results with names that must not be taken for anything else."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console

from gradscope.run import RunReport
from gradscope.stats import difference, summarize
from gradscope.training import read_history, record
from tests.stats.fakes import FakeFile, fake

WIDTHS = (20, 40, 80, 200)
HOSTILE = ["[conv1].weight", "[/bold]", "[red]x[/red]", "\x1b[31mred\x1b[0m", "a\nb", ":smile:"]
NASTY = [*HOSTILE, "$x_{", "<script>alert(1)</script>", "a&b\"'"]
LAYERS = [f"transformer.h.{k}.attn.c_{part}.weight" for k in range(12) for part in ("attn", "proj")]
CERTIFICATE = {
    "verified": True,
    "verdict": "passed: sum of 256 samples to 1e-07, 3 of them alone to 3e-07 (float32)",
    "backend": "hooks",
    "dtype": "float32",
    "completeness": {"error": 1.2e-7, "parameter": "a", "tolerance": 1e-4},
    "agreement": {"error": 3.4e-7, "parameter": "a", "tolerance": 1e-4},
    "unused": ["head.bias"],
}


def screen(render, result, width, **options):
    file = io.StringIO()
    render(result, Console(file=file, width=width, **options))
    return file.getvalue()


def fits(text, width):
    return all(cell_len(line) <= width for line in text.splitlines()) and "\x1b" not in text


def words(text):
    return " ".join(text.split())


def file_with(names, n=30, **changes):
    rng = np.random.default_rng(0)
    gradients = {name: rng.normal(k + 1, 1, (n, 3, k + 1)) for k, name in enumerate(names)}
    given: dict[str, Any] = {"certificate": CERTIFICATE, "target": rng.integers(0, 9, n)}
    return FakeFile(gradients, rng.random(n) + 0.5, **(given | changes))


def summary_of(names, **changes):
    return summarize(file_with(names, **changes))


def run_of(summary, **changes):
    values = {
        "parameters": summary.parameters,
        "certificate": CERTIFICATE,
        "backend": "hooks",
        "notes": ("auto chose hooks: " + "every node has a rule " * 5, "unused: head.bias"),
        "samples": 1797,
        "nonfinite": 2,
        "seconds": 2.5,
        "path": "runs/" + "long/" * 20 + "out.h5",
        "bytes": 123_456_789,
        "chains": ("identity", "clip:max_norm=1.0 | mean"),
    }
    return RunReport(**(values | changes))


def two(names, **changes):
    first = file_with(names, attributes={"dataset_sha256": "d"}, path="[bold]\x1b[2Ja.h5")
    moved = {k: g * 1.5 + 0.1 for k, g in first.gradients.items()}
    return difference(first, replace(first, gradients=moved, **changes))


def steps(folder, count=30):
    path = folder / "<b>run.jsonl"
    for step in range(count):
        record(path, 10 * step, summarize(fake(30, seed=step)))
    return read_history(path)
