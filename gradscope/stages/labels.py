"""Which labels the losses are held against: the data's, drawn ones, or all of them.

- `data`: the targets as they are; `square | mean` is the diagonal of the empirical Fisher.
- `sampled`: one draw from the model's own predictive distribution: the Fisher by Monte Carlo. The
  random numbers depend on the seed and the sample's index only.
- `exact`: the expectation over all classes, E_{y ~ p(y|x)} T(∇L(x, y)), in every sample's place:
  `square | mean` is the diagonal of the exact Fisher. A sample costs as many gradients as there
  are classes. An expectation over labels goes through T(g) only in a linear reducer: mean, sum, or
  none (Kunstner et al. 2019, arXiv:1905.12558; Martens 2020, arXiv:1412.1193).
  A sample of several positions needs one gradient for each position and class, for what is linear
  or quadratic in g. So does a squared error (`positions`).

The weights p are no function of the parameters here: no gradient goes through them.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import ExpectedBlock, Gradients
from gradscope.core.batch import Batch, map_tensors, output, tensors
from gradscope.core.texts import count
from gradscope.errors import ModelError, SpecError
from gradscope.model.problem import BoundLoss, Gaussian, Loss, Predictive, Problem
from gradscope.stages import positions
from gradscope.stages.chain import Chain
from gradscope.stages.losses import losses, options
from gradscope.stages.reducers.base import State, reducers
from gradscope.stages.transforms.base import NeedsProblem, Transform, transforms

Mode = Literal["data", "sampled", "exact"]

LINEAR = ("mean", "sum", "second_moment")  # second_moment is square | mean
QUADRATIC = ("kfac", "ekfac")  # read raw gradients and their weights
_HOMOGENEOUS = {"adam", "dot", "identity", "precondition", "project", "scale"}  # linear in g


class PositionWeights(NamedTuple):
    """What the rows of a sample weigh where they are not its labels, but positions of these."""

    linear: Tensor  # (samples, c), in an expectation of what is linear in g
    losses: Tensor  # (samples, c), in that of the loss
    labels: str  # why not all labels are gone through


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """Each sample once a class, the classes of a sample next to each other."""

    # (samples, c), the probabilities of the classes; if they are split, the weights of what is
    # quadratic in g
    weights: Tensor
    split: PositionWeights | None = None


class Labels:
    """The labels of a scope, bound to its model and loss.

    With `own_loss` samples are coupled, so that none may be repeated in its batch.
    """

    def __init__(self, mode: Mode, problem: Problem, seed: int, *, own_loss: bool) -> None:
        require(mode, problem.loss)
        if mode == "exact" and own_loss:
            raise SpecError(
                "exact labels repeat each sample for every class, which changes what coupled "
                "samples see of each other",
                where="labels exact",
                remedy='Use labels="sampled".',
            )
        self.mode: Mode = mode
        self.note = ""  # says how norms are defined where that is special
        self._problem, self._seed = problem, seed
        self._last: tuple[Batch, Batch] | None = None
        self._outputs: Tensor | None = None  # of the last one

    def of(self, batch: Batch) -> Batch:
        """Return the batch against the labels; asked again for the last one, it is the same."""
        if self.mode == "data":
            return batch
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self._labelled(batch)
        return self._last[1]

    def outputs(self, batch: Batch) -> Tensor | None:
        """Return the outputs that a batch's labels were drawn from; None for the data's labels."""
        self.of(batch)
        return self._outputs

    def chain(self, chain: Chain) -> Chain:
        """Return what a chain becomes under these labels.

        With all labels their expectation comes last before the reducer, so that every transform
        sees single labels.
        """
        if self.mode != "exact":
            return chain
        before, reducer, name = chain.before, chain.reducer, _linear_reducer(chain)
        if name == "kfac":
            assert reducer is not None
            start = partial(self._of_same_positions, reducer.start)
            return replace(chain, reducer=reducer._replace(start=start))
        if name in QUADRATIC:
            return chain
        if name == "second_moment":
            before, reducer = (*before, transforms.get("square")()), reducers.get("mean")()
        last = NeedsProblem(partial(_expectation, chain.text, _degree(chain)))
        return replace(chain, before=(*before, last), reducer=reducer)

    def _of_same_positions(self, start: Callable[[Gradients], State], rows: Gradients) -> State:
        """Start `kfac`, or refuse rows of a sample that are from different positions of it."""
        labelled = None if self._last is None else self._last[1]
        split = labelled.split if isinstance(labelled, LabelledBatch) else None
        if (
            split is not None
            and isinstance(labelled, LabelledBatch)
            and labelled.weights.shape[1] > 1
        ):
            raise SpecError(
                f"{split.labels}, and Kronecker factors with exact labels need one position a "
                "sample",
                where="labels exact: kfac",
                remedy='Use labels="sampled".',
            )
        return start(rows)

    def each(self, batch: Batch) -> int:
        """Return how many gradients a sample costs."""
        return len(self._labelled(batch.one(0))) if self.mode == "exact" else 1

    def require_one(self) -> None:
        """Refuse exact labels, with which a sample has one gradient for each class."""
        if self.mode == "exact":
            raise SpecError(
                "with exact labels a sample has one gradient for each class",
                where="labels exact",
                remedy='Ask for an expectation such as "square | mean", or use labels="sampled".',
            )

    def _labelled(self, batch: Batch) -> Batch:
        """Return the batch against drawn labels, or expanded to all.

        Its own targets say at most which entries are ignored.
        """
        loss = self._problem.loss
        assert isinstance(loss, BoundLoss)  # `require` has let it through
        found, n = loss.predictive, len(batch)
        seen: list[Any] = []

        def keep(answer: Any, targets: Any) -> Tensor:
            seen.append(map_tensors(Tensor.detach, answer))
            return torch.zeros(next((len(t) for t in tensors((targets, answer)) if t.dim()), n))

        replace(self._problem, loss=keep).losses(batch)  # random numbers may need passes before it
        answer = seen[-1]
        outputs = output(answer)
        if isinstance(found, Gaussian):
            self._outputs = outputs = _checked(outputs, n)
            if self.mode == "sampled":
                noise = _normal(outputs.shape[1:], batch.index, self._seed).to(outputs)
                return replace(batch, targets=outputs + found.std * noise)
            entries = positions.required(positions.residuals(loss, outputs), loss)
            return self._split(batch, entries, "the labels of a squared error are infinitely many")
        assert found is not None
        p = _probabilities(found, outputs, n).cpu()
        self._outputs = outputs
        if self.mode == "sampled":
            drawn = _drawn(p, batch.index, self._seed).to(outputs.device)
            return replace(batch, targets=found.targets(drawn, batch.targets, options(loss)))
        *places, classes = p.shape[1:]
        if prod(places) != 1:
            rows = positions.classes(loss, found, answer, p, batch.targets)
            many = f"{prod(places)} positions have {classes}^{prod(places)} labels"
            return self._split(batch, positions.required(rows, loss), many)
        many_labels = batch.select(torch.arange(n).repeat_interleave(classes))
        every = torch.arange(classes, device=outputs.device).repeat(n)
        every = every.reshape(n * classes, *places)
        targets = found.targets(every, many_labels.targets, options(loss))
        weights = p.reshape(n, classes).to(outputs.device)
        return LabelledBatch(many_labels.inputs, targets, many_labels.index, weights)

    def _split(self, batch: Batch, rows: positions.LabelRows, labels: str) -> LabelledBatch:
        """Return the batch once a row of each sample."""
        self.note = (
            f"labels exact: {labels}; what is linear or quadratic in the gradient has its "
            "expectation from one gradient for each position and class, and norms of samples are "
            "√E‖g‖²"
        )
        n, r = rows.squares.shape
        many = batch.select(torch.arange(n).repeat_interleave(r))
        split = PositionWeights(rows.linear, rows.losses, labels)
        return LabelledBatch(many.inputs, rows.targets, many.index, rows.squares, split)


def require(mode: Mode, loss: Loss, chains: Iterable[Chain] = ()) -> None:
    """Refuse a loss without predictive distribution, and chains without expectation over labels."""
    if mode == "data":
        return
    if _predictive(loss) is None:
        name = getattr(loss, "__name__", type(loss).__name__)
        known = [name for name in losses.names() if _predictive(losses.get(name)) is not None]
        raise SpecError(
            f"the loss {name!r} defines no distribution that labels could be drawn from",
            where=f"labels {mode}",
            remedy=f'Losses that do: {", ".join(known)}. Or use labels="data".',
        )
    if mode == "exact":
        for chain in chains:
            _linear_reducer(chain)


def mean_loss(losses: Tensor, batch: Batch) -> Tensor:
    """Return the expectation (samples,) of losses (n,) over a batch's labels."""
    if not isinstance(batch, LabelledBatch):
        return losses
    return _weighted(losses, batch.weights if batch.split is None else batch.split.losses)


def mean_norm(norms: Tensor, batch: Batch) -> Tensor:
    """Return the expectation (samples,) of norms (n,) over a batch's labels.

    Where the rows are positions of labels it is √E‖g‖², which they tell.
    """
    if not isinstance(batch, LabelledBatch):
        return norms
    if batch.split is not None:
        return _weighted(norms.square(), batch.weights).sqrt()
    return _weighted(norms, batch.weights)


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    return (values.reshape(weights.shape) * weights.to(values.dtype)).sum(1)


def samples(batch: Batch) -> int:
    """Return how many samples a batch has, however many labels each of them has."""
    return len(batch.weights) if isinstance(batch, LabelledBatch) else len(batch)


def over_labels(mask: Tensor, batch: Batch) -> Tensor:
    """Return the mask (n·c,) of a batch, false for every label of a sample where one is false."""
    if not isinstance(batch, LabelledBatch):
        return mask
    classes = batch.weights.shape[1]
    return mask.reshape(-1, classes).all(1).repeat_interleave(classes)


def chosen(batch: Batch, mask: Tensor) -> Batch:
    """Return the samples of a mask (n,) that keeps the labels of a sample together."""
    part = batch.select(mask)
    if not isinstance(batch, LabelledBatch):
        return part
    kept = mask.reshape(-1, batch.weights.shape[1])[:, 0].to(batch.weights.device)
    split = batch.split
    if split is not None:
        split = PositionWeights(split.linear[kept], split.losses[kept], split.labels)
    return LabelledBatch(part.inputs, part.targets, part.index, batch.weights[kept], split)


def _predictive(loss: Loss) -> Predictive | Gaussian | None:
    return loss.predictive if isinstance(loss, BoundLoss) else None


def _checked(outputs: Any, n: int) -> Tensor:
    """Return the outputs of n samples, from which labels are drawn."""
    of_samples = isinstance(outputs, Tensor) and outputs.shape[:1] == (n,)
    if of_samples and outputs.is_floating_point():
        found: Tensor = outputs
        return found
    told = f"{tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ModelError(
        f"no labels can be drawn from what the model returns for {count(n, 'sample')}: {told}",
        where="labels",
        remedy="It must be outputs as the loss takes them, the sample axis first.",
    )


def _probabilities(found: Predictive, outputs: Any, n: int) -> Tensor:
    """Return what the outputs of n samples say of labels (n, *positions, c)."""
    try:
        return found.probabilities(_checked(outputs, n))
    except IndexError:  # there is no axis of classes
        return _checked(outputs, -1)


def _drawn(probabilities: Tensor, index: Tensor, seed: int) -> Tensor:
    """Return classes (n, *positions) by inverting the distribution functions (n, *positions, c).

    The random numbers belong to a sample, whatever batch it is in.
    """
    rows = [generator.random(probabilities.shape[1:-1]) for generator in _generators(index, seed)]
    below = probabilities.cumsum(-1)
    wanted = torch.from_numpy(np.stack(rows)).unsqueeze(-1) * below[..., -1:]
    return (below <= wanted).sum(-1).clamp(max=probabilities.shape[-1] - 1)


def _normal(shape: tuple[int, ...], index: Tensor, seed: int) -> Tensor:
    """Return standard normal numbers (n, *shape) in float64, each sample's its own."""
    rows = [np.asarray(g.standard_normal(shape)) for g in _generators(index, seed)]
    return torch.from_numpy(np.stack(rows))


def _generators(index: Tensor, seed: int) -> Iterator[np.random.Generator]:
    """Yield the random numbers of each sample."""
    for i in index:
        digest = hashlib.sha256(f"labels {seed} {int(i)}".encode()).digest()
        yield np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)))


def _expectation(text: str, degree: int | None, problem: Problem, batch: Batch) -> Transform:
    assert isinstance(batch, LabelledBatch)
    weights, split = batch.weights, batch.split
    if split is not None:
        if degree is None:
            raise SpecError(
                f"{split.labels}, and the chain is neither linear nor quadratic in the gradient",
                where=f"labels exact: {text}",
                remedy="Use second_moment, square | mean or norm | second_moment, after no stages "
                f"but {', '.join(sorted(_HOMOGENEOUS))}; or use labels sampled.",
            )
        weights = split.linear if degree == 1 else weights

    def apply(gradients: Gradients) -> Gradients:
        blocks = {name: ExpectedBlock(block, weights) for name, block in gradients.items()}
        index = gradients.index
        return Gradients(blocks, None if index is None else index[:: weights.shape[1]])

    return apply


def _degree(chain: Chain) -> int | None:
    """Return 1 where a chain's rows are linear in g, 2 where they are quadratic, else None."""
    before = list(chain.stages[: len(chain.before)])
    names = [stage.name for stage in before]
    squared = _linear_reducer(chain) == "second_moment"
    if names[-1:] == ["square"] and not squared:
        names, before, squared = names[:-1], before[:-1], True
    if squared and names[-1:] == ["norm"] and float(before[-1].arguments.get("p", 2)) == 2:
        names, before = names[:-1], before[:-1]
    steps = any(stage.arguments.get("form") == "step" for stage in before)  # of adam
    return None if steps or not set(names) <= _HOMOGENEOUS else 2 if squared else 1


def _linear_reducer(chain: Chain) -> str | None:
    """Return the name of a chain's reducer, if it has one, and refuse one of another kind."""
    if chain.reducer is None:
        return None
    stage = next((stage for stage in chain.stages if stage.name in reducers), None)
    name = stage.name if stage is not None else "a reducer of your own"
    if name not in (*LINEAR, *QUADRATIC):
        raise SpecError(
            f"{name!r} has no expectation over labels: it is not linear in T(g)",
            where=f"labels exact: {chain.text}",
            remedy=f"Reducers that go with exact labels: {', '.join((*LINEAR, *QUADRATIC))}, "
            "or none.",
        )
    return name
