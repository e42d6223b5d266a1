"""Running methods on tasks: every outcome is a `Cell`, whatever a tool does."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from benchmarks.measure import (
    OutOfTimeError,
    Timing,
    measured,
    measured_apart,
    measured_sparingly,
)
from benchmarks.methods import Call, DeclinedError, Method, Setting, plain
from benchmarks.reference import Reference, Result, error
from benchmarks.tasks import TASKS, Task
from benchmarks.workloads import Workload
from gradscope.errors import GradscopeError
from gradscope.model.locate import first_line

_REASON = 200  # characters of a reason that are shown
_PATIENCE = 600.0  # seconds that another tool's first call may take at real sizes

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
        result_bytes: Of the answer.
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
    result_bytes: int | None = None

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
        clock: Tells the seconds.
    """

    repeats: int
    scratch: Path
    enough: float = 0.0
    clock: Callable[[], float] = time.perf_counter


def cells(
    workload: Workload,
    reference: Reference,
    tasks: Iterable[str],
    methods: Iterable[Method],
    conditions: Conditions,
) -> Iterator[Cell]:
    """Run every method on every task; a bound that a task does not have is left out.

    At real sizes the units are measured once, with the first task.
    """
    chosen = tuple(methods)
    units: dict[str, Cell] = {}
    for task in tasks:
        for method in chosen:
            if method.name in units:
                yield replace(units[method.name], task=task)
                continue
            found = cell(workload, reference, task, method, conditions)
            if method.comparable or found.status != "declined":
                yield found
            if workload.family.real and not method.comparable:
                units[method.name] = found


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
            timing, raw = _measured(call, workload, conditions, method)
            timing = timing.of_one(call.batches)
            more: dict[str, Any] = {"timing": timing, "compiled": method.compiled}
            if method.comparable:
                found = call.result(raw)
                more["result_bytes"] = sum(value.nbytes for value in found.values())
                more["error"] = _error(call, TASKS[task], found, reference)
    except DeclinedError as reason:
        return made("declined", str(reason))
    except OutOfTimeError as reason:
        stop_compilers()
        return made("refused", str(reason))
    except GradscopeError as refusal:
        where = f"{refusal.where}: " if refusal.where else ""
        return made("refused", f"{where}{refusal.what}")
    except Exception as failure:  # whatever a tool raises
        return made("refused", shorten(first_line(failure), _REASON))
    off = more.get("error", 0.0)
    if not off <= workload.tolerance:
        return made("wrong", f"relative error {off:.1g}", **more)
    return made("right", **more)


def _measured(
    call: Call, workload: Workload, conditions: Conditions, method: Method
) -> tuple[Timing, Any]:
    unit = plain(workload)
    if call.spent is not None:
        return measured_apart(call.run, call.before, unit, workload.device, call.spent)
    if workload.family.real:
        repeats = conditions.repeats if method.comparable else 1
        limit = None if method.ours else call.first_limit or _PATIENCE
        return measured_sparingly(
            call.run, call.before, unit, workload.device, repeats, limit, conditions.clock
        )
    return measured(
        call.run,
        call.before,
        unit,
        workload.device,
        conditions.repeats,
        call.first_limit,
        conditions.enough,
        conditions.clock,
    )


def _error(call: Call, task: Task, found: Result, reference: Reference) -> float:
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
