"""Running methods on tasks: every outcome is a `Cell`, whatever a tool does."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from benchmarks.measure import OutOfTimeError, Timing, measured
from benchmarks.methods import Call, DeclinedError, Method, Setting, plain
from benchmarks.reference import TOLERANCE, Reference, Result, error
from benchmarks.tasks import TASKS, Task
from benchmarks.workloads import Workload
from gradscope.core.locate import first_line
from gradscope.errors import GradscopeError

Status = Literal["right", "wrong", "refused", "declined", "not installed"]


@dataclass(frozen=True)
class Cell:
    """One method on one task and one model.

    Attributes:
        model: The workload's name.
        task: The task's name.
        method: The method's name.
        status: "right" and "wrong" were run; "refused" raised; "declined" has no way.
        reason: Why it was not run or is wrong.
        timing: Of what was run.
        error: The largest relative error; None for units and bounds.
        compiled: The first call compiles.
        sizes: Of the workload.
    """

    model: str
    task: str
    method: str
    status: Status
    reason: str | None = None
    timing: Timing | None = None
    error: float | None = None
    compiled: bool = False
    sizes: tuple[tuple[str, Any], ...] = ()

    @property
    def ratio(self) -> float | None:
        """Time as a multiple of a plain pass; None unless the answer is right."""
        return self.timing.ratio if self.timing and self.status == "right" else None

    @property
    def compile_seconds(self) -> float | None:
        """What the first call took beyond a later one, if it compiles."""
        if not self.compiled or self.timing is None:
            return None
        return max(0.0, self.timing.first - min(self.timing.seconds))


@dataclass(frozen=True)
class Conditions:
    """How cells are measured.

    Attributes:
        repeats: Timed calls, at least.
        scratch: A folder for files.
        enough: Seconds to which short calls are repeated.
    """

    repeats: int
    scratch: Path
    enough: float = 0.0


def cells(
    workload: Workload,
    reference: Reference,
    tasks: Iterable[str],
    methods: Iterable[Method],
    conditions: Conditions,
) -> Iterator[Cell]:
    """Run every method on every task; a bound that a task does not have is left out."""
    chosen = tuple(methods)
    for task in tasks:
        for method in chosen:
            found = cell(workload, reference, task, method, conditions)
            if method.comparable or found.status != "declined":
                yield found


def cell(
    workload: Workload, reference: Reference, task: str, method: Method, conditions: Conditions
) -> Cell:
    """Prepare, time and check one method; what it raises is its reason."""

    def made(status: Status, reason: str | None = None, **more: Any) -> Cell:
        sizes = tuple(workload.sizes.items())
        return Cell(workload.name, task, method.name, status, reason, sizes=sizes, **more)

    if method.needs is not None and find_spec(method.needs) is None:
        return made("not installed", f"{method.needs} is not installed")
    try:
        with ExitStack() as stack, _their_warnings(method):
            setting = Setting(workload.copy(), reference.max_norm, conditions.scratch, stack)
            call = method.prepare(task, setting)
            timing, raw = measured(
                call.run,
                call.before,
                plain(workload),
                workload.device,
                conditions.repeats,
                call.first_limit,
                conditions.enough,
            )
            timing = timing.of_one(call.batches)
            off = _error(call, TASKS[task], raw, reference) if method.comparable else None
    except DeclinedError as reason:
        return made("declined", str(reason))
    except OutOfTimeError as reason:
        stop_compilers()
        return made("refused", str(reason))
    except GradscopeError as refusal:
        where = f"{refusal.where}: " if refusal.where else ""
        return made("refused", f"{where}{refusal.what}")
    except Exception as failure:  # whatever a tool raises
        return made("refused", first_line(failure))
    wrong = off is not None and not off <= TOLERANCE
    return made(
        "wrong" if wrong else "right",
        f"relative error {off:.1g}" if wrong else None,
        timing=timing,
        error=off,
        compiled=method.compiled,
    )


def _error(call: Call, task: Task, raw: Any, reference: Reference) -> float:
    found: Result = call.result(raw)
    expected = (call.expected or task.expected)(reference)
    if task.rows:
        found = {name: value[reference.rows] for name, value in found.items()}
    return error(found, expected, by_row=task.by_row)


@contextmanager
def _their_warnings(method: Method) -> Iterator[None]:
    """Leave other tools' warnings out; ours are shown."""
    with warnings.catch_warnings():
        if not method.ours:
            warnings.simplefilter("ignore")
        yield


def stop_compilers() -> None:
    """End what an abandoned compilation left running, or it would slow down the rest."""
    from torch._inductor import async_compile

    stop: Callable[[], None] = async_compile.shutdown_compile_workers
    stop()
