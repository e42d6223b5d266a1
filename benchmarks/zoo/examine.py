"""Examine one case: build the model, compute the reference, run each tool. A case is a process."""

import copy
import os
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import measured
from benchmarks.methods.base import nothing
from benchmarks.reference import error
from benchmarks.zoo.libraries import PEERS
from benchmarks.zoo.loss import Uneven, loss_of
from benchmarks.zoo.subject import SAMPLES, NotBuiltError, Subject, as_dtype, as_model
from benchmarks.zoo.tools import TOOLS, Bound, plain, refusal
from benchmarks.zoo.truth import PlainNorms, Truth, alone, truth

WITHIN = {torch.float32: 1e-4, torch.float64: 1e-7}  # relative error of the row of one parameter
# A parameter below a floor, as a share of the whole gradient, is measured by the floor. In float32
# parameters of a smaller share are measured as well, by 500 times the tolerance.
FLOORS = {torch.float32: ((1e-2, 1.0), (1e-5, 500.0)), torch.float64: ((1e-5, 1.0),)}
_ROUNDED = 8.0  # how much more than a loop in float32 a tool may be off by rounding
_REPEATS = 3
_LONG = 20.0  # seconds: the cost of a tool that took longer is not measured
_CPU = torch.device("cpu")

Facts = dict[str, Any]
Send = Callable[[str, Any], object]


def group_of(name: str) -> Any:
    """Return the module that lists and builds the cases of a group."""
    return import_module(f"benchmarks.zoo.groups.{name}")


def run(case: str, tools: Sequence[str], dtype: str | None, memory: float, connection: Any) -> None:
    """Examine one case in this process and send what is found; nothing is raised.

    Args:
        case: "group/name".
        tools: Which tools are asked.
        dtype: The tools compute in this dtype; None means the dtype of the case.
        memory: GB that this process may have beyond what it starts with.
        connection: Takes pairs of a word and what is found.
    """
    torch.set_num_threads(1)
    _limit(memory)
    try:
        examine(case, tools, dtype, lambda word, value: connection.send((word, value)))
    except MemoryError as failure:
        connection.send(("out of memory", str(failure)))
    connection.send(("done", None))


def examine(case: str, tools: Sequence[str], dtype: str | None, send: Send) -> None:
    """Send what is found of a case, one part at a time.

    Raises:
        MemoryError: There is not enough of it.
    """
    warnings.simplefilter("ignore")
    group, _, name = case.partition("/")
    torch.manual_seed(0)
    start = time.perf_counter()
    try:
        subject = _as_asked(group_of(group).build(name), dtype)
        loss = loss_of(subject)
    except Exception as failure:  # libraries raise any class of error here
        send("not built", _said(failure))
        return
    try:
        batches = [subject.inputs(seed, SAMPLES) for seed in (0, 1)]
        right = [truth(subject, loss, batch) for batch in batches]
        with PlainNorms():
            single = alone(subject.model, loss, batches[1])[1]
    except Exception as failure:  # float64, a copy or a batch of one is unsupported
        send("not judged", _said(failure))
        return
    if not all(bool(row.isfinite().all()) for r in right for row in r.rows.values()):
        send("not judged", "a gradient is not finite in float64")
        return
    rounding = _error(single, right[1], subject.dtype)
    send("facts", _facts(subject, right, rounding) | {"seconds": time.perf_counter() - start})
    for tool in tools:
        send("asked", tool)
        send("answer", _asked(tool, subject, loss, batches, right, rounding))


def _as_asked(subject: Subject, dtype: str | None) -> Subject:
    if dtype is None or getattr(torch, dtype) == subject.dtype:
        return subject
    wanted: torch.dtype = getattr(torch, dtype)
    model = as_model(subject.model, wanted)
    given = subject.inputs
    return Subject(model, lambda s, n: as_dtype(given(s, n), wanted), wanted, subject.exactly)


def _facts(subject: Subject, right: Sequence[Truth], rounding: float) -> Facts:
    natures = [r.nature for r in right]
    nature = next((n for n in ("random", "coupled") if n in natures), "independent")
    return {
        "nature": nature,
        "company": max(r.company for r in right),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in subject.model.parameters() if p.requires_grad),
        "rounding": rounding,
        "no_gradient": [k for k, row in right[0].rows.items() if not row.any()][:5],
    }


def _asked(
    tool: str,
    subject: Subject,
    loss: Uneven,
    batches: Sequence[Any],
    right: Sequence[Truth],
    rounding: float,
) -> Facts:
    """Return what a tool made of two batches: its outcome, error, reason, facts and costs."""
    if PEERS.get(tool) is not None and find_spec(PEERS[tool]) is None:
        return {"outcome": "not installed"}
    start = time.perf_counter()
    try:
        model = copy.deepcopy(subject.model)
        bound = TOOLS[tool](model, loss)
        found, reason = _worst(bound, batches, right, subject.dtype)
        first = time.perf_counter() - start
    except MemoryError:
        raise
    except Exception as failure:  # tools raise any class of error
        return {"outcome": "refused" if refusal(failure) else "raised", "reason": _said(failure)}
    facts = {"error": found if isfinite(found) else None, "seconds": first} | bound.facts()
    outcome = "right" if found <= max(WITHIN[subject.dtype], _ROUNDED * rounding) else "wrong"
    if outcome == "wrong" and subject.dtype == torch.float32 and isfinite(found):
        wide = _exact_error(tool, subject, loss, batches, right)
        facts["float64"] = wide
        if wide is not None and wide <= WITHIN[torch.float64]:
            outcome = "right"  # and what is more in float32 is rounding
    if outcome == "wrong":
        facts["reason"] = reason
    elif first < _LONG:
        facts |= _costs(bound, model, loss, batches[1])
    return {"outcome": outcome} | facts


def _worst(
    bound: Bound, batches: Sequence[Any], right: Sequence[Truth], dtype: torch.dtype
) -> tuple[float, str]:
    """Return the largest error of the rows and norms of a first and a later batch, and where."""
    worst = (0.0, "")
    for k, (batch, exact) in enumerate(zip(batches, right, strict=True)):
        rows = bound.rows(batch)
        worst = max(worst, (_error(rows, exact, dtype), _where(rows, exact, f"batch {k}")))
        if bound.norms is not None:
            norms = {"norms": bound.norms(batch)}
            off = error(norms, {"norms": exact.norms}, by_row=True)
            worst = max(worst, (off, f"norms of batch {k}"))
    return worst


def _error(rows: dict[str, Tensor], exact: Truth, dtype: torch.dtype) -> float:
    real = {k: _real(v) for k, v in rows.items()}
    wanted = {k: _real(v) for k, v in exact.rows.items()}
    return max(
        error(real, wanted, by_row=True, floor=floor) / slack for floor, slack in FLOORS[dtype]
    )


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def _where(rows: dict[str, Tensor], exact: Truth, batch: str) -> str:
    """Return which parameter is furthest off, or has another shape."""
    worst = (-1.0, "")
    for name, right in exact.rows.items():
        if name not in rows:
            return f"{batch}: no rows of {name}"
        if rows[name].shape != right.shape:
            shapes = f"{tuple(rows[name].shape)}, not {tuple(right.shape)}"
            return f"{batch}: rows of {name} have shape {shapes}"
        off = float((rows[name].detach().to(right) - right).norm() / right.norm().clamp(min=1e-30))
        worst = max(worst, (off, f"{batch}: rows of {name} are off by {off:.0e}"))
    return worst[1]


def _exact_error(
    tool: str, subject: Subject, loss: Uneven, batches: Sequence[Any], right: Sequence[Truth]
) -> float | None:
    """Return the error of a tool in float64, or None if the tool gives no answer."""
    model = as_model(copy.deepcopy(subject.model), torch.float64)
    wide = [as_dtype(batch, torch.float64) for batch in batches]
    try:
        with subject.exactly(model):
            found = _worst(TOOLS[tool](model, loss), wide, right, torch.float64)[0]
    except MemoryError:
        raise
    except Exception:  # tools raise any class of error
        return None
    return found if isfinite(found) else None


def _costs(bound: Bound, model: nn.Module, loss: Uneven, batch: Any) -> Facts:
    """Return what a later call costs, as a multiple of a plain forward and backward pass."""
    unit = plain(model, loss, batch)
    try:
        calls = {"rows": lambda: bound.rows(batch)}
        if bound.norms is not None:
            calls["norms"] = lambda: bound.norms(batch)  # type: ignore[misc, dict-item]
        return {
            f"cost_{what}": measured(call, nothing, unit, _CPU, _REPEATS, clock=time.process_time)[
                0
            ].ratio
            for what, call in calls.items()
        }
    except Exception as failure:  # the model writes into its inputs, say
        return {"cost_failed": _said(failure)}


def _said(failure: BaseException) -> str:
    """Return an error in one line."""
    text = " ".join(str(failure).split())
    last = traceback.extract_tb(failure.__traceback__)[-1:] if not text else []
    place = "".join(f" at {os.path.basename(f.filename)}:{f.lineno}" for f in last)  # noqa: PTH119
    return f"{type(failure).__name__}: {text or 'no message'}{place}"[:600]


def _limit(memory: float) -> None:
    """Limit the address space to what there is and `memory` GB more."""
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    limit = used + int(memory * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


__all__ = ["NotBuiltError", "examine", "group_of", "run"]
