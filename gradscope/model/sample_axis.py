"""Finds the call of the user's code that loses the sample axis, by the shapes of its results.

Model and loss are run on 1, 2 and 3 samples. A result that depends on the number of samples n has
an axis that grows with n. `squeeze()` drops this axis for n = 1 only; `flatten()` merges it with
others for any n.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gradscope.core.batch import Batch, tensors
from gradscope.errors import CoupledSamplesError, GradscopeError, ModelError, SpecError
from gradscope.model.locate import is_installed
from gradscope.model.problem import Problem
from gradscope.model.rounding import same

Shape = tuple[int, ...]
_EVALUATED = Problem._of_copies.__code__  # the frame that calls model and loss
_RESHAPES = ("view()", "reshape()", "expand()", "unflatten()", "as_strided()")
_KEEP = (
    "Keep the first axis: name the axes, as in squeeze(-1), flatten(1), x.reshape(len(x), -1) or "
    "mean(dim=1)."
)


@dataclass
class _Call:
    """A call of a function of torch."""

    name: str
    frame: traceback.FrameSummary | None  # the line of the user's code
    layer: nn.Module | None
    inputs: list[tuple[int | None, Shape]]  # the call that made each tensor, and its shape
    outputs: list[Shape] | None = None  # the call raised if it is None


@dataclass
class _Trace:
    """The calls of model and loss on some samples."""

    n: int
    calls: list[_Call] = field(default_factory=list)
    losses: Tensor | None = None  # (n,), None if something raised

    @property
    def failed(self) -> int | None:
        """The position of the call that raised, None if another thing than torch raised."""
        last = len(self.calls) - 1
        return last if self.losses is None and last >= 0 and self.outputs(last) is None else None

    def outputs(self, k: int) -> list[Shape] | None:
        """Return the shapes of what call `k` returned, None if there is no such result."""
        return self.calls[k].outputs if k < len(self.calls) else None


class _Recorder(TorchFunctionMode):
    """Records the calls that model and loss make."""

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls
        self._makers: Any = WeakTensorKeyDictionary()  # the position of the call that made a tensor

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        place = running_place()
        if place is None:
            return func(*args, **kwargs)
        given = [(self._makers.get(t), tuple(t.shape)) for t in tensors((args, kwargs))]
        call = _Call(_name(func), *place, given)
        self._calls.append(call)
        result = func(*args, **kwargs)
        found = tensors(result)
        if not found:
            self._calls.pop()  # x.shape, for example
            return result
        call.outputs = [tuple(t.shape) for t in found]
        for t in found:
            self._makers[t] = len(self._calls) - 1
        return result


@contextmanager
def locating_lost_axis(problem: Problem, batch: Batch) -> Iterator[None]:
    """Raise a `ModelError` with the line that loses the sample axis, if the body fails by it.

    Args:
        problem: Model and loss.
        batch: The samples that the body evaluates.
    """
    try:
        yield
    except (ModelError, SpecError, CoupledSamplesError) as error:
        found = None
        with suppress(GradscopeError, MemoryError, RuntimeError):  # `error` says more
            found = _located(problem, batch, error)
        if found is None:
            raise
        raise found from error


def _located(problem: Problem, batch: Batch, error: GradscopeError) -> ModelError | None:
    """Return the error of a call that loses the sample axis, or None if that is not the cause."""
    if problem.ranks is not None or not len(batch.sample_batch):
        return None
    one, two, three = (_traced(problem, batch.sample_batch.resized(n)) for n in (1, 2, 3))
    names = [[call.name for call in trace.calls] for trace in (two, three)]
    if names[0] != names[1]:
        return None
    if two.losses is None or three.losses is None:
        coupled = isinstance(error, CoupledSamplesError)  # the batch itself has losses
        fixed = _fixed(problem, one, two, batch) if coupled else None
        return fixed or _merged(problem, one, two, three)
    coupled = isinstance(error, CoupledSamplesError) and one.losses is not None
    if coupled and not _equal_in_pairs(problem, batch.sample_batch):
        return None
    return _dropped(problem, one, two, three, values=coupled)


def _traced(problem: Problem, batch: Batch) -> _Trace:
    trace = _Trace(len(batch))
    try:
        with _Recorder(trace.calls):
            trace.losses = problem.losses(batch, graph=False)
    except GradscopeError:
        pass
    return trace


def _equal_in_pairs(problem: Problem, batch: Batch) -> bool:
    """Whether four samples have the losses that they have two by two."""
    four = batch.resized(4)
    whole = problem.losses(four, graph=False)
    parts = [problem.losses(four.select(slice(k, k + 2)), graph=False) for k in (0, 2)]
    return same(whole, torch.cat(parts), precision=problem.precision)


def _dropped(
    problem: Problem, one: _Trace, two: _Trace, three: _Trace, *, values: bool
) -> ModelError | None:
    """Return the error of a call that drops the sample axis for one sample.

    Args:
        problem: Model and loss.
        one: The trace of one sample.
        two: The trace of two samples.
        three: The trace of three samples.
        values: Whether the losses have the right shape, and other values than in a batch.
    """
    origins: list[int | None] = []  # the call that dropped the axis, for each call
    for k, (call, other, more) in enumerate(zip(one.calls, two.calls, three.calls, strict=False)):
        if call.name != other.name:
            break
        given = (shapes for _, shapes in call.inputs)
        wanted = _expected([s for _, s in other.inputs], [s for _, s in more.inputs])
        origin = _of_inputs(call, origins)
        results = _expected(other.outputs, more.outputs)
        if call.outputs is not None and results is not None:
            differs = call.outputs != results
            lost = any(len(a) < len(b) for a, b in zip(call.outputs, results, strict=False))
            if not differs:
                origin = None
            elif lost and wanted is not None and [*given] == wanted:
                origin = k
        origins.append(origin)
    if values:
        found = next((origin for origin in reversed(origins) if origin is not None), None)
    else:
        found = origins[-1] if origins else None
    if found is None:
        return None
    call, shapes = one.calls[found], _shapes(three.calls[found].outputs)
    return _error(
        problem,
        call,
        f"{call.name} drops the sample axis of a single sample: its result is {shapes} for "
        f"3 samples, but {_shapes(call.outputs)} for 1",
    )


def _merged(problem: Problem, one: _Trace, two: _Trace, three: _Trace) -> ModelError | None:
    """Return the error of a call that merges the sample axis with others for any n."""
    failed = two.failed
    if failed is not None and one.outputs(failed) is None:
        return None  # one sample fails there, too
    origins: list[int | None] = []
    for k, (call, more) in enumerate(zip(two.calls, three.calls, strict=True)):
        before = _growth([s for _, s in call.inputs], [s for _, s in more.inputs])
        after = _growth(call.outputs, more.outputs)
        origin = _of_inputs(call, origins)
        if call.outputs is not None and after <= 1:
            origin = None
        elif call.outputs is not None and after > before >= 1:
            entries = {prod(s) for s in call.outputs} | {prod(s) for _, s in call.inputs}
            origin = k if len(entries) == 1 else origin
        origins.append(origin)
    found = origins[-1] if origins else None
    if found is None:
        return None
    call = three.calls[found]
    given = _shapes([s for _, s in call.inputs])
    return _error(
        problem,
        call,
        f"{call.name} merges the sample axis with others: of 3 samples {given} it makes "
        f"{_shapes(call.outputs)}",
    )


def _fixed(problem: Problem, one: _Trace, two: _Trace, batch: Batch) -> ModelError | None:
    """Return the error of a call whose shape has room for the samples of the batch alone."""
    failed = two.failed
    if failed is None or failed != one.failed or two.calls[failed].name not in _RESHAPES:
        return None
    call = two.calls[failed]
    what = f"{call.name} has a fixed shape: it fails on 1 and 2 samples, but not on {len(batch)}"
    return _error(problem, call, what)


def _of_inputs(call: _Call, origins: Sequence[int | None]) -> int | None:
    """Return the origin of the first input that has one."""
    made = (origins[k] for k, _ in call.inputs if k is not None and k < len(origins))
    return next((origin for origin in made if origin is not None), None)


def _expected(two: list[Shape] | None, three: list[Shape] | None) -> list[Shape] | None:
    """Return the shapes for one sample that follow from those for 2 and 3, or None."""
    if two is None or three is None or [*map(len, two)] != [*map(len, three)]:
        return None
    pairs = zip(two, three, strict=True)
    return [tuple(2 * a - b for a, b in zip(x, y, strict=True)) for x, y in pairs]


def _growth(two: list[Shape] | None, three: list[Shape] | None) -> int:
    """Return by how many entries the fastest growing axis grows with each sample."""
    pairs = zip(two or (), three or (), strict=False)
    return max((b - a for x, y in pairs for a, b in zip(x, y, strict=False)), default=0)


def _error(problem: Problem, call: _Call, what: str) -> ModelError | None:
    """Return the error with the place of a call, None if the place is unknown."""
    names = {module: name for name, module in problem.model.named_modules()}
    name = names.get(call.layer) if call.layer is not None else None
    layer = f"layer {name!r} ({type(call.layer).__name__})" if name else None
    if call.frame is None and layer is None:
        return None
    where, lines = layer, ""
    if call.frame is not None:
        place = f"{call.frame.filename}, line {call.frame.lineno}"
        where = place if layer is None else f"{layer}, {place}"
        lines = "\nIt came from:\n" + "".join(traceback.format_list([call.frame])).rstrip()
    return ModelError(what, where=where, remedy=_KEEP + lines)


def _shapes(shapes: list[Shape] | None) -> str:
    return ", ".join(map(str, shapes or ()))


def _name(func: Callable[..., Any]) -> str:
    """Return how code calls a function of torch, such as squeeze(), or reads a property, .T."""
    name = str(getattr(func, "__name__", type(func).__name__))
    own = getattr(getattr(func, "__self__", None), "__name__", None)
    if name == "__get__":
        return f".{own}"
    return "indexing" if name == "__getitem__" else f"{name}()"


@cache
def _is_users(file: str) -> bool:
    return not is_installed(Path(file))


def running_place() -> tuple[traceback.FrameSummary | None, nn.Module | None] | None:
    """Return the innermost line of the user's and the innermost layer that are running.

    Returns None outside of the calls of model and loss.
    """
    frame, line, layer = sys._getframe(2), None, None
    while frame.f_code is not _EVALUATED:
        if line is None and _is_users(frame.f_code.co_filename):
            code = frame.f_code
            line = traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name)
        module = frame.f_locals.get("self")
        layer = module if layer is None and isinstance(module, nn.Module) else layer
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return line, layer
