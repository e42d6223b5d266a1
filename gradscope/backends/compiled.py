"""Gradient and reduction as one program, compiled.

The program is `vmap` of one sample's gradient, followed by all that is wanted of the gradients:
norms, and the states with which reducers start. `torch.compile` fuses them, so that what only a sum
is wanted of need not be written. It serves batches of one shape; what cannot be traced is left to
the uncompiled way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradscope.backends.base import Evaluate, require_unhooked
from gradscope.backends.compilation import NotCompiledError, compiled, traced
from gradscope.backends.vmap import per_sample, untouched
from gradscope.blocks import Block, DenseBlock, Evaluation, Gradients
from gradscope.blocks.base import precise, squares
from gradscope.core.batch import Batch, map_tensors, tensors
from gradscope.core.problem import Problem
from gradscope.errors import UnsupportedError

_NOWHERE: Any = object()  # whoever draws random numbers by a sample's position does not find it

State = dict[str, Tensor]
Starts = Callable[[Sequence[str], Gradients], dict[str, State]]


def _nothing(keys: Sequence[str], gradients: Gradients) -> dict[str, State]:
    return {}


@dataclass(frozen=True)
class Wanted:
    """What will be asked of a batch's gradients, beside their norms.

    Attributes:
        rows: The gradients themselves.
        keys: Of the reductions.
        starts: Takes keys and gradients; returns the state of each reduction after this batch.
        out: What the gradients will be written into, if that is known.
    """

    rows: bool = True
    keys: tuple[str, ...] = ()
    starts: Starts = _nothing
    out: Mapping[str, Tensor] | None = None

    @property
    def key(self) -> tuple[bool, tuple[str, ...]]:
        """What one program can serve."""
        return self.rows, self.keys


class Computed(Gradients):
    """Gradients of which a program has computed what was wanted; the rest is computed when asked.

    Args:
        index: (n,), the samples' positions in their data set.
        squared_norms: {name: (n,)}.
        states: {key: state}.
        rows: Returns the gradients.
    """

    def __init__(
        self,
        index: Tensor,
        squared_norms: dict[str, Tensor],
        states: dict[str, State],
        rows: Callable[[], Gradients],
    ) -> None:
        super().__init__({}, index)
        self._squared_norms, self._states, self._rows = squared_norms, states, rows
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

    @property
    def states(self) -> tuple[str, ...]:
        """The keys of the reductions that the program has computed."""
        return tuple(self._states)

    def computed(self, key: str | None) -> State | None:
        """Return the state of a reduction, if the program has computed it."""
        return None if key is None else self._states.get(key)

    def asked(self, powers: frozenset[int]) -> Gradients:
        """Return the gradients, told which sums over samples will be asked for."""
        return self._all.asked(powers)

    @property
    def _all(self) -> Gradients:
        if self._found is None:
            self._found = Gradients(dict(self._rows()), self.index)
        return self._found


class Program:
    """A compiled program, for batches of the shape of one.

    Args:
        problem: What is evaluated.
        batch: Samples to compile it on.
        wanted: What it computes.
        plain: What evaluates a batch where more is asked for than the program computes.

    Attributes:
        keys: Of the reductions that are part of it.
        outside: {key: why not} of the others.
        rows: Whether it returns the gradients.

    Raises:
        NotCompiledError: It cannot be compiled.
    """

    def __init__(self, problem: Problem, batch: Batch, wanted: Wanted, plain: Evaluate) -> None:
        try:
            require_unhooked("a compiled program", problem)
        except UnsupportedError as error:
            raise NotCompiledError(error.what) from error
        self._problem, self._plain = problem, plain
        self.outside: dict[str, str] = {}
        for key in wanted.keys:
            try:
                _require_traceable(problem, wanted.starts, key)
            except NotCompiledError as error:
                self.outside[key] = str(error)
        self.keys = tuple(key for key in wanted.keys if key not in self.outside)
        self.rows = wanted.rows or bool(self.outside)
        keys, rows, starts = self.keys, self.rows, wanted.starts

        def program(values: dict[str, Tensor], batch: Batch) -> Any:
            # kernels of fused attention would be called sample by sample
            with sdpa_kernel(SDPBackend.MATH):
                gradients, losses = per_sample(problem, values, batch)
            blocks = _Traced({name: DenseBlock(g) for name, g in gradients.items()}, _NOWHERE)
            states = starts(keys, blocks) if keys else {}
            return losses, blocks.squared_norms, states, gradients if rows else {}

        with problem.state.kept(), untouched(), torch.no_grad():
            self._serve = compiled(program, *self._arguments(batch))

    def __call__(self, batch: Batch) -> Evaluation:
        """Evaluate a batch.

        Raises:
            NotCompiledError: The program does not serve for it.
        """
        with self._problem.state.kept(), untouched(), torch.no_grad():
            losses, squared_norms, states, gradients = self._serve(*self._arguments(batch))

        def rows() -> Gradients:
            if self.rows:
                return Gradients({name: DenseBlock(g) for name, g in gradients.items()})
            return self._plain(batch).gradients

        return Evaluation(losses, Computed(batch.index, squared_norms, states, rows))

    def _arguments(self, batch: Batch) -> tuple[dict[str, Tensor], Batch]:
        """Lay all tensors out alike: for another layout there would be another program."""
        inputs, targets = map_tensors(Tensor.contiguous, (batch.inputs, batch.targets))
        values = {name: p.detach() for name, p in self._problem.parameters.items()}
        return values, Batch(inputs, targets, batch.index.contiguous())


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
    """Trace a reduction by itself, without data.

    Raises:
        NotCompiledError: It reads values, or draws random numbers.
    """
    rows = {
        name: torch.empty(2, *p.shape, dtype=p.dtype, device="meta")
        for name, p in problem.parameters.items()
    }

    def reduction(rows: dict[str, Tensor]) -> Any:
        blocks = {name: DenseBlock(g) for name, g in rows.items()}
        return starts((key,), _Traced(blocks, _NOWHERE))

    traced(reduction, rows)
