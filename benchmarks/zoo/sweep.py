"""The sweep: a process for each case, whose crash, hang or hunger ends nothing else."""

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from benchmarks.zoo.examine import run

PRELOADED = "benchmarks.zoo.preload"

Record = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Limits of one case.

    Attributes:
        seconds: Limit of one step. The build with the reference is a step, and each tool is one.
        memory: GB beyond what a process starts with.
        dtype: The tools compute in this dtype; None means the dtype of the case.
    """

    seconds: float = 120.0
    memory: float = 8.0
    dtype: str | None = None


def server() -> ForkServerContext:
    """Return what starts processes in which the libraries are imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


def swept(
    cases: Sequence[str], tools: Sequence[str], limits: Limits, workers: int = 1
) -> Iterator[Record]:
    """Yield the record of each case when the case ends."""
    context, waiting = server(), iter(cases)
    with ThreadPoolExecutor(workers) as pool:
        running: set[Future[Record]] = set()
        try:
            while True:
                for case in waiting:
                    running.add(pool.submit(record, context, case, tools, limits))
                    if len(running) >= workers:
                        break
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            for future in running:
                future.cancel()


def record(context: ForkServerContext, case: str, tools: Sequence[str], limits: Limits) -> Record:
    """Return what was found of a case.

    A tool that crashes, hangs or is out of memory has `raised`; the tools after it are asked in
    another process.
    """
    found: Record = {"case": case, "status": "judged", "tools": {}}
    start = time.perf_counter()
    left = list(tools)
    while left:
        asked = _once(context, case, left, limits, found)
        if asked is None:
            break
        left = left[left.index(asked) + 1 :]
    found["seconds"] = round(time.perf_counter() - start, 2)
    return found


def _once(
    context: ForkServerContext, case: str, tools: Sequence[str], limits: Limits, found: Record
) -> str | None:
    """Fill in what a process finds; return the tool at which it ended, None if it finished."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=run, args=(case, tools, limits.dtype, limits.memory, sender), daemon=True
    )
    process.start()
    sender.close()
    asked: str | None = None
    try:
        for word, value in _messages(receiver, limits.seconds):
            if word == "done":
                return None
            if word == "facts":
                found["facts"] = value
            elif word == "asked":
                asked = value
            elif word == "answer" and asked is not None:
                found["tools"][asked] = value
                asked = tools[tools.index(asked) + 1] if asked != tools[-1] else None
            elif word in ("not built", "not judged"):
                found |= {"status": word, "reason": value}
                return None
            else:
                return _ended(found, asked, word)
        return None if asked is None and found["tools"] else _ended(found, asked, "timeout")
    except EOFError:
        process.join(5)
        return _ended(found, asked, f"ended by signal {-(process.exitcode or 0)}")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _messages(receiver: Connection, seconds: float) -> Iterator[tuple[str, Any]]:
    """Yield messages; end after `seconds` without a message."""
    while receiver.poll(seconds):
        yield receiver.recv()


def _ended(found: Record, asked: str | None, why: str) -> str | None:
    """Note why a process ended before its time; return the tool that it was about."""
    if asked is None:
        found |= {"status": "not judged", "reason": why}
        return None
    found["tools"][asked] = {"outcome": "raised", "reason": why}
    return asked


def written(path: Path) -> list[Record]:
    """Return the records in a file of JSON lines; a last line that is cut off does not count."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def append(path: Path, found: Record) -> None:
    """Add a record to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(found) + "\n")
