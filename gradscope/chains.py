"""Chains: transforms of each sample, a reducer over samples, transforms of the aggregate.

`clip:max_norm=1 | mean` is E[T(g)]; `mean | clip:max_norm=1` is T(E[g]). After a reducer the
aggregate is treated as a batch of one, so the same transforms serve on both sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from gradscope.blocks import DenseBlock, Gradients
from gradscope.core.grammar import Stage, parse
from gradscope.core.registry import suggestion
from gradscope.reducers import Reducer, State, reducers
from gradscope.transforms import Transform, transforms


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
    before: tuple[Transform, ...]
    reducer: Reducer | None
    after: tuple[Transform, ...]

    def rows(self, gradients: Gradients) -> Gradients:
        """Transform each sample."""
        return reduce(lambda g, stage: stage(g), self.before, gradients)

    def update(self, state: State | None, gradients: Gradients) -> State:
        """Add a batch of raw gradients to the reducer's state (None: nothing seen yet)."""
        assert self.reducer is not None
        batch = self.reducer.start(self.rows(gradients))
        return batch if state is None else self.reducer.merge(state, batch)

    def result(self, state: State) -> dict[str, Tensor]:
        """Return {name: (*shape)}: the reducer's result after the transforms that follow it."""
        assert self.reducer is not None
        return self.finish(self.reducer.result(state))

    def finish(self, aggregate: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply the transforms after the reducer to {name: (*shape)}."""
        one = Gradients({name: DenseBlock(value[None]) for name, value in aggregate.items()})
        done = reduce(lambda g, stage: stage(g), self.after, one)
        return {name: block.dense()[0] for name, block in done.items()}


def bind(text: str, *, reduced: bool = False) -> Chain:
    """Parse a chain and bind every name and argument in it.

    Args:
        text: For example "clip:max_norm=1 | mean".
        reduced: Append `mean` when the chain has no reducer.

    Raises:
        SpecError: A name is unknown, an argument does not fit, or a second reducer follows.
    """
    stages = parse(text)
    at = [k for k, stage in enumerate(stages) if _kind(stage) is reducers]
    if len(at) > 1:
        raise stages[at[1]].error(
            "a second reducer has no samples left to reduce", "Keep one reducer a chain."
        )
    if not at and reduced:
        stages, at = (*stages, Stage("mean")), [len(stages)]
    cut = at[0] if at else len(stages)
    return Chain(
        text=" | ".join(map(str, stages)),
        before=tuple(s.bind(transforms.get(s.name)) for s in stages[:cut]),
        reducer=stages[cut].bind(reducers.get(stages[cut].name)) if at else None,
        after=tuple(s.bind(transforms.get(s.name)) for s in stages[cut + 1 :]),
    )


def _kind(stage: Stage) -> object:
    for registry in (transforms, reducers):
        if stage.name in registry:
            return registry
    known = [*transforms.names(), *reducers.names()]
    raise stage.error(f"unknown transform or reducer {stage.name!r}", suggestion(stage.name, known))
