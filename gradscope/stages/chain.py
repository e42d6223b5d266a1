"""A chain: transforms of each sample, then a reducer over samples, then transforms of the result.

`clip:max_norm=1 | mean` is E[T(g)]; `mean | clip:max_norm=1` is T(E[g]). The result of a reducer is
a batch of one, so the same transforms can be used before and after the reducer.

The transform `center` needs the mean of its inputs before it can act on a sample. The reducer
`ekfac` needs the result of an earlier reducer. In such cases `Chain.first_pass` returns the chain
that must be computed first, and `Chain.given` completes the chain with its result.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from gradscope.blocks import DenseBlock, Gradients
from gradscope.core.batch import Batch
from gradscope.core.grammar import Stage, StageFactory, parse
from gradscope.core.registry import suggestion
from gradscope.model.problem import Problem
from gradscope.stages import declared
from gradscope.stages.reducers.base import (
    Reducer,
    State,
    reducers,
)
from gradscope.stages.transforms.base import (
    KnowsModel,
    NeedsMean,
    NeedsProblem,
    ReadsNorms,
    TransformStep,
    transforms,
)


@dataclass(frozen=True, eq=False)
class Chain:
    """A bound chain."""

    stages: tuple[Stage, ...]  # names and arguments as the user wrote them
    before: tuple[TransformStep, ...]  # transforms of each sample
    reducer: Reducer | None  # takes the expectation over samples, or None (rows are kept)
    after: tuple[TransformStep, ...] = ()  # transforms of the aggregate
    lasting: bool = False  # the text alone defines the chain: it reads no file

    @cached_property
    def text(self) -> str:
        """The chain in its canonical spelling."""
        return " | ".join(map(str, self.stages))

    @property
    def key(self) -> str | None:
        """The key of the chain's sums: its text, or None if the text does not define the sums."""
        more = any(isinstance(step, NeedsMean | NeedsProblem) for step in self.before)
        sums = self.reducer is not None and self.reducer.additive and not self.reducer.raw
        return self.text if sums and self.lasting and not more else None

    @property
    def tells(self) -> bool:
        """Whether the chain's sums or norms show that a raw gradient is not finite."""
        norms = len(self.before) == 1 and isinstance(self.before[0], ReadsNorms)
        return bool(reducer_of(self).powers) and (not self.before or norms)

    @cached_property
    def transforms(self) -> tuple[str, ...]:
        """The text of the transforms before the reducer: chains with equal text share rows."""
        count = len(self.before)
        return (str(count), *map(str, self.stages[:count]))

    @property
    def first_pass(self) -> "Chain | None":
        """The chain whose result must be `given` before this one can run, or None."""
        for k, step in enumerate(self.before):
            if isinstance(step, NeedsMean):
                stages = (*self.stages[:k], Stage("mean"))
                return Chain(stages, self.before[:k], reducers.get("mean")())
        if self.reducer is None or self.reducer.earlier is None:
            return None
        earlier = self.reducer.earlier
        return Chain(
            (*self.stages[: len(self.before)], earlier.stage), self.before, earlier.reducer
        )

    def given(self, found: dict[str, Tensor], *, rehearsed: bool = False) -> "Chain":
        """Complete the first stage that waits for the result of `first_pass`.

        If `rehearsed`, only time and memory of the completed chain have to be right.
        """
        for k, step in enumerate(self.before):
            if isinstance(step, NeedsMean):
                completed = (*self.before[:k], step.given(found), *self.before[k + 1 :])
                return replace(self, before=completed)
        assert self.reducer is not None and self.reducer.earlier is not None
        earlier = self.reducer.earlier
        return replace(
            self, reducer=earlier.given(earlier.rehearsed(found) if rehearsed else found)
        )

    def prepare(self, problem: Problem) -> None:
        """Pass the shapes of all model parameters to the transforms that need them."""
        for step in (*self.before, *self.after):
            if isinstance(step, KnowsModel):
                step.know({k: tuple(p.shape) for k, p in problem.model.named_parameters()})

    def rows(
        self, gradients: Gradients, problem: Problem | None = None, batch: Batch | None = None
    ) -> Gradients:
        """Transform each sample of a batch of raw gradients.

        `problem` and `batch` are the source of the gradients; `hvp` evaluates them again.
        """
        return _applied(self.before, gradients, problem, batch)

    def start(
        self, gradients: Gradients, problem: Problem | None = None, batch: Batch | None = None
    ) -> State:
        """Return the reducer's state for a batch of raw gradients; see `rows`."""
        reducer = reducer_of(self)
        return reducer.start(self.rows(gradients, problem, batch).with_powers(reducer.powers))

    def result(self, state: State) -> dict[str, Tensor]:
        """Return {name: (*shape)}: the reducer's result after the transforms that follow it."""
        return self.finish(reducer_of(self).result({**state}))

    def finish(self, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply the transforms after the reducer to {name: (*shape)}."""
        if not self.after:
            return dict(aggregate)
        one = Gradients({name: DenseBlock(value[None]) for name, value in aggregate.items()})
        done = _applied(self.after, one)
        return {name: block.dense()[0] for name, block in done.items()}


def reducer_of(chain: Chain) -> Reducer:
    """Return the reducer of a chain that has a reducer."""
    assert chain.reducer is not None
    return chain.reducer


def _applied(
    steps: Iterable[TransformStep],
    gradients: Gradients,
    problem: Problem | None = None,
    batch: Batch | None = None,
) -> Gradients:
    for step in steps:
        if isinstance(step, NeedsProblem):
            assert problem is not None and batch is not None
            step = step.given(problem, batch)
        assert not isinstance(step, NeedsMean)  # first_pass comes first
        gradients = step(gradients)
    return gradients


@dataclass(frozen=True)
class Readers:
    """Functions that read the files named in a chain; stages open no files."""

    function: Callable[[str], Any]  # loads FILE.py:NAME
    arguments: Mapping[type, Callable[[str], Any]]  # the reader for each declared argument type


# names of stages in other libraries
_SYNONYMS = {
    "avg": "mean",
    "average": "mean",
    "total": "sum",
    "variance": "var",
    "stddev": "std",
    "l2": "norm",
    "norms": "norm",
    "clip_grad_norm": "clip",
    "clip_norm": "clip",
    "fisher": "second_moment",
}

StageFunction = Callable[..., Any]
Chained = str | StageFunction | Sequence[str | StageFunction]


def bind(chain: Chained, *, reduced: bool = False, readers: Readers | None = None) -> Chain:
    """Parse a chain and bind every name and argument in it.

    Args:
        chain: For example "clip:max_norm=1 | mean". Or a function that takes the rows
            {name: (n, *shape)}, returns such a dict, and treats each row separately. Or a list of
            both kinds: [function, "mean"].
        reduced: Append `mean` when the chain has no reducer.
        readers: Functions that read the files named in the chain.

    Raises:
        SpecError: A name is unknown, an argument does not fit, or a second reducer follows.
        InputError: A file that a stage names cannot be read.
    """
    pieces = [chain] if isinstance(chain, str) or callable(chain) else list(chain)
    written = [(stage, made) for piece in pieces for stage, made in _written(piece, readers)]
    stages = tuple(stage for stage, _ in written)
    before: list[TransformStep] = []
    after: list[TransformStep] = []
    reducer: Reducer | None = None
    for stage, made in written:
        if isinstance(made, Reducer):
            if reducer is not None:
                raise stage.error(
                    "a chain can have one reducer only: this second one has no samples to reduce",
                    "Remove one of the two reducers.",
                )
            if made.raw and before:
                raise stage.error(
                    f"{stage.name!r} needs raw gradients and cannot follow a transform",
                    "Remove the transforms before it.",
                )
            reducer = made
        elif reducer is None:
            before.append(made)
        elif isinstance(made, NeedsMean | NeedsProblem):
            raise stage.error(
                f"{stage.name!r} acts on samples and cannot follow a reducer",
                "Move it before the reducer.",
            )
        else:
            after.append(made)
    if reducer is None and reduced:
        stages, reducer = (*stages, Stage("mean")), reducers.get("mean")()
    files = any(".py:" in stage.name or stage.files or stage.of_function for stage in stages)
    waits = reducer is not None and reducer.earlier is not None
    lasting = not (files or waits or any(isinstance(step, NeedsMean) for step in before))
    return Chain(stages, tuple(before), reducer, tuple(after), lasting)


def _written(piece: str | StageFunction, readers: Readers | None) -> list[tuple[Stage, Any]]:
    """Return each stage of a piece of a chain with its transform or reducer."""
    if isinstance(piece, str):
        return [(stage, _made(stage, readers)) for stage in parse(piece)]
    name = getattr(piece, "__qualname__", type(piece).__name__)
    stage = Stage(f"{name} at {id(piece):#x}", of_function=True)
    if isinstance(piece, StageFactory):
        return [(stage, stage.bind(piece))]
    return [(stage, declared.of_rows(name, piece))]


def _made(stage: Stage, readers: Readers | None) -> TransformStep | Reducer:
    if readers is None and (stage.files or ".py:" in stage.name):
        raise stage.error(f"{stage.name!r} names a file, but this function reads no files")
    if readers is not None and ".py:" in stage.name:
        factory = readers.function(stage.name)
        if not isinstance(factory, StageFactory):
            raise stage.error(
                f"{stage.name!r} is not declared as a transform or a reducer",
                'Put @gradscope.transform("elementwise") above a function of a tensor '
                '("factor" above a function of norms, "vector" above a function of dense rows). '
                "Put @gradscope.reducer above a function that returns a reducer.",
            )
    elif stage.name in transforms:
        factory = transforms.get(stage.name)
    elif stage.name in reducers:
        factory = reducers.get(stage.name)
    else:
        known = [*transforms.names(), *reducers.names()]
        meant = _SYNONYMS.get(stage.name.lower())
        hint = f"Did you mean {meant!r}?" if meant else suggestion(stage.name, known)
        raise stage.error(f"unknown transform or reducer {stage.name!r}", hint)
    converters = {} if readers is None else readers.arguments
    made: TransformStep | Reducer = stage.bind(factory, converters)
    return made
