"""Two processes and one path: right results, or one clear error; never a mixture, never a loss."""

import errno
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import getpid
from pathlib import Path

from gradscope.errors import ResultFileError
from gradscope.storage import open_file
from tests.cli.forked import begin
from tests.drill import runs
from tests.drill.faults import EVERYTHING, Action, Fault
from tests.drill.runs import RESULT, SEVERAL, SHARD, SHARDS, Step, compute, merge
from tests.drill.verdicts import (
    FAILURE,
    REFUSED,
    RIGHT,
    Row,
    Setting,
    Verdict,
    is_one_message,
    judged,
    told,
)

_PAUSE = 2000  # microseconds before an operation, at most
_APART = 0.3  # seconds between two beginnings, at most
DONE = (0,)


@dataclass(frozen=True)
class Pair:
    """Two processes."""

    first: Step  # what the first one does
    second: Step  # what the other does
    results: dict[str, tuple[bytes, ...]]  # what may be there in the end, by file
    before: Callable[[Path], None] = lambda folder: None  # what is done first
    both: bool = True  # whether both may end well: where they do the same, or do not write one file


def drill(inputs: Path, scratch: Path, setting: Setting, times: int) -> Iterator[Row]:
    """Let two processes meet, again and again, at other moments."""
    if not times:
        return
    pairs = _pairs(inputs, scratch)
    cases = [(name, number) for name in pairs for number in range(times)]

    def judge(case: tuple[str, int]) -> Verdict:
        name, number = case
        folder = scratch / f"pair-{getpid()}"
        folder.mkdir()
        try:
            return _judged(name, pairs[name], folder, setting, number)
        finally:
            shutil.rmtree(folder)

    yield judged("two processes and one path", cases, judge, setting.part(0.05))


def _pairs(inputs: Path, scratch: Path) -> dict[str, Pair]:
    """Return who may meet whom."""
    one, other, again = (
        compute(inputs, SEVERAL, *words) for words in ((), ("--seed", "5"), ("--resume",))
    )
    new, other_new = (
        compute(inputs, SEVERAL, "--overwrite", *words) for words in ((), ("--seed", "5"))
    )
    whole, others, merged = (_made(step, scratch) for step in (one, other, merge(inputs)))
    shard = compute(inputs, SEVERAL, "--shard", f"1/{SHARDS}")
    done = (inputs / SHARD).read_bytes()

    def two_shards(folder: Path) -> None:
        for k in (0, 2):
            name = f"o.shard-{k}-of-{SHARDS}.h5"
            shutil.copyfile(inputs / name, folder / name)

    def merge_here(folder: Path) -> None:
        runs.command("merge", folder, "-q", "-o", folder / RESULT)

    def read(folder: Path) -> None:
        _read_until(folder / RESULT, {whole, others})

    def earlier(folder: Path) -> None:
        (folder / RESULT).write_bytes(others)

    result = {RESULT: (whole,)}
    return {
        "the same run twice": Pair(one, one, result),
        "two other runs": Pair(one, other, {RESULT: (whole, others)}, both=False),
        "a run and one that resumes": Pair(one, again, result),
        "two that resume": Pair(again, again, result),
        "two that overwrite": Pair(new, other_new, {RESULT: (whole, others)}),
        "a run and a reader": Pair(one, read, result),
        "one that overwrites and a reader": Pair(new, read, result, before=earlier),
        "a shard and a merge": Pair(
            shard, merge_here, {SHARD: (done,), RESULT: (merged, b"")}, before=two_shards
        ),
        "a merge twice": Pair(merge(inputs), merge(inputs), {RESULT: (merged,)}),
        "a merge and a run": Pair(merge(inputs), one, {RESULT: (merged, whole)}, both=False),
    }


def _made(step: Step, scratch: Path) -> bytes:
    folder = scratch / "undisturbed"
    folder.mkdir()
    runs.finished(step, folder)
    content = (folder / RESULT).read_bytes()
    shutil.rmtree(folder)
    return content


def _read_until(path: Path, known: set[bytes]) -> None:
    """Read a result until it is there and some time has gone; whatever is read must be right."""
    limit, seen = time.monotonic() + 1, 0
    while time.monotonic() < limit or not seen:
        try:
            with open_file(path) as file:
                for chain in file.chains:
                    for array in chain.values():
                        array[...]
        except ResultFileError:
            continue
        seen += 1
        assert path.read_bytes() in known


def _judged(name: str, pair: Pair, folder: Path, setting: Setting, number: int) -> Verdict:
    """Let two processes meet once."""
    rng = setting.generator(name, number)
    pair.before(folder)
    ends = []
    for step in (pair.first, pair.second):
        pause = Fault(Action.PAUSE, EVERYTHING, errno.EIO, rng.randrange(1, _PAUSE))
        ends.append(begin(lambda step=step, pause=pause: _slowly(step, folder, pause)))  # type: ignore[misc]
        time.sleep(rng.uniform(0, _APART))
    done = [end() for end in ends]
    told_both = f"{name} {number}: {told(done[0])}; {told(done[1])}"
    good = [outcome.code == 0 for outcome in done]
    if not all(
        ok or is_one_message(outcome, (3, 6)) for ok, outcome in zip(good, done, strict=True)
    ):
        return Verdict(FAILURE, told_both)
    if not any(good) or (all(good) and not pair.both):
        return Verdict(FAILURE, f"{sum(good)} ended well; {told_both}")
    for file, contents in pair.results.items():
        path = folder / file
        if (path.read_bytes() if path.exists() else b"") not in contents:
            return Verdict(FAILURE, f"{file} is not right; {told_both}")
    left = {path.name for path in folder.iterdir()} - pair.results.keys()
    if left - {f"o.shard-{k}-of-{SHARDS}.h5" for k in range(SHARDS)}:
        return Verdict(FAILURE, f"left behind: {left}; {told_both}")
    return Verdict(RIGHT if all(good) else REFUSED)


def _slowly(step: Step, folder: Path, pause: Fault) -> None:
    pause.arm(folder)
    step(folder)
