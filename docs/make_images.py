"""Make the pictures of the documentation: what the commands print on a terminal, as SVG.

    python docs/make_images.py [FOLDER]

Run it after a change of what is printed; tests/test_docs.py tells when the pictures are stale.
"""

import io
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

import gradscope
from gradscope.comparison import compare
from gradscope.config import load
from gradscope.report.agreement import render_comparison
from gradscope.report.screens import render_run
from gradscope.report.terminal import render
from gradscope.run import Job, compute, prepare
from gradscope.sources.opened import ShownData
from gradscope.stats import summarize
from gradscope.stats.album import with_samples

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "images"
RUN_FILE = "sample_models/digits_mlp/run.toml"
WIDTH = 84
COMPARED = 32  # samples, as in `gradscope compare`

# rich names a font on a server; a picture must not load anything
_SERVED = re.compile(r"@font-face\s*\{[^}]*\}\s*")
_FONTS = "'DejaVu Sans Mono', Menlo, Consolas, monospace"


def main(folder: Path) -> None:
    """Write compute.svg, stats.svg and compare.svg into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    job = prepare(load(ROOT / RUN_FILE))
    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary) / "digits.h5"
        report = compute(job, result)
        with gradscope.open(result) as file:
            summary, opened = summarize(file), ShownData.of(file.run)
    # neither the file's place nor what there was time for besides is part of the picture
    report = report.model_copy(update={"path": "build/digits.h5", "audits": None})
    facts = summary.file.model_copy(update={"path": "build/digits.h5"})
    summary = replace(summary, file=facts)
    options = f"--config {RUN_FILE}"
    picture(
        folder / "compute.svg",
        f"gradscope compute {options} -o build/digits.h5",
        lambda console: render_run(report, console),
    )
    picture(
        folder / "stats.svg",
        "gradscope stats build/digits.h5",
        lambda console: render(with_samples(summary, opened), console, full=False),
    )
    comparison = _comparison(job)
    picture(
        folder / "compare.svg",
        f"gradscope compare {options}",
        lambda console: render_comparison(comparison, console),
    )


def picture(path: Path, command: str, render: Callable[[Console], None]) -> None:
    """Write what `render` prints, under its command line."""
    console = Console(
        file=io.StringIO(),
        record=True,
        width=WIDTH,
        force_terminal=True,
        color_system="truecolor",
        markup=False,
        highlight=False,
        emoji=False,
    )
    console.print(f"$ {command}\n", style="bold green", soft_wrap=True)
    render(console)
    svg = console.export_svg(title="gradscope", theme=MONOKAI, unique_id=path.stem)
    local = _SERVED.sub("", svg).replace("Fira Code, monospace", _FONTS)
    path.write_text(local + "\n", encoding="utf-8")


def _comparison(job: Job) -> gradscope.Comparison:
    problem, batch = job.session.problem, job.load(0, COMPARED)
    return compare(problem.model, problem.loss, batch.inputs, batch.targets)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
