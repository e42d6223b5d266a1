"""Gradient and reduction as one program, compiled by `torch.compile` for batches of one shape.

The program is `vmap` of one sample's gradient, followed by all that is requested: norms, and the
states with which reducers start. `torch.compile` fuses them, so that what only a sum is wanted of
need not be written.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradscope.backends.base import Evaluate, Request, Starts, require_unhooked
from gradscope.backends.vmap import per_sample, untouched
from gradscope.blocks import Block, DenseBlock, Evaluation, Gradients
from gradscope.blocks.base import precise, squares
from gradscope.core.batch import Batch, map_tensors, tensors
from gradscope.core.locate import first_line
from gradscope.core.problem import Problem
from gradscope.errors import UnsupportedError

T = TypeVar("T")

_NOWHERE: Any = object()  # a draw of random numbers by a sample's position does not find it
_COLUMNS = 64  # entries of a sample that are looked at one by one: they may be different things
_LARGEST = torch.iinfo(torch.int64).max


class NotCompiledError(Exception):
    """A function cannot be compiled, or does not serve any more; it says why."""


def compiled(fn: FunctionType, *arguments: Any) -> Callable[..., Any]:
    """Return a function compiled for arguments such as these.

    It serves what it was compiled for: shapes, dtypes, the model's and the loss's own Python
    values, all of which torch guards. Where one of them is another, it raises `NotCompiledError`
    rather than compile again. Nothing is printed, and no process is left behind.

    Raises:
        NotCompiledError: It cannot be compiled.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.cpp_builder import get_cpp_compiler

    call = torch.compile(_copied(fn), fullgraph=True, dynamic=False)
    before = counters["stats"]["unique_graphs"]
    try:
        get_cpp_compiler()  # before minutes are spent on a graph
        with _quiet():
            call(*arguments)
    except Exception as error:  # whatever torch or the code that it traces raises
        raise NotCompiledError(first_line(error)) from error
    if counters["stats"]["unique_graphs"] == before:
        raise NotCompiledError("torch.compile is switched off")

    def serve(*arguments: Any) -> Any:
        with torch.compiler.set_stance("fail_on_recompile"):
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
    """Compile in this process alone, without warnings and log messages."""
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    loggers = [logging.getLogger(name) for name in ("torch", *names)]
    levels = [logger.level for logger in loggers]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(inductor.patch(compile_threads=1))
        # a hook that is attached later must be noticed
        stack.enter_context(dynamo.patch(skip_nnmodule_hook_guards=False, suppress_errors=False))
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


class Program:
    """A compiled program, for batches of the shape of one.

    Args:
        problem: What is evaluated.
        batch: Samples to compile it on.
        request: What it computes.
        plain: What evaluates a batch where more is asked for than the program computes.

    Attributes:
        keys: Of the reductions that are part of it.
        outside: {key: why not} of the others.

    Raises:
        NotCompiledError: It cannot be compiled.
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
                gradients, losses = per_sample(problem, values, batch)
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
        self._squared_norms, self._rows = squared_norms, rows
        self._found: Gradients | None = None

    def __getitem__(self, name: str) -> Block:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._squared_norms)

    def __len__(self) -> int:
        return len(self._squared_norms)

    @property
    def n(self) -> int:
        """The number of samples."""
        assert self.index is not None
        return len(self.index)

    @property
    def squared_norms(self) -> dict[str, Tensor]:
        """‖gᵢ‖² (n,) for each parameter."""
        return self._squared_norms

    def bounded(self) -> bool:
        """Whether the norms show that every gradient is finite."""
        return bool(self.norms.isfinite().all())

    def asked(self, powers: frozenset[int]) -> Gradients:
        """Return the gradients, told which sums over samples will be asked for."""
        return self._all.asked(powers)

    @property
    def _all(self) -> Gradients:
        if self._found is None:
            self._found = Gradients(dict(self._rows()), self.index)
        return self._found


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
        if power == 1:
            return precise(values).sum(0)
        wide = torch.complex128 if values.is_complex() else torch.float64
        return squares(values.to(wide)).sum(0)

    def asked(self, powers: frozenset[int]) -> "_Traced":
        """Return these: the compiler takes sums in one pass by itself."""
        return self

    def of(self, blocks: Any) -> "_Traced":
        """Return other blocks for the same samples."""
        return _Traced(blocks, self.index)


def shape_of(batch: Batch) -> tuple[Any, ...]:
    """Return what a program is compiled for: shapes, dtypes and devices."""
    found = tensors((batch.inputs, batch.targets))
    return tuple((tuple(t.shape), t.dtype, t.device) for t in found)


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
    try:
        with _quiet():
            torch.compile(own, fullgraph=True, dynamic=False, backend="eager")(rows)
    except Exception as error:  # whatever torch or the code that it traces raises
        raise NotCompiledError(first_line(error)) from error


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
