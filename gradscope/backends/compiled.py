"""`vmap`, compiled: a backend over another one, which it falls back on and is held against.

A program is `vmap` of one sample's gradient, followed by all that is requested: norms, and the
states with which reducers start. `torch.compile` fuses them, so that what only a sum is wanted of
need not be written. It serves batches of one shape. What compiling costs is weighed against what is
left to do; under `auto` the program is timed beside the plain backend, and the faster is kept. Its
first answer is held against the plain one, which is proved.
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

_compile = torch.compile  # as it is before a state takes its place
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_NEGLIGIBLE = 1e-2  # an entry is measured against at least this share of its kind
_FIXED, _EACH = 5.0, 0.5  # seconds that compiling takes, and each parameter adds, about: where
# nothing was compiled yet, afterwards what that took counts
_GAIN = 0.5  # of the time that is left: what compiling gains at most, about
_PROGRAMS = 8  # at most
_COMES_AGAIN = 2  # times that a further shape has come when it is compiled
_REPEATS = 3  # of which the shortest counts

_COLUMNS = 64  # entries of a sample that are looked at one by one: they may be different things
_LARGEST = torch.iinfo(torch.int64).max
_NOWHERE: Any = object()  # a draw of random numbers by a sample's position does not find it

Key = tuple[tuple[bool, tuple[str, ...]], tuple[Any, ...]]  # of a program: request and shapes


class NotCompiledError(Exception):
    """A function cannot be compiled, or does not serve any more; it says why."""


def compiled(fn: FunctionType, *arguments: Any) -> Callable[..., Any]:
    """Return a function compiled for arguments such as these.

    It serves what it was compiled for: shapes, dtypes, the model's and the loss's own Python
    values, all of which torch guards. Where one of them is another, it raises `NotCompiledError`
    rather than compile again. Nothing is printed, and no process is left behind.
    """
    with _quiet():
        from torch._dynamo.utils import counters
        from torch._inductor.cpp_builder import get_cpp_compiler

        before = counters["stats"]["unique_graphs"]
        get_cpp_compiler()  # before minutes are spent on a graph
        call = _compile(_copied(fn), fullgraph=True, dynamic=False)
        call(*arguments)
    if counters["stats"]["unique_graphs"] == before:
        raise NotCompiledError("torch.compile is switched off")

    def serve(*arguments: Any) -> Any:
        with original_kernels(), torch.compiler.set_stance("fail_on_recompile"):
            try:
                return call(*arguments)
            except RuntimeError as error:
                if "fail_on_recompile" not in str(error):
                    raise
                raise NotCompiledError("what it was compiled for has changed") from error

    return serve


def _copied(fn: FunctionType) -> FunctionType:
    """Copy a function with its code, by which torch counts compilations."""
    code = fn.__code__.replace()
    return FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Compile in this process alone, without warnings and log messages.

    What torch, or the code that it traces, raises is a `NotCompiledError`.
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
            # a hook that is attached later must be noticed
            noticing = dynamo.patch(skip_nnmodule_hook_guards=False, suppress_errors=False)
            stack.enter_context(noticing)
            for logger, level in zip(loggers, levels, strict=True):
                stack.callback(logger.setLevel, level)
                logger.setLevel(logging.CRITICAL)
            yield
    except Exception as error:
        raise NotCompiledError(first_line(error)) from error


class Program:
    """What is requested of a batch, compiled for batches of its shape; `plain` does the rest.

    `keys` are the reductions that are part of it, `outside` says why others are not.
    """

    def __init__(self, problem: Problem, batch: Batch, request: Request, plain: Evaluate) -> None:
        try:
            require_unhooked("a compiled program", problem)
        except UnsupportedError as error:
            raise NotCompiledError(error.what) from error
        self._problem, self._plain = problem, plain
        self.outside: dict[str, str] = {}
        for key in request.keys:
            try:
                _require_traceable(problem, request.starts, key)
            except NotCompiledError as error:
                self.outside[key] = str(error)
        self.keys = tuple(key for key in request.keys if key not in self.outside)
        self._rows = request.rows or bool(self.outside)
        keys, rows, starts = self.keys, self._rows, request.starts

        def program(values: dict[str, Tensor], batch: Batch) -> Any:
            # kernels of fused attention would be called sample by sample
            with sdpa_kernel(SDPBackend.MATH):
                losses, gradients = per_sample(problem, values, batch)
            blocks = _Traced({name: DenseBlock(g) for name, g in gradients.items()}, _NOWHERE)
            states = starts(keys, blocks) if keys else {}
            return losses, blocks.squared_norms, states, gradients if rows else {}

        with problem.state.kept(), untouched(), torch.no_grad():
            self._serve = compiled(program, *self._arguments(batch))  # type: ignore[arg-type]

    def __call__(self, batch: Batch) -> Evaluation:
        """Evaluate a batch; raise `NotCompiledError` where the program does not serve for it."""
        with self._problem.state.kept(), untouched(), torch.no_grad():
            losses, squared_norms, states, gradients = self._serve(*self._arguments(batch))

        def rows() -> Gradients:
            if self._rows:
                return Gradients({name: DenseBlock(g) for name, g in gradients.items()})
            return self._plain(batch).gradients

        found = _Computed(batch.index, squared_norms, rows)
        return Evaluation(losses, found, states=states, compiled=True)

    def _arguments(self, batch: Batch) -> tuple[dict[str, Tensor], Batch]:
        """Lay all tensors out alike: for another layout there would be another program."""
        inputs, targets = map_tensors(Tensor.contiguous, (batch.inputs, batch.targets))
        values = {name: p.detach() for name, p in self._problem.parameters.items()}
        return values, Batch(inputs, targets, batch.index.contiguous())


class _Computed(Gradients):
    """Gradients whose norms a program has computed; the rows come when they are asked for."""

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

    def bounded(self) -> bool:
        """Whether the norms show that every gradient is finite."""
        return bool(self.norms.isfinite().all())

    def asked(self, powers: frozenset[int]) -> Gradients:
        """Return the gradients, told which sums over samples will be asked for."""
        return self._all.asked(powers)

    @cached_property
    def _all(self) -> Gradients:
        return Gradients(dict(self._rows()), self.index)


class _Traced(Gradients):
    """Gradients inside a program: no locks, no branches, no sample's position in its data."""

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        """‖gᵢ‖² (n,) for each parameter."""
        return {name: block.squared_norms() for name, block in self.items()}

    @property
    def norms(self) -> Tensor:
        """‖gᵢ‖ (n,) over all parameters together."""
        return torch.stack(list(self.squared_norms.values())).sum(0).sqrt()

    def power_sum(self, name: str, power: int) -> Tensor:
        """Return Σᵢ gᵢ, or Σᵢ |gᵢ|² in float64 since no program looks at its range, (*shape)."""
        values = self[name].dense()
        return precise(values).sum(0) if power == 1 else squares(doubled(values)).sum(0)

    def asked(self, powers: frozenset[int]) -> "_Traced":
        """Return these: the compiler takes sums in one pass by itself."""
        return self

    def of(self, blocks: Any) -> "_Traced":
        """Return other blocks for the same samples."""
        return _Traced(blocks, self.index)


def _require_traceable(problem: Problem, starts: Starts, key: str) -> None:
    """Trace a reduction by itself, without data; one that reads values or draws has no graph."""
    rows = {
        name: torch.empty(2, *p.shape, dtype=p.dtype, device="meta")
        for name, p in problem.parameters.items()
    }

    def reduction(rows: dict[str, Tensor]) -> Any:
        blocks = {name: DenseBlock(g) for name, g in rows.items()}
        return starts((key,), _Traced(blocks, _NOWHERE))

    own = _copied(reduction)  # type: ignore[arg-type]
    with _quiet():
        _compile(own, fullgraph=True, dynamic=False, backend="eager")(rows)


class Ranges:
    """The ranges of whole numbers among inputs and targets that uncompiled evaluation accepted.

    A class or token that is out of range is an error of torch; in a compiled program it ends the
    process. So a batch with a number beyond those seen before is evaluated uncompiled first.
    Negative numbers have a range of their own.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[torch.Size, ...], list[Tensor]] = {}

    def hold(self, batch: Batch) -> bool:
        """Whether every whole number of a batch is within what has been accepted."""
        numbers = _whole_numbers(batch)
        seen = self._seen.get(tuple(t.shape[1:] for t in numbers))
        if seen is None:
            return False
        return all(
            bool((_bounds(t) <= accepted).all()) for t, accepted in zip(numbers, seen, strict=True)
        )

    def widen(self, batch: Batch) -> None:
        """Add a batch that was accepted."""
        numbers = _whole_numbers(batch)
        found = [_bounds(t) for t in numbers]
        seen = self._seen.setdefault(tuple(t.shape[1:] for t in numbers), found)
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
    """Return (4, columns): −least and largest of those ≥ 0, −least and largest of those < 0."""
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
    """Return why nothing can be compiled under these settings, or None."""
    if backend not in (AUTO, "vmap"):
        return f"{backend} has no compiled form; auto and vmap have"
    if rows == "token":
        return "rows of tokens have no compiled form"
    if coupling == "own-loss":
        return "own losses need one joint forward pass"
    if randomness == "fixed":
        return "fixed random numbers are drawn one call at a time"
    if verify == "always":
        return "to prove every batch takes the uncompiled way"
    return None


class Compiled:
    """A backend that answers by compiled programs where it has them, else by the plain one.

    `notes` takes what was done and why. With `faster`, only programs are kept that are measured to
    be so, where there is time to gain; with `check`, their first answers are compared.
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
        self._able, self._took = True, 0.0  # seconds that it took to compile the last program
        self._tolerance = _TOLERANCES.get(problem.dtype, 1e-8)
        self._programs: dict[Key, Program | None] = {}
        self._met: Counter[Key] = Counter()
        self._ranges = Ranges()

    def __call__(self, batch: Batch, request: Request = ROWS, /) -> Evaluation:
        """Evaluate a batch by its program, if it has one."""
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
            except Exception as error:  # whatever torch raises where a program does not serve
                if is_machine_error(error):
                    raise
                self._programs[key] = None
                why = str(error) if isinstance(error, NotCompiledError) else first_line(error)
                self._notes.append(f"no longer compiled: {why}")
        right = self._plain(batch, request)
        self._ranges.widen(batch)
        self._met[key] += 1
        # a batch of a second shape may be the last of its data: wait until another of it comes
        another = any(met == key[0] and shape != key[1] for met, shape in self._met)
        waits = another and self._met[key] < _COMES_AGAIN
        if not waits and key not in self._programs and len(self._programs) < _PROGRAMS:
            self._programs[key] = None
            if self._pays(batch, request):
                self._programs[key] = self._made(batch, request, right)
        return right

    @property
    def in_use(self) -> bool:
        """Whether there is a program."""
        return any(program is not None for program in self._programs.values())

    def forget(self) -> None:
        """Let go of all programs."""
        self._programs.clear()
        self._met.clear()

    def require_equal(self, found: Evaluation, right: Evaluation, request: Request) -> None:
        """Hold a program's answer against the plain one; where they differ, use none any more."""
        off = distance(found, right, request, tuple(found.states))
        if not off <= self._tolerance:
            self._able = False
            self.forget()
            raise CertificateError(
                f"the compiled program is off by {off:.1e}",
                remedy="Leave `compile` out.",
            )

    def _pays(self, batch: Batch, request: Request) -> bool:
        """Whether what is left to do is long enough, so that compiling may shorten it."""
        left = None if request.left is None else request.left - 1
        if left is None or (left and not self._faster):
            return True
        seconds = left * self._seconds(self._plain, batch, request) if left else 0.0
        cost = self._took or _FIXED + _EACH * len(self._problem.parameters)
        if seconds * _GAIN >= cost:
            return True
        self._notes.append(
            f"not compiled: about {seconds:.2g} s are left to do, and compiling takes about "
            f"{cost:.0f} s"
        )
        return False

    def _made(self, batch: Batch, request: Request, right: Evaluation) -> Program | None:
        """Compile; return the program unless it is wrong, or slower where that counts."""
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
                self._notes.append(f"not compiled: the program is off by {off:.1e}")
                return None
            said += f", equal to what is proved to {off:.0e}"
        self._notes += [f"{key}: not compiled: {why}" for key, why in program.outside.items()]
        if not self._faster:
            self._notes.append(said)
            return program
        seconds = [
            [self._seconds(way, batch, request) for way in (self._plain, program)]
            for _ in range(_REPEATS)  # in turns
        ]
        before, after = map(min, zip(*seconds, strict=True))
        kept = "is kept" if after < before else "is not kept"
        self._notes.append(
            f"{said}; it {kept}: {after * 1e3:.3g} ms a batch, uncompiled {before * 1e3:.3g} ms"
        )
        return program if after < before else None

    def _seconds(self, way: Callable[[Batch], Evaluation], batch: Batch, request: Request) -> float:
        """Return how long it takes to get all that is requested."""

        def run() -> None:
            found = way(batch)
            _ = found.gradients.squared_norms
            keys = [key for key in request.keys if key not in found.states]
            request.starts(keys, found.gradients)
            if request.rows:
                found.gradients.dense(request.out)

        return timed(run, self._problem.device, self._clock)[0]


def distance(found: Evaluation, right: Evaluation, request: Request, keys: Sequence[str]) -> float:
    """Return the largest relative error of a program's answer; NaN where it cannot be known.

    Entries are measured together: a single activation at its kink may fall on either side.
    """
    errors = torch.tensor(list(_errors(found, right, request, keys)), dtype=torch.float64)
    return float(errors.max())  # a NaN is the largest


def _errors(
    found: Evaluation, right: Evaluation, request: Request, keys: Sequence[str]
) -> Iterator[float]:
    finite = right.losses.isfinite() & right.gradients.norms.isfinite()
    yield _relative(found.losses[finite], right.losses[finite])
    size = float(right.gradients.norms[finite].norm())
    for name, theirs in right.gradients.squared_norms.items():
        ours = found.gradients.squared_norms[name]
        yield _relative(ours[finite].sqrt(), theirs[finite].sqrt(), size)
    if bool(finite.all()) and keys:  # what is not finite is left out of every sum
        for key, state in request.starts(keys, right.gradients).items():
            own = found.states.get(key, {})
            yield 0.0 if own.keys() == state.keys() else nan
            kinds: dict[str, float] = {}  # the size of all that is called "sum:", for example
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
    """Return ‖ours − theirs‖ relative to ‖theirs‖, or to a share of the whole it is part of."""
    if ours.shape != theirs.shape:
        return nan
    gap = _size(doubled(ours) - doubled(theirs))
    scale = max(_size(theirs), _NEGLIGIBLE * whole)
    return gap / scale if scale else gap


def _size(t: Tensor) -> float:
    return float(doubled(t).norm())
