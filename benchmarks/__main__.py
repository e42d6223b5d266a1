"""`python -m benchmarks`."""

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from benchmarks import document, machine, marks, pictures, real, scaling, tables
from benchmarks.methods import METHODS, Method
from benchmarks.reference import reference
from benchmarks.run import Cell, Conditions, cells
from benchmarks.scaling import Point
from benchmarks.tasks import available
from benchmarks.workloads import FAMILIES, PRECISIONS, REAL, workload

_ENOUGH = 1.0  # seconds of repeats a cell
_FEW = 3  # timed calls a cell at real sizes
_METHODS_OF_REAL = ("plain backward", "gradscope auto", "vmap(grad)", "Opacus ghost")
_CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; print it, and write it where that was asked for."""
    options = parser().parse_args(arguments)
    options.models = [*options.models, *(REAL if options.real else ())] or [
        name for name, family in FAMILIES.items() if not family.real
    ]
    if any(FAMILIES[name].real for name in options.models) and real.missing():
        packages = ", ".join(real.missing())
        parser().error(f"real sizes need {packages}: pip install -r benchmarks/requirements.txt")
    limited = machine.ISA.get(options.isa, {})
    if any(os.environ.get(name) != value for name, value in limited.items()):
        given = sys.argv[1:] if arguments is None else arguments  # libraries read it at their start
        words = [sys.executable, "-m", "benchmarks", *given]
        return subprocess.run(words, env=os.environ | limited, check=False).returncode
    isa = torch.backends.cpu.get_cpu_capability()
    if options.isa and isa.lower() != options.isa:
        parser().error(f"--isa {options.isa}: torch finds {isa} here")
    if options.threads:
        torch.set_num_threads(options.threads)
    repeats = options.repeat or (1 if options.quick else 7)
    options.scratch.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    found: list[Cell] = []
    points: list[Point] = []
    with TemporaryDirectory(dir=options.scratch) as scratch:
        exactly = options.repeat or options.quick
        enough, clock = 0.0 if exactly else _ENOUGH, _CLOCKS[options.clock]
        conditions = Conditions(repeats, Path(scratch), enough, clock)
        if options.scaling:
            points = _points(options, conditions)
        else:
            found = _cells(options, conditions)
    gc.unfreeze()
    here = machine.describe(options.device)
    console = Console(width=None if sys.stdout.isatty() else tables.WIDTH)
    tables.show(found, points, console)
    missed = [] if options.quick else marks.verdicts(found)  # marks are for the full sizes
    console.print(Text("\n".join(_summary(missed, here))))
    settings = {
        "repeats": repeats,
        "quick": options.quick,
        "precision": options.precision,
        "seconds": time.perf_counter() - start,
    }
    if options.json:
        document.write(options.json, document.document(here, settings, found, points, missed))
    if options.plot:
        pictures.draw(found, points, machine.line(here), options.plot)
    return 0


def _cells(options: argparse.Namespace, conditions: Conditions) -> list[Cell]:
    found = []
    for name in options.models:
        family = FAMILIES[name]
        tasks = [task for task in options.tasks or available() if task in family.tasks]
        methods = _methods(options, _METHODS_OF_REAL if family.real else tuple(METHODS))
        under = conditions
        if family.real:
            methods = [m for m in methods if m.comparable or m.name in _METHODS_OF_REAL]
            few = options.repeat or (1 if options.quick else _FEW)
            under = replace(conditions, repeats=few)
        sizes = family.quick if options.quick else family.full
        work = workload(name, sizes, options.device, options.precision)
        gc.freeze()  # what is imported by now need not be gone through before every cell
        _say(f"{family.title}: the float64 reference")
        right = reference(work)
        for cell in cells(work, right, tasks, methods, under):
            _say(f"{name}, {cell.task}, {cell.method}: {_word(cell)}")
            found.append(cell)
    return found


def _points(options: argparse.Namespace, conditions: Conditions) -> list[Point]:
    found = []
    tasks = options.tasks or scaling.TASKS
    methods = _methods(options, scaling.METHODS)
    for point in scaling.points(tasks, methods, conditions, options.device, quick=options.quick):
        cell = point.cell
        _say(f"{point.axis}={point.value}, {cell.task}, {cell.method}: {_word(cell)}")
        found.append(point)
    return found


def _methods(options: argparse.Namespace, default: Sequence[str]) -> list[Method]:
    words = options.methods or default
    chosen = {name for word in words for name in _named(word)}
    return [
        method
        for name, method in METHODS.items()
        if name in chosen or not method.comparable
        if not (options.quick and method.compiled)
    ]


def _named(word: str) -> list[str]:
    """Return the method of that name, or those whose names begin so, whatever the case."""
    same = [name for name in METHODS if name.lower() == word.lower()]
    return same or [name for name in METHODS if name.lower().startswith(word.lower())]


def _summary(missed: list[str], here: dict[str, Any]) -> list[str]:
    lines = [
        "Ratios to a plain forward and backward pass: fastest call of each (median of the pairs); "
        "then peak memory above the start; (+s): seconds of compilation.",
        machine.line(here),
    ]
    return [*lines, "", "Missed:", *(f"  {line}" for line in missed)] if missed else lines


def _word(cell: Cell) -> str:
    return cell.status if cell.ratio is None else f"{cell.ratio:.2f}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare ways to per-sample gradients: time as a ratio to a plain backward "
        "pass, peak memory, and whether the answer is right.",
    )
    parser.add_argument(
        "--models",
        type=_names(FAMILIES),
        default=[],
        help=f"{', '.join(FAMILIES)} [those before {next(iter(REAL))}]",
    )
    parser.add_argument(
        "--real", action="store_true", help=f"{', '.join(REAL)}: models of real size, some hours"
    )
    parser.add_argument("--tasks", type=_names(available()), help=", ".join(available()))
    parser.add_argument(
        "--methods",
        type=_prefixes,
        help=f"names or how they begin: {', '.join(METHODS)}".replace("%", "%%"),
    )
    parser.add_argument(
        "--repeat", type=int, metavar="N", help="timed calls a cell [7, short ones up to 50]"
    )
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="OUT.svg", help="draw the results")
    parser.add_argument("--quick", action="store_true", help="tiny models, nothing compiled")
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="instead: cost against n, width, depth and sequence length of the GPT",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda [cpu]")
    parser.add_argument(
        "--precision",
        choices=list(PRECISIONS),
        default="float32",
        help="the number format of model and products [float32]",
    )
    parser.add_argument(
        "--isa",
        choices=sorted(machine.ISA),
        help="the widest vector instructions that torch, oneDNN and MKL may use [the processor's]",
    )
    parser.add_argument(
        "--clock",
        choices=list(_CLOCKS),
        default="wall",
        help="what is counted: use the processor's seconds where others use it too [wall]",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="torch's threads [its default]")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path("build/bench"),
        metavar="FOLDER",
        help="where the files of `file` go: on the disk that is to be measured [build/bench]",
    )
    return parser


class _names:  # noqa: N801  # argparse shows the name
    """Splits and checks a comma-separated list."""

    def __init__(self, known: object) -> None:
        self._known = list(known)  # type: ignore[call-overload]

    def __call__(self, text: str) -> list[str]:
        words = text.split(",")
        unknown = [word for word in words if word not in self._known]
        if unknown:
            known = ", ".join(self._known)
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {known}")
        return words


def _prefixes(text: str) -> list[str]:
    words = text.split(",")
    for word in words:
        if not _named(word):
            raise argparse.ArgumentTypeError(f"no method begins with {word!r}")
    return words


if __name__ == "__main__":
    sys.exit(main())
