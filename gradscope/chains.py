"""Chains: transforms of each sample, a reducer over samples, transforms of the aggregate.

`clip:max_norm=1 | mean` is E[T(g)]; `mean | clip:max_norm=1` is T(E[g]). After a reducer the
aggregate is treated as a batch of one, so the same transforms serve on both sides.

Some transforms need the mean of what reaches them before they can act on a sample (`center`). Such
a chain says which chain is to be computed first (`first_pass`) and is then completed with its
result (`given`).
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gradscope.backends.compiled import Wanted
from gradscope.blocks import DenseBlock, Gradients
from gradscope.core.batch import Batch
from gradscope.core.grammar import Stage, parse
from gradscope.core.problem import Problem
from gradscope.core.registry import suggestion
from gradscope.errors import SpecError
from gradscope.reducers import Reducer, State, carried, reducers
from gradscope.reducers.base import added
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
        lasting: It is the same whenever its text is bound: it reads no file.
    """

    text: str
    before: tuple[Step, ...]
    reducer: Reducer | None
    after: tuple[Step, ...]
    lasting: bool = False

    @property
    def key(self) -> str | None:
        """What its sums are known by: its text, if that says what happens to the gradients."""
        more = any(isinstance(step, NeedsMean | NeedsProblem) for step in self.before)
        sums = self.reducer is not None and self.reducer.merge is added and not self.reducer.raw
        return self.text if sums and self.lasting and not more else None

    @property
    def way(self) -> tuple[str, ...]:
        """What happens to each sample, in words: chains of one way can share it."""
        words = map(str, parse(self.text))
        return (str(len(self.before)), *itertools.islice(words, len(self.before)))

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
        """Add a batch of raw gradients to the reducer's state (None: nothing seen yet).

        Sums are in float64, as they are stored.
        """
        (found,) = updated([self], [state], gradients, problem, batch)
        return {key: carried(value) for key, value in found.items()}

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
    whole = " | ".join(map(str, stages))
    files = any(".py:" in stage.name or "with" in stage.arguments for stage in stages)
    lasting = not files and not any(isinstance(step, NeedsMean) for step in before)
    return Chain(whole, tuple(before), reducer, tuple(after), lasting)


def updated(
    chains: Sequence[Chain],
    states: Sequence[State | None],
    gradients: Gradients,
    problem: Problem | None = None,
    batch: Batch | None = None,
) -> list[State]:
    """Add a batch of raw gradients to several chains' states; what chains share is done once.

    Args:
        chains: With reducers.
        states: As many (None: nothing seen yet).
        gradients: Raw.
        problem: What they were computed from.
        batch: The samples.
    """
    starts = [gradients.computed(chain.key) for chain in chains]
    missing = [chain for chain, start in zip(chains, starts, strict=True) if start is None]
    made = iter(_starts(missing, [chain.way for chain in missing], gradients, problem, batch))
    found = []
    for chain, state, start in zip(chains, states, starts, strict=True):
        assert chain.reducer is not None
        own = next(made) if start is None else start
        found.append(own if state is None else chain.reducer.merge(state, own))
    return found


def wanted(chains: Iterable[Chain]) -> Wanted:
    """Return what chains will ask of a batch, for a backend that can compute it along."""
    every = list(chains)
    known = {chain.key: chain for chain in every if chain.key is not None}
    ways = {key: chain.way for key, chain in known.items()}

    def starts(keys: Sequence[str], gradients: Gradients) -> dict[str, State]:
        found = _starts([known[k] for k in keys], [ways[k] for k in keys], gradients)
        return dict(zip(keys, found, strict=True))

    rows = any(chain.key is None for chain in every)
    return Wanted(rows, tuple(known), starts)


def _starts(
    chains: Sequence[Chain],
    ways: Sequence[tuple[str, ...]],
    gradients: Gradients,
    problem: Problem | None = None,
    batch: Batch | None = None,
) -> list[State]:
    """Return the states after one batch; chains of one way share what happens to each sample."""
    powers: dict[tuple[str, ...], frozenset[int]] = {}
    for chain, way in zip(chains, ways, strict=True):
        assert chain.reducer is not None
        powers[way] = powers.get(way, frozenset()) | chain.reducer.powers
    rows: dict[tuple[str, ...], Gradients] = {}
    found = []
    for chain, way in zip(chains, ways, strict=True):
        assert chain.reducer is not None
        if way not in rows:
            rows[way] = chain.rows(gradients, problem, batch).asked(powers[way])
        found.append(chain.reducer.start(rows[way]))
    return found


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
