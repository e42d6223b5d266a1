"""Run the drills, and print one table."""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.drill import faults
from tests.drill.verdicts import REFUSED, RIGHT, Row, Setting

DRILLS = ("kills", "full", "neighbours", "fuzz", "shards")
FILES, SHARDS, LOSSES, TIMES = 10_000, 1_000, 2, 20  # of a drill that is done in full

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
    from tests.drill import disk, fuzz, neighbours, runs, shards

    here, most = faults.are_here(), given.most
    if not here:
        print("no C compiler: nothing that needs a failing disk is done", file=sys.stderr)
    runs.load()
    setting = Setting(given.seed, given.workers, 60 * given.minutes, most)
    inputs = runs.prepared(scratch)
    commands, writers = runs.command_jobs(inputs), runs.writer_jobs()
    few, jobs = (commands[:most], writers[:most]), [*commands, *writers]
    count = SHARDS if most is None else 3 + most
    drills: dict[str, Callable[[Path], Iterable[Row]]] = {
        "kills": lambda folder: disk.kills(*few, folder, setting, LOSSES) if here else [],
        "full": lambda folder: disk.full(jobs[:most], folder, setting),
        "neighbours": lambda folder: neighbours.drill(inputs, folder, setting, TIMES * here),
        "fuzz": lambda folder: fuzz.drill(folder, setting, FILES),
        "shards": lambda folder: shards.drill(folder, setting, count),
    }
    for name in given.only or DRILLS:
        folder = scratch / name
        folder.mkdir()
        for row in drills[name](folder):
            print(f"{row.drill}: {row.cases:,} in {row.seconds:.0f} s", file=sys.stderr)
            for failure in row.failures:
                print(failure, file=sys.stderr)
            yield row
        shutil.rmtree(folder)


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
