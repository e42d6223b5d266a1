"""What came of a case, and of all cases of a drill, on several processes."""

import multiprocessing
import random
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeVar

from tests.cli.forked import Outcome

RIGHT, REFUSED, FAILURE = "right", "refused", "failure"

CODES = (2, 3, 4, 6)  # of an error that is the user's, the file's or the disk's
_NEVER = ("Traceback", "Exception ignored", "Segmentation", "terminate called")

Case = TypeVar("Case")


@dataclass(frozen=True)
class Verdict:
    """What came of one case."""

    kind: str  # rIGHT, REFUSED or FAILURE
    text: str = ""  # of a failure: what was done, and what came of it


@dataclass
class Row:
    """A row of the table."""

    drill: str  # what was done
    all: int  # how many cases there are
    # how many there were of each verdict
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((RIGHT, REFUSED), 0))
    seconds: float = 0.0  # wall time
    failures: list[str] = field(default_factory=list)  # what each of them says

    @property
    def cases(self) -> int:
        """How many were tried."""
        return sum(self.counts.values()) + len(self.failures)

    def add(self, verdict: Verdict) -> None:
        """Count a verdict."""
        if verdict.kind == FAILURE:
            self.failures.append(f"{self.drill}: {verdict.text}")
        else:
            self.counts[verdict.kind] += 1


@dataclass(frozen=True)
class Setting:
    """How a drill is done."""

    seed: int  # for whatever is random
    workers: int  # processes
    seconds: float  # for all drills together
    most: int | None = None  # the most cases of a row

    def part(self, share: float) -> "Setting":
        """Return the same for a row that has some share of the time."""
        return replace(self, seconds=share * self.seconds)

    def all(self) -> "Setting":
        """Return the same for cases that later ones need: all of them."""
        return replace(self, most=None, seconds=inf)

    def generator(self, *what: object) -> random.Random:
        """Return random numbers that depend on the seed and on what they are for."""
        return random.Random(repr((self.seed, *what)))


def judged(
    drill: str,
    cases: Sequence[Case],
    judge: Callable[[Case], Verdict | list[Verdict]],
    setting: Setting,
) -> Row:
    """Judge cases, in random order, until all are done or the time is over."""
    begun = time.monotonic()
    order = setting.generator(drill).sample(list(cases), len(cases))[: setting.most]
    context = multiprocessing.get_context("fork")
    found, coming = context.SimpleQueue(), context.Value("l", 0)

    def work() -> None:
        while time.monotonic() - begun < setting.seconds:
            with coming:
                number = coming.value
                coming.value += 1
            if number >= len(order):
                break
            try:
                verdicts = judge(order[number])
            except Exception:  # errors of the judge are failures, too
                text = f"{order[number]}: {traceback.format_exc()}"
                verdicts = Verdict(FAILURE, text)
            for verdict in [verdicts] if isinstance(verdicts, Verdict) else verdicts:
                found.put(verdict)
        found.put(None)

    workers = [context.Process(target=work) for _ in range(setting.workers)]
    for worker in workers:
        worker.start()
    row, working = Row(drill, len(cases)), len(workers)
    while working:
        verdict = found.get()
        if verdict is None:
            working -= 1
        else:
            row.add(verdict)
    for worker in workers:
        worker.join()
    row.seconds = time.monotonic() - begun
    return row


def told(outcome: Outcome) -> str:
    """Return how a process ended, in few words: of a traceback, our last lines and the error."""
    frames = re.findall(r'File "[^"]*/(gradscope/[^"]*)", line (\d+), in (\w+)', outcome.err)
    if not frames:
        return f"exit code {outcome.code}: {outcome.err[-500:] or outcome.out[-200:]!r}"
    where = " < ".join(f"{path}:{line} {name}" for path, line, name in frames[:-4:-1])
    return f"exit code {outcome.code}: {outcome.err.strip().splitlines()[-1][:300]}; {where}"


def is_one_message(outcome: Outcome, codes: Sequence[int] = CODES) -> bool:
    """Whether a process ended with one error of ours, and an exit code that is documented."""
    lines = outcome.err.splitlines()
    errors = sum(line.startswith("error: ") for line in lines)
    return (
        outcome.code in codes
        and errors == 1
        and not any(word in outcome.err for word in _NEVER)
        and outcome.out == ""
    )
