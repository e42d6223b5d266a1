"""Run the drills, and print one table."""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.drill import faults
from tests.drill.verdicts import REFUSED, RIGHT, Row, Setting

_FAULTS = "GRADSCOPE_DRILL_FAULTS"  # set where they were asked for, whether they work or not


def main() -> int:
    """Run as a program; return how many failures there were, at most 1."""
    given = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="gradscope-drill-") as place:
        made = faults.preload(Path(place)) if _FAULTS not in os.environ else None
        if made is not None:
            environment = os.environ | made | {_FAULTS: "1", "OMP_NUM_THREADS": "1"}
            words = [sys.executable, "-m", "tests.drill", *sys.argv[1:]]
            return os.spawnve(os.P_WAIT, sys.executable, words, environment)
        rows = list(_rows(given, Path(place)))
    _print(rows)
    return int(any(row.failures for row in rows))


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m tests.drill", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="for all of them [20]")
    parser.add_argument("--only", action="append", choices=DRILLS, help="repeatable [all]")
    parser.add_argument("--seed", type=int, default=0, help="for whatever is random [0]")
    parser.add_argument("--most", type=int, help="runs, and cases of a row, at most [all]")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    return parser


def _rows(given: argparse.Namespace, scratch: Path) -> Iterator[Row]:
    from tests.drill import runs

    if not faults.are_here():
        print("no C compiler: nothing that needs a failing disk is done", file=sys.stderr)
    runs.load()
    for name in given.only or DRILLS:
        folder = scratch / name
        folder.mkdir()
        setting = Setting(given.seed, given.workers, 60 * given.minutes, given.most)
        for row in DRILLS[name](folder, setting):
            print(f"{row.drill}: {row.cases:,} in {row.seconds:.0f} s", file=sys.stderr)
            for failure in row.failures:
                print(failure, file=sys.stderr)
            yield row
        shutil.rmtree(folder)


def _kills(scratch: Path, setting: Setting) -> Iterator[Row]:
    from tests.drill import disk, runs

    if faults.are_here():
        inputs = runs.prepared(scratch.parent)
        commands = runs.command_jobs(inputs)[: setting.most]
        writers = runs.writer_jobs()[: setting.most]
        yield from disk.kills(commands, writers, scratch, setting)
        yield disk.power([*commands, *writers], scratch, setting, LOSSES)


def _full(scratch: Path, setting: Setting) -> Iterator[Row]:
    from tests.drill import disk, runs

    jobs = [*runs.command_jobs(runs.prepared(scratch.parent)), *runs.writer_jobs()]
    return disk.full(jobs[: setting.most], scratch, setting)


def _neighbours(scratch: Path, setting: Setting) -> Iterator[Row]:
    from tests.drill import neighbours, runs

    if faults.are_here():
        yield neighbours.drill(runs.prepared(scratch.parent), scratch, setting, TIMES)


def _fuzz(scratch: Path, setting: Setting) -> Iterator[Row]:
    from tests.drill import fuzz

    return fuzz.drill(scratch, setting, FILES)


def _shards(scratch: Path, setting: Setting) -> Iterator[Row]:
    from tests.drill import shards

    return shards.drill(scratch, setting, SHARDS if setting.most is None else 3 + setting.most)


FILES, SHARDS, LOSSES, TIMES = 10_000, 1_000, 2, 20  # of a drill that is done in full

Drill = Callable[[Path, Setting], Iterator[Row]]
DRILLS: dict[str, Drill] = {
    "kills": _kills,
    "full": _full,
    "neighbours": _neighbours,
    "fuzz": _fuzz,
    "shards": _shards,
}


def _print(rows: list[Row]) -> None:
    table = Table("drill", *(["cases", "right", "refused", "failures", "seconds"]))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        of = "" if row.cases == row.all else f" of {row.all:,}"
        counts = (row.counts[RIGHT], row.counts[REFUSED], len(row.failures), round(row.seconds))
        table.add_row(row.drill, f"{row.cases:,}{of}", *(f"{n:,}" for n in counts))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    sys.exit(main())
