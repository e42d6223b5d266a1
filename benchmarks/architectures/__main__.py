"""`python -m benchmarks.architectures`: `gradscope compute` on each, held against float64.

The model's files are written as a user has them, the command runs in a process of its own, and its
norms of every parameter and its rows of some are compared with a batch of one in float64.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from benchmarks.architectures.cases import ARCHITECTURES, BASE
from benchmarks.architectures.checks import Found, compared, on_its_sides, write

WITHIN = 1e-4  # of a norm, of a row's norm: what float32 has to give
EXACT = 1e-9  # in float64
_HEAD = (
    "| architecture | parameters | n | backend | largest error | float32 alone | s | GB | |",
    "|---|---:|---:|---|---:|---:|---:|---:|---|",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 if a command failed, or an answer is further off than float32."""
    options = parser().parse_args(arguments)
    unknown = [name for name in options.names if name not in ARCHITECTURES]
    if unknown:
        parser().error(f"there is no {unknown[0]!r}; there are {', '.join(ARCHITECTURES)}")
    names = options.names or list(ARCHITECTURES)
    absent = {p for name in names for p in ARCHITECTURES[name].needs if find_spec(p) is None}
    if absent:
        parser().error(f"these need {', '.join(sorted(absent))}: pip install them")
    scratch = Path(mkdtemp(dir=options.scratch))
    found = {}
    try:
        print("\n".join(_HEAD), flush=True)
        for name in names:
            found[name] = examined(name, scratch)
            print(line(name, found[name]), flush=True)
            if "lora" not in names or name not in (BASE, "lora"):
                rmtree(scratch / name, ignore_errors=True)
    finally:
        rmtree(scratch, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return int(not all(right(each) for each in found.values()))


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__)
    made.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ARCHITECTURES))
    made.add_argument("--scratch", type=Path, help="where models are written for a while")
    made.add_argument("--json", type=Path, help="also write what was found there")
    return made


def right(found: Found) -> bool:
    """Whether it is within `WITHIN`, or in float64 exact, so that what is more is rounding."""
    within = min(found.get("error", 1.0), found.get("held", 1.0)) <= WITHIN
    return within or found.get("float64", 1.0) <= EXACT


def line(name: str, found: Found) -> str:
    """Return one line of the table, in Markdown."""
    title, count = ARCHITECTURES[name].title, f"{found['parameters'] / 1e6:.1f}M"
    if "failed" in found:
        said = " ".join(found["failed"].split()).replace("|", "/")
        return f"| {title} | {count} | {found['samples']} | exit {found['code']}: {said} |"
    errors = f"{found['error']:.0e} | {found['float32']:.0e}"
    took = f"{found['seconds']:.0f} | {found['gigabytes']:.1f}"
    verdict = "ok" if right(found) else f"WRONG at {found['at']}"
    if "held" in found:
        verdict += f"; with ReLUs on float32's sides {found['held']:.0e}"
    if "float64" in found:
        verdict += f"; in float64 {found['float64']:.0e}"
    start = f"| {title} | {count} | {found['samples']} | {found['backend']}"
    return f"{start} | {errors} | {took} | {verdict} |"


def examined(name: str, scratch: Path) -> Found:
    """Write an architecture's files, run the command, and compare."""
    needed = [name] if name != "lora" or (scratch / BASE).exists() else [BASE, name]
    for each in needed:
        (scratch / each).mkdir()
        apart(write, each, scratch / each)
    folder = scratch / name
    rows = json.loads((folder / "rows.json").read_text())
    found = {"parameters": rows["count"], "samples": rows["samples"]}
    found |= answered(name, folder, rows["names"])
    if "failed" not in found:
        found |= apart(compared, name, folder, rows["names"])
    if found.get("error", 0) > WITHIN:  # by rounding, or is it wrong?
        found |= apart(on_its_sides, name, folder, rows["names"])
        exactly = answered(name, folder, rows["names"], "--dtype", "float64", "--overwrite")
        if "failed" not in exactly:
            exactly = apart(compared, name, folder, rows["names"])
            found["float64"] = exactly["error"]
    return found


def answered(name: str, folder: Path, rows: list[str], *how: str) -> Found:
    """Write the norms of all parameters, then the rows of some; return what the first took."""
    found = command(name, folder, folder / "norms.h5", "-t", "norm", *how)
    if "failed" in found:
        return found
    chosen = [word for p in rows for word in ("--parameters", p)]
    more = command(name, folder, folder / "rows.h5", "--verify", "never", *chosen, *how)
    return more if "failed" in more else found


def apart(function: Any, *arguments: Any) -> Any:
    """Return what a function returns in a process of its own, whose memory is given back."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def command(name: str, folder: Path, output: Path, *more: str) -> Found:
    """Run `gradscope compute` and return its backend, its seconds and its peak of memory."""
    case = ARCHITECTURES[name]
    words = [str(folder / case.checkpoint), str(folder / "data.toml")]
    words += ["--model", case.model, "--loss", case.loss, "-o", str(output), "--json", *more]
    start = time.perf_counter()
    with (folder / "told").open("w+") as told, (folder / "errors").open("w+") as errors:
        started = [sys.executable, "-m", "gradscope", "compute", *words]
        process = subprocess.Popen(started, stdout=told, stderr=errors)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        reason = (folder / "errors").read_text() or (folder / "told").read_text()
        return {"failed": reason.strip(), "code": process.returncode}
    backend = json.loads((folder / "told").read_text())["certificate"].get(
        "backend"
    )  # of the proof
    seconds = time.perf_counter() - start
    return {"backend": backend, "seconds": seconds, "gigabytes": used.ru_maxrss * 1024 / 1e9}


if __name__ == "__main__":
    sys.exit(main())
