"""Compiled programs of `vmap`: a backend that falls back on another backend, and is checked by it.

A program computes `vmap` of one sample's gradient, followed by the requested results: norms and the
first states of reducers. `torch.compile` fuses them, so rows that are only summed need not be
stored. A program works for batches of one shape. Compilation takes time, so it must pay off for the
remaining batches. With `auto`, the program is timed against the plain backend, and the faster is
kept. The first result of a program is compared with the plain result, which is proved.
"""

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from math import hypot, nan
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradscope.backends.base import (
    AUTO,
    ROWS,
    Evaluate,
    Request,
    Starts,
    require_unhooked,
)
from gradscope.backends.vmap import per_sample, untouched
from gradscope.blocks import Block, DenseBlock, Evaluation, Gradients
from gradscope.blocks.base import precise, squares
from gradscope.core.batch import Batch, map_tensors, tensors, wholes
from gradscope.core.precision import doubled
from gradscope.errors import CertificateError, UnsupportedError
from gradscope.model.kernels import original_kernels
from gradscope.model.locate import first_line
from gradscope.model.problem import Problem
from gradscope.process.memory import timed
from gradscope.process.shortage import is_machine_error

_compile = torch.compile  # saved before anything replaces it
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_NEGLIGIBLE = 1e-2  # an entry's error is relative to at least this share of its group's size
# compilation takes about this many seconds, plus these for each parameter; a measured time
# replaces the estimate
_FIXED, _EACH = 5.0, 0.5
_GAIN = 0.5  # share of the remaining time that compilation can save, at most
_PROGRAMS = 8  # the maximum number of programs
_COMES_AGAIN = 2  # how often a second shape must occur before it is compiled
_REPEATS = 3  # the shortest of these times counts

_COLUMNS = 64  # entries of a sample with separate ranges; more entries share a range
_LARGEST = torch.iinfo(torch.int64).max
_NO_POSITION: Any = object()  # makes a draw of random numbers by index fail

# identifies a program by request and shapes
Key = tuple[tuple[bool, tuple[str, ...]], tuple[Any, ...]]


class NotCompiledError(Exception):
    """A function cannot be compiled, or a program no longer fits; the message gives the reason."""


def compiled(fn: FunctionType, *arguments: Any) -> Callable[..., Any]:
    """Return a function compiled for arguments of this form.

    It is valid for the shapes, dtypes and Python values of the model and the loss that torch
    guards. If one of them changes, it raises `NotCompiledError` and does not compile again. It
    prints nothing and leaves no process running.
    """
    with _quiet():
        from torch._dynamo.utils import counters
        from torch._inductor.cpp_builder import get_cpp_compiler

        before = counters["stats"]["unique_graphs"]
        get_cpp_compiler()  # fails early, before a long compilation
        call = _compile(_copied(fn), fullgraph=True, dynamic=False)
        call(*arguments)
    if counters["stats"]["unique_graphs"] == before:
        raise NotCompiledError("torch.compile is disabled")

    def serve(*arguments: Any) -> Any:
        with original_kernels(), torch.compiler.set_stance("fail_on_recompile"):
            try:
                return call(*arguments)
            except RuntimeError as error:
                if "fail_on_recompile" not in str(error):
                    raise
                raise NotCompiledError(
                    "shapes, dtypes or Python values have changed since compilation"
                ) from error

    return serve


def _copied(fn: FunctionType) -> FunctionType:
    """Copy a function with its code, because torch counts compilations by code object."""
    code = fn.__code__.replace()
    return FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Compile in this process only, without warnings and log messages.

    Exceptions of torch, or of the traced code, become `NotCompiledError`.
    """
    try:
        import torch._dynamo.config as dynamo
        import torch._inductor.config as inductor

        names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
        loggers = [logging.getLogger(name) for name in ("torch", *names)]
        levels = [logger.level for logger in loggers]
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(original_kernels())
            stack.enter_context(torch.compiler.set_stance("default"))
            stack.enter_context(inductor.patch(compile_threads=1))
            # a hook that is attached later must be detected
            noticing = dynamo.patch(skip_nnmodule_hook_guards=False, suppress_errors=False)
            stack.enter_context(noticing)
            for logger, level in zip(loggers, levels, strict=True):
                stack.callback(logger.setLevel, level)
                logger.setLevel(logging.CRITICAL)
            yield
    except Exception as error:
        raise NotCompiledError(first_line(error)) from error


class Program:
    """A compiled program for a request and batches of one shape; `plain` computes the rest.

    `keys` are the reductions inside the program. `refusals` gives the reason for each other
    reduction.
    """

    def __init__(self, problem: Problem, batch: Batch, request: Request, plain: Evaluate) -> None:
        try:
            require_unhooked("a compiled program", problem)
        except UnsupportedError as error:
            raise NotCompiledError(error.what) from error
        self._problem, self._plain = problem, plain
        self.refusals: dict[str, str] = {}
        for key in request.keys:
            try:
                _require_traceable(problem, request.starts, key)
            except NotCompiledError as error:
                self.refusals[key] = str(error)
        self.keys = tuple(key for key in request.keys if key not in self.refusals)
        self._rows = request.rows or bool(self.refusals)
        keys, rows, starts = self.keys, self._rows, request.starts

        def program(values: dict[str, Tensor], batch: Batch) -> Any:
            # kernels of fused attention would be called once per sample
            with sdpa_kernel(SDPBackend.MATH):
                losses, gradients = per_sample(problem, values, batch)
            blocks = _TracedGradients(
                {name: DenseBlock(g) for name, g in gradients.items()}, _NO_POSITION
            )
            states = starts(keys, blocks) if keys else {}
            return losses, blocks.squared_norms, states, gradients if rows else {}

        with problem.state.restoring(), untouched(), torch.no_grad():
            self._serve = compiled(program, *self._arguments(batch))  # type: ignore[arg-type]

    def __call__(self, batch: Batch) -> Evaluation:
        """Evaluate a batch; raise `NotCompiledError` if the program does not fit it."""
        with self._problem.state.restoring(), untouched(), torch.no_grad():
            losses, squared_norms, states, gradients = self._serve(*self._arguments(batch))

        def rows() -> Gradients:
            if self._rows:
                return Gradients({name: DenseBlock(g) for name, g in gradients.items()})
            return self._plain(batch).gradients

        found = _ComputedGradients(batch.index, squared_norms, rows)
        return Evaluation(losses, found, states=states, compiled=True)

    def _arguments(self, batch: Batch) -> tuple[dict[str, Tensor], Batch]:
        """Return contiguous tensors: other layouts would need another program."""
        inputs, targets = map_tensors(Tensor.contiguous, (batch.inputs, batch.targets))
        values = {name: p.detach() for name, p in self._problem.parameters.items()}
        return values, Batch(inputs, targets, batch.index.contiguous())


class _ComputedGradients(Gradients):
    """Gradients with norms computed by a program; the rows are computed on request."""

    def __init__(
        self, index: Tensor, squared_norms: dict[str, Tensor], rows: Callable[[], Gradients]
    ) -> None:
        super().__init__({}, index)
        self._squared, self._rows = squared_norms, rows

    def __getitem__(self, name: str) -> Block:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.squared_norms)

    def __len__(self) -> int:
        return len(self.squared_norms)

    @property
    def n(self) -> int:
        """The number of samples."""
        assert self.index is not None
        return len(self.index)

    def has_finite_bounds(self) -> bool:
        """Whether the norms prove that every gradient is finite."""
        return bool(self.norms.isfinite().all())

    def with_powers(self, powers: frozenset[int]) -> Gradients:
        """Return the gradients, with the sums over samples that will be requested."""
        return self._all.with_powers(powers)

    @cached_property
    def _all(self) -> Gradients:
        return Gradients(dict(self._rows()), self.index)


class _TracedGradients(Gradients):
    """Gradients inside a program: without locks, branches and positions in the data."""

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        """‖gᵢ‖² (n,) for each parameter."""
        return {name: block.squared_norms() for name, block in self.items()}

    @property
    def norms(self) -> Tensor:
        """‖gᵢ‖ (n,) over all parameters together."""
        return torch.stack(list(self.squared_norms.values())).sum(0).sqrt()

    def power_sum(self, name: str, power: int) -> Tensor:
        """Return Σᵢ gᵢ, or Σᵢ |gᵢ|² in float64 because no program checks its range, (*shape)."""
        values = self[name].dense()
        return precise(values).sum(0) if power == 1 else squares(doubled(values)).sum(0)

    def with_powers(self, powers: frozenset[int]) -> "_TracedGradients":
        """Return self: the compiler merges sums into one pass."""
        return self

    def of(self, blocks: Any) -> "_TracedGradients":
        """Return a `_Traced` of other blocks for the same samples."""
        return _TracedGradients(blocks, self.index)


def _require_traceable(problem: Problem, starts: Starts, key: str) -> None:
    """Trace a reduction without data; reading values or drawing numbers raises."""
    rows = {
        name: torch.empty(2, *p.shape, dtype=p.dtype, device="meta")
        for name, p in problem.parameters.items()
    }

    def reduction(rows: dict[str, Tensor]) -> Any:
        blocks = {name: DenseBlock(g) for name, g in rows.items()}
        return starts((key,), _TracedGradients(blocks, _NO_POSITION))

    own = _copied(reduction)  # type: ignore[arg-type]
    with _quiet():
        _compile(own, fullgraph=True, dynamic=False, backend="eager")(rows)


class Ranges:
    """The ranges of integers in inputs and targets that uncompiled evaluation accepted.

    torch raises an error for a class or token that is out of range, but a compiled program crashes
    the process. So a batch with an integer outside the accepted ranges is first evaluated
    uncompiled. Negative integers have a separate range.
    """

    def __init__(self) -> None:
        self._limits: dict[tuple[torch.Size, ...], list[Tensor]] = {}

    def hold(self, batch: Batch) -> bool:
        """Whether every integer of a batch is within the accepted ranges."""
        numbers = _whole_numbers(batch)
        seen = self._limits.get(tuple(t.shape[1:] for t in numbers))
        if seen is None:
            return False
        return all(
            bool((_bounds(t) <= accepted).all()) for t, accepted in zip(numbers, seen, strict=True)
        )

    def widen(self, batch: Batch) -> None:
        """Add the integers of an accepted batch."""
        numbers = _whole_numbers(batch)
        found = [_bounds(t) for t in numbers]
        seen = self._limits.setdefault(tuple(t.shape[1:] for t in numbers), found)
        seen[:] = map(torch.maximum, seen, found)


def _whole_numbers(batch: Batch) -> list[Tensor]:
    """Return the integers among inputs and targets, each (n, columns)."""
    found = [
        t.reshape(t.shape[0] if t.dim() else 1, -1).long()
        for t in tensors((batch.inputs, batch.targets))
        if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool) and t.numel()
    ]
    return [t if t.shape[1] <= _COLUMNS else t.reshape(-1, 1) for t in found]


def _bounds(t: Tensor) -> Tensor:
    """Return (4, columns): −min and max of the values ≥ 0, −min and max of the values < 0."""
    below = t < 0
    return torch.stack(
        [
            -torch.where(below, _LARGEST, t).amin(0),
            torch.where(below, -1, t).amax(0),
            -torch.where(below, t, 0).amin(0),
            torch.where(below, t, -_LARGEST).amax(0),
        ]
    )


def not_compiled(
    backend: str, verify: str, coupling: str, randomness: str, rows: str
) -> str | None:
    """Return the reason why nothing can be compiled with these settings, or None."""
    if backend not in (AUTO, "vmap"):
        return f"the backend {backend} has no compiled form; use auto or vmap"
    if rows == "token":
        return "rows token has no compiled form"
    if coupling == "own-loss":
        return "coupling own-loss needs one joint forward pass"
    if randomness == "fixed":
        return "randomness fixed draws its numbers outside a program"
    if verify == "always":
        return "verify always evaluates every batch uncompiled"
    return None


class Compiled:
    """A backend that uses compiled programs where it has them, and the plain backend elsewhere.

    `notes` collects decisions with reasons. With `faster`, a program is kept only if it is measured
    to be faster, as long as batches remain. With `check`, the first result of a program is compared
    with the plain result.
    """

    def __init__(
        self,
        problem: Problem,
        plain: Evaluate,
        notes: list[str],
        *,
        faster: bool,
        check: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._problem, self._plain, self._notes = problem, plain, notes
        self._faster, self._check, self._clock = faster, check, clock
        self._able, self._took = True, 0.0  # seconds of the last compilation
        self._tolerance = _TOLERANCES.get(problem.dtype, 1e-8)
        self._programs: dict[Key, Program | None] = {}
        self._shape_counts: Counter[Key] = Counter()
        self._ranges = Ranges()

    def __call__(self, batch: Batch, request: Request = ROWS, /) -> Evaluation:
        """Evaluate a batch with its program, or with the plain backend."""
        if self._able and wholes(batch.inputs):  # a program would keep the first batch's
            self._able = False
            self._notes.append("not compiled: inputs are whole")
        if not self._able:
            return self._plain(batch, request)
        given = tensors((batch.inputs, batch.targets))
        shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in given)
        key = (request.rows, request.keys), shapes
        program = self._programs.get(key)
        if program is not None and self._ranges.hold(batch):
            try:
                return program(batch)
            except Exception as error:  # any exception of a program that no longer fits
                if is_machine_error(error):
                    raise
                self._programs[key] = None
                why = str(error) if isinstance(error, NotCompiledError) else first_line(error)
                self._notes.append(f"no longer compiled: {why}")
        right = self._plain(batch, request)
        self._ranges.widen(batch)
        self._shape_counts[key] += 1
        # a batch of a second shape may be the last of the data set: wait for another one
        another = any(met == key[0] and shape != key[1] for met, shape in self._shape_counts)
        waits = another and self._shape_counts[key] < _COMES_AGAIN
        if not waits and key not in self._programs and len(self._programs) < _PROGRAMS:
            self._programs[key] = None
            if self._pays(batch, request):
                self._programs[key] = self._made(batch, request, right)
        return right

    @property
    def in_use(self) -> bool:
        """Whether a program exists."""
        return any(program is not None for program in self._programs.values())

    def forget(self) -> None:
        """Release all programs."""
        self._programs.clear()
        self._shape_counts.clear()

    def require_equal(self, found: Evaluation, right: Evaluation, request: Request) -> None:
        """Compare a program's result with the plain one; on a difference, disable compilation."""
        off = distance(found, right, request, tuple(found.states))
        if not off <= self._tolerance:
            self._able = False
            self.forget()
            raise CertificateError(
                f"the result of the compiled program differs from the plain result by {off:.1e}",
                remedy="Run without `compile`.",
            )

    def _pays(self, batch: Batch, request: Request) -> bool:
        """Whether enough work remains for compilation to pay off."""
        left = None if request.batches_left is None else request.batches_left - 1
        if left is None or (left and not self._faster):
            return True
        seconds = left * self._seconds(self._plain, batch, request) if left else 0.0
        cost = self._took or _FIXED + _EACH * len(self._problem.parameters)
        if seconds * _GAIN >= cost:
            return True
        self._notes.append(
            f"not compiled: about {seconds:.2g} s of work remain, and compilation takes about "
            f"{cost:.0f} s"
        )
        return False

    def _made(self, batch: Batch, request: Request, right: Evaluation) -> Program | None:
        """Compile; return the program, or None if it is wrong or not faster."""
        begun = time.perf_counter()
        try:
            program = Program(self._problem, batch, request, self._plain)
        except NotCompiledError as error:
            self._able = False
            self._notes.append(f"not compiled: {error}")
            return None
        self._took = time.perf_counter() - begun
        said = f"vmap compiled in {self._took:.1f} s"
        if self._check:
            off = distance(program(batch), right, request, program.keys)
            if not off <= self._tolerance:
                self._notes.append(f"not compiled: the program's result differs by {off:.1e}")
                return None
            said += f", equal to the proved result within {off:.0e}"
        self._notes += [f"{key}: not compiled: {why}" for key, why in program.refusals.items()]
        if not self._faster:
            self._notes.append(said)
            return program
        seconds = [
            [self._seconds(way, batch, request) for way in (self._plain, program)]
            for _ in range(_REPEATS)  # alternating
        ]
        before, after = map(min, zip(*seconds, strict=True))
        kept = "is kept" if after < before else "is not kept"
        self._notes.append(
            f"{said}; it {kept}: {after * 1e3:.3g} ms per batch, uncompiled {before * 1e3:.3g} ms"
        )
        return program if after < before else None

    def _seconds(self, way: Callable[[Batch], Evaluation], batch: Batch, request: Request) -> float:
        """Return the seconds that the whole request takes."""

        def run() -> None:
            found = way(batch)
            _ = found.gradients.squared_norms
            keys = [key for key in request.keys if key not in found.states]
            request.starts(keys, found.gradients)
            if request.rows:
                found.gradients.dense(request.out)

        return timed(run, self._problem.device, self._clock)[0]


def distance(found: Evaluation, right: Evaluation, request: Request, keys: Sequence[str]) -> float:
    """Return the largest relative error of a program's result; NaN if it cannot be computed.

    Entries are compared together, because a single activation at a kink may take either side.
    """
    errors = torch.tensor(list(_errors(found, right, request, keys)), dtype=torch.float64)
    return float(errors.max())  # NaN counts as the largest


def _errors(
    found: Evaluation, right: Evaluation, request: Request, keys: Sequence[str]
) -> Iterator[float]:
    finite = right.losses.isfinite() & right.gradients.norms.isfinite()
    yield _relative(found.losses[finite], right.losses[finite])
    size = float(right.gradients.norms[finite].norm())
    for name, theirs in right.gradients.squared_norms.items():
        ours = found.gradients.squared_norms[name]
        yield _relative(ours[finite].sqrt(), theirs[finite].sqrt(), size)
    if bool(finite.all()) and keys:  # samples that are not finite are left out of every sum
        for key, state in request.starts(keys, right.gradients).items():
            own = found.states.get(key, {})
            yield 0.0 if own.keys() == state.keys() else nan
            # the size of all entries with the same prefix, such as "sum:"
            kinds: dict[str, float] = {}
            for name, value in state.items():
                kind = name.partition(":")[0]
                kinds[kind] = hypot(kinds.get(kind, 0.0), _size(value))
            for name in own.keys() & state.keys():
                yield _relative(own[name], state[name], kinds[name.partition(":")[0]])
    if request.rows:
        for name, block in right.gradients.select(finite).items():
            row = found.gradients[name].select(finite).dense()
            yield _relative(row, block.dense(), size)


def _relative(ours: Tensor, theirs: Tensor, whole: float = 0.0) -> float:
    """Return ‖ours − theirs‖ relative to ‖theirs‖, or to a share of the whole size."""
    if ours.shape != theirs.shape:
        return nan
    gap = _size(doubled(ours) - doubled(theirs))
    scale = max(_size(theirs), _NEGLIGIBLE * whole)
    return gap / scale if scale else gap


def _size(t: Tensor) -> float:
    return float(doubled(t).norm())
