"""`python -m benchmarks.zoo`: what gradscope and other tools make of everything that can be built.

Each case is compared with a loop over batches of one in float64. Results are appended to a file of
JSON lines. A stopped run resumes from that file.
"""

import argparse
import fnmatch
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.zoo import tables
from benchmarks.zoo.examine import group_of
from benchmarks.zoo.libraries import GROUPS, NEEDS, how_to_install, missing, versions
from benchmarks.zoo.sweep import Limits, Record, append, swept, written
from benchmarks.zoo.tools import TOOLS

WIDTH = 160  # where the output is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep what was asked for and print the table; 1 if an answer of gradscope is wrong."""
    options = parser().parse_args(arguments)
    tools = options.tools.split(",") if options.tools else list(TOOLS)
    unknown = [name for name in tools if name not in TOOLS]
    if unknown:
        parser().error(f"no tool {unknown[0]!r}; there are {', '.join(TOOLS)}")
    before = [r for r in written(options.json) if "case" in r]
    cases = [] if options.report else _cases(options)
    if options.list:
        print("\n".join(cases))
        return 0
    done = {r["case"] for r in before}
    left = [case for case in cases if case not in done]
    if left:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the child processes
        os.environ[GROUPS] = ",".join({case.partition("/")[0] for case in left})
        append(options.json, {"run": _described(options)})
        _sweep(left, tools, options)
    records = [r for r in written(options.json) if "case" in r]
    wanted = set(options.groups or NEEDS)
    shown = [r for r in records if tables.group(r) in wanted and _matches(r["case"], options.only)]
    show(shown)
    if options.markdown:
        runs = [r for r in written(options.json) if "run" in r]
        options.markdown.write_text(tables.page(shown, runs), encoding="utf-8")
    wrong = [r["case"] for r in shown if _wrong(r)]
    for case in wrong:
        print(f"gradscope is wrong on {case}", file=sys.stderr)
    return int(bool(wrong))


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    made.add_argument("groups", nargs="*", choices=[[], *NEEDS], help=f"{', '.join(NEEDS)}; all")
    made.add_argument("--only", metavar="GLOB", help="cases whose names match, as '*Mixtral*'")
    made.add_argument("--every", type=int, default=1, metavar="K", help="each K-th case only")
    made.add_argument("--heads", action="store_true", help="transformers: every class, not bases")
    made.add_argument("--tools", help=f"separated by commas: {','.join(TOOLS)}")
    made.add_argument(
        "--dtype", choices=["float32", "float64"], help="default: the dtype of the case"
    )
    made.add_argument("--json", type=Path, default=Path("build/zoo.jsonl"), metavar="F")
    made.add_argument("--markdown", type=Path, metavar="F", help="also write the page there")
    made.add_argument(
        "--report",
        action="store_true",
        help="print the table of the records in the file; run nothing",
    )
    made.add_argument("--list", action="store_true", help="print the cases; run nothing")
    made.add_argument("--workers", type=int, default=1, help="processes at a time")
    made.add_argument("--timeout", type=float, default=120.0, help="seconds of one step of a case")
    made.add_argument("--memory", type=float, default=8.0, help="GB of one case")
    return made


def _cases(options: argparse.Namespace) -> list[str]:
    """Return the names of the cases; a group whose library is absent is left out, and told."""
    found = []
    for group in options.groups or NEEDS:
        absent = missing(group)
        if absent:
            print(f"{group} left out: {how_to_install(absent)}", file=sys.stderr)
            continue

        def wanted(name: str, group: str = group) -> bool:
            return _matches(f"{group}/{name}", options.only)

        listed = group_of(group).names(options.heads, wanted)
        found += [f"{group}/{name}" for name in listed if wanted(name)][:: options.every]
    return found


def _matches(case: str, glob: str | None) -> bool:
    return (
        glob is None
        or fnmatch.fnmatchcase(case, glob)
        or fnmatch.fnmatchcase(case.partition("/")[2], glob)
    )


def _sweep(cases: Sequence[str], tools: Sequence[str], options: argparse.Namespace) -> None:
    limits = Limits(options.timeout, options.memory, options.dtype)
    start = time.perf_counter()
    for k, found in enumerate(swept(cases, tools, limits, options.workers), 1):
        append(options.json, found)
        spent = time.perf_counter() - start
        left = spent / k * (len(cases) - k)
        print(f"{k}/{len(cases)} {_told(found)}  ({left / 60:.0f} min left)", file=sys.stderr)


def _told(found: Record) -> str:
    if found["status"] != "judged":
        return f"{found['case']}: {found['status']}: {found['reason'][:100]}"
    nature = found["facts"]["nature"]
    answers = ", ".join(f"{tool} {a['outcome']}" for tool, a in found["tools"].items())
    backend = found["tools"].get("gradscope", {}).get("backend", "")
    return f"{found['case']}: {nature}; {answers}; {backend}"


def _described(options: argparse.Namespace) -> Record:
    now = datetime.now(UTC)
    described = machine.describe("cpu")
    place = f"{described['cpu']}, {described['cores']} cores"
    return {
        "date": f"{now.day} {now:%B %Y}",
        "versions": {"Python": described["python"], **versions()},
        "machine": place,
        "selection": _selection(options),
    }


def _selection(options: argparse.Namespace) -> str:
    """Return which cases were selected, where these are not all cases of their groups."""
    groups = ", ".join(options.groups) or "all groups"
    only = f", only {options.only}" if options.only else ""
    every = f", one case in {options.every}" if options.every > 1 else ""
    return groups + only + every if only or every else ""


def _wrong(record: Record) -> bool:
    return record["status"] == "judged" and (
        record["tools"].get("gradscope", {}).get("outcome") == "wrong"
    )


def show(records: Sequence[Record]) -> None:
    """Print the table."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = Table()
    for name in tables.HEAD:
        table.add_column(name, justify="left" if name in ("group", "tool", "backends") else "right")
    for row in tables.lines(records):
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
