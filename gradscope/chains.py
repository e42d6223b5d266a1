"""Chains: transforms of each sample, a reducer over samples, transforms of the aggregate.

`clip:max_norm=1 | mean` is E[T(g)]; `mean | clip:max_norm=1` is T(E[g]). After a reducer the
aggregate is treated as a batch of one, so the same transforms serve on both sides.

Some transforms need the mean of what reaches them before they can act on a sample (`center`). Such
a chain says which chain is to be computed first (`first_pass`) and is then completed with its
result (`given`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import DenseBlock, Gradients
from gradscope.core.batch import Batch
from gradscope.core.grammar import Stage, parse
from gradscope.core.problem import Problem
from gradscope.core.registry import suggestion
from gradscope.errors import SpecError
from gradscope.reducers import Reducer, State, reducers
from gradscope.reducers.declared import is_reducer
from gradscope.sources.code import load_function
from gradscope.storage import open_file
from gradscope.transforms import NeedsMean, NeedsProblem, Scope, Step, Vector, transforms


@dataclass(frozen=True)
class Chain:
    """A bound chain.

    Attributes:
        text: The chain in its canonical spelling.
        before: Transforms of each sample.
        reducer: What takes the expectation, or None when rows are kept.
        after: Transforms of the aggregate.
    """

    text: str
    before: tuple[Step, ...]
    reducer: Reducer | None
    after: tuple[Step, ...]

    @property
    def first_pass(self) -> "Chain | None":
        """The chain whose result must be `given` before this one can run, or None."""
        for k, step in enumerate(self.before):
            if isinstance(step, NeedsMean):
                words = map(str, parse(self.text)[:k])  # a quoted argument may hold a "|"
                text = " | ".join([*words, "mean"])
                return Chain(text, self.before[:k], reducers.get("mean")(), ())
        return None

    def given(self, mean: Mapping[str, Tensor]) -> "Chain":
        """Complete the first transform that waits for the mean of what reaches it."""
        k = next(k for k, step in enumerate(self.before) if isinstance(step, NeedsMean))
        step = self.before[k]
        assert isinstance(step, NeedsMean)
        completed = (*self.before[:k], step.given(mean), *self.before[k + 1 :])
        return replace(self, before=completed)

    def rows(
        self, gradients: Gradients, problem: Problem | None = None, batch: Batch | None = None
    ) -> Gradients:
        """Transform each sample of a batch.

        Args:
            gradients: Raw.
            problem: What they were computed from; some transforms evaluate it again.
            batch: The samples.
        """
        return _applied(self.before, gradients, problem, batch)

    def update(
        self,
        state: State | None,
        gradients: Gradients,
        problem: Problem | None = None,
        batch: Batch | None = None,
    ) -> State:
        """Add a batch of raw gradients to the reducer's state (None: nothing seen yet)."""
        assert self.reducer is not None
        start = self.reducer.start(self.rows(gradients, problem, batch))
        return start if state is None else self.reducer.merge(state, start)

    def result(self, state: State) -> dict[str, Tensor]:
        """Return {name: (*shape)}: the reducer's result after the transforms that follow it."""
        assert self.reducer is not None
        return self.finish(self.reducer.result(state))

    def finish(self, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply the transforms after the reducer to {name: (*shape)}."""
        one = Gradients({name: DenseBlock(value[None]) for name, value in aggregate.items()})
        done = _applied(self.after, one) if self.after else one
        return {name: block.dense()[0] for name, block in done.items()}


def bind(text: str, *, reduced: bool = False) -> Chain:
    """Parse a chain and bind every name and argument in it.

    Args:
        text: For example "clip:max_norm=1 | mean".
        reduced: Append `mean` when the chain has no reducer.

    Raises:
        SpecError: A name is unknown, an argument does not fit, or a second reducer follows.
        InputError: A file that a stage names cannot be read.
    """
    stages = parse(text)
    before: list[Step] = []
    after: list[Step] = []
    reducer: Reducer | None = None
    for stage in stages:
        made = _bound(stage)
        if isinstance(made, Reducer):
            if reducer is not None:
                raise stage.error(
                    "a second reducer has no samples left to reduce", "Keep one reducer a chain."
                )
            if made.raw and before:
                raise stage.error(
                    f"{stage.name!r} reads the factors of raw gradients",
                    "Put no transform before it.",
                )
            reducer = made
        elif reducer is None:
            before.append(made)
        elif isinstance(made, NeedsMean | NeedsProblem):
            raise stage.error(f"{stage.name!r} needs samples, and none are left after a reducer")
        else:
            after.append(made)
    if reducer is None and reduced:
        stages, reducer = (*stages, Stage("mean")), reducers.get("mean")()
    return Chain(" | ".join(map(str, stages)), tuple(before), reducer, tuple(after))


def waiting(chains: Iterable[Chain]) -> dict[str, Chain]:
    """Return the first passes that chains wait for, each once."""
    found = (chain.first_pass for chain in chains)
    return {chain.text: chain for chain in found if chain is not None}


def _applied(
    steps: Iterable[Step],
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


def _bound(stage: Stage) -> Step | Reducer:
    converters = {Vector: stored_vector}
    if ".py:" in stage.name:
        own = load_function(stage.name, "stage")
        if not (is_reducer(own) or isinstance(getattr(own, "scope", None), Scope)):
            raise stage.error(
                f"{stage.name!r} does not say what it is",
                'Put @gradscope.transform("elementwise") above a function of a tensor ("factor" '
                'for one of norms, "vector" for one of dense rows), or @gradscope.reducer above '
                "one that returns a reducer.",
            )
        made: Step | Reducer = stage.bind(own, converters)
        return made
    for registry in (transforms, reducers):
        factory = registry.find(stage.name)
        if factory is not None:
            return stage.bind(factory, converters)
    known = [*transforms.names(), *reducers.names()]
    raise stage.error(f"unknown transform or reducer {stage.name!r}", suggestion(stage.name, known))


def stored_vector(reference: str) -> Vector:
    """Read a stored aggregate.

    Args:
        reference: FILE.h5:CHAIN, where CHAIN is the chain's text or its number.

    Raises:
        ResultFileError: The file cannot be read.
        SpecError: It has no such reduced chain.
    """
    path, _, name = reference.rpartition(".h5:")
    if not path:
        raise ValueError(reference)
    with open_file(f"{path}.h5") as file:
        wanted = "".join(name.split())
        for k, chain in enumerate(file.chains):
            if chain.reduced and wanted in (str(k), "".join(chain.text.split())):
                values = {key: _tensor(array[:]) for key, array in chain.items()}
                return Vector(values, reference)
        known = [f"{k} ({c.text})" for k, c in enumerate(file.chains) if c.reduced]
    raise _no_such_chain(name, known)


def _tensor(array: np.ndarray) -> Tensor:
    wide = np.complex128 if np.iscomplexobj(array) else np.float64
    return torch.from_numpy(np.asarray(array, dtype=wide))


def _no_such_chain(name: str, known: list[str]) -> SpecError:
    return SpecError(
        f"there is no reduced chain {name!r} in the file",
        remedy=f"Reduced chains in it: {', '.join(known) or 'none'}.",
    )
