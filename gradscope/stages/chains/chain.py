"""A chain: what happens to each sample, how samples are reduced, what happens to the result.

`clip:max_norm=1 | mean` is E[T(g)]; `mean | clip:max_norm=1` is T(E[g]). After a reducer the
aggregate is treated as a batch of one, so the same transforms serve on both sides.

Some transforms need the mean of what reaches them before they can act on a sample (`center`). Such
a chain says which chain is to be computed first (`first_pass`) and is then completed with its
result (`given`).
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from gradscope.blocks import DenseBlock, Gradients
from gradscope.core.batch import Batch
from gradscope.core.grammar import parse
from gradscope.core.problem import Problem
from gradscope.stages.reducers import Reducer, State, carried_state, reducers
from gradscope.stages.reducers.base import added
from gradscope.stages.transforms import NeedsMean, NeedsProblem, Step


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
    def tells(self) -> bool:
        """Whether its sums, or the norms it reads, show that a raw gradient is not finite."""
        assert self.reducer is not None
        norms = len(self.before) == 1 and getattr(self.before[0], "reads_norms", False)
        return bool(self.reducer.powers) and (not self.before or norms)

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
        assert self.reducer is not None
        powers = self.reducer.powers
        start = self.reducer.start(self.rows(gradients, problem, batch).asked(powers))
        found = start if state is None else self.reducer.merge(state, start)
        return carried_state(found)

    def result(self, state: State) -> dict[str, Tensor]:
        """Return {name: (*shape)}: the reducer's result after the transforms that follow it."""
        assert self.reducer is not None
        return self.finish(self.reducer.result(state))

    def finish(self, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply the transforms after the reducer to {name: (*shape)}."""
        one = Gradients({name: DenseBlock(value[None]) for name, value in aggregate.items()})
        done = _applied(self.after, one) if self.after else one
        return {name: block.dense()[0] for name, block in done.items()}


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
