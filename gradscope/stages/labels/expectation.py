"""The expectation over all labels: every sample once a class, and back to one row a sample."""

from dataclasses import dataclass, replace

from torch import Tensor

from gradscope.blocks import ExpectedBlock, Gradients
from gradscope.core.batch import Batch
from gradscope.core.grammar import parse
from gradscope.core.problem import Problem
from gradscope.errors import SpecError
from gradscope.stages.chains import Chain
from gradscope.stages.reducers import reducers
from gradscope.stages.transforms import NeedsProblem, Transform, transforms

LINEAR = ("mean", "sum", "second_moment")  # second_moment is square | mean


@dataclass(frozen=True)
class Expanded(Batch):
    """Each sample once a class, the classes of a sample next to each other.

    Attributes:
        weights: (samples, c), the probabilities of the classes.
    """

    weights: Tensor


def chosen(batch: Batch, mask: Tensor) -> Batch:
    """Return the samples of a mask (n,) that keeps the labels of a sample together."""
    part = batch.select(mask)
    if not isinstance(batch, Expanded):
        return part
    kept = mask.reshape(-1, batch.weights.shape[1])[:, 0].to(batch.weights.device)
    return Expanded(part.inputs, part.targets, part.index, batch.weights[kept])


def samples(batch: Batch) -> int:
    """Return how many samples a batch has, however many labels each of them has."""
    return len(batch.weights) if isinstance(batch, Expanded) else len(batch)


def over_labels(mask: Tensor, batch: Batch) -> Tensor:
    """Return the mask (n·c,) of a batch, false for every label of a sample where one is false."""
    if not isinstance(batch, Expanded):
        return mask
    classes = batch.weights.shape[1]
    return mask.reshape(-1, classes).all(1).repeat_interleave(classes)


def expected(chain: Chain) -> Chain:
    """Return the chain that takes the expectation over an `Expanded` batch's labels.

    It is taken last before the reducer, so that every transform sees single labels.

    Raises:
        SpecError: The reducer is not linear in T(g).
    """
    before, reducer = chain.before, chain.reducer
    if linear_reducer(chain) == "second_moment":
        before, reducer = (*before, transforms.get("square")()), reducers.get("mean")()
    return replace(chain, before=(*before, _EXPECTATION), reducer=reducer)


def mean(values: Tensor, batch: Batch) -> Tensor:
    """Return the expectation (samples,) of values (n,) over a batch's labels."""
    if not isinstance(batch, Expanded):
        return values
    weights = batch.weights.to(values.dtype)
    return (values.reshape(weights.shape) * weights).sum(1)


def _expectation(problem: Problem, batch: Batch) -> Transform:
    assert isinstance(batch, Expanded)
    weights = batch.weights

    def apply(gradients: Gradients) -> Gradients:
        blocks = {name: ExpectedBlock(block, weights) for name, block in gradients.items()}
        index = gradients.index
        return Gradients(blocks, None if index is None else index[:: weights.shape[1]])

    return apply


_EXPECTATION = NeedsProblem(_expectation)


def linear_reducer(chain: Chain) -> str | None:
    """Return the name of a chain's reducer, if it is linear in T(g)."""
    stage = next((stage for stage in parse(chain.text) if stage.name in reducers), None)
    if chain.reducer is None:
        return None
    name = stage.name if stage is not None else "a reducer of your own"
    if name not in LINEAR:
        raise SpecError(
            f"{name!r} has no expectation over labels: it is not linear in T(g)",
            where=f"labels exact: {chain.text}",
            remedy=f"Reducers that go with exact labels: {', '.join(LINEAR)}, or none.",
        )
    return name
