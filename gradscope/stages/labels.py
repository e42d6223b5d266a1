"""The labels that losses are computed with: the data's labels, sampled labels, or all labels.

- `data`: the data's targets. `square | mean` is the diagonal of the empirical Fisher.
- `sampled`: one draw from the model's predictive distribution: the Fisher by Monte Carlo. The
  random numbers depend on the seed and the sample's index only.
- `exact`: for each sample, the expectation over all classes E_{y ~ p(y|x)} T(∇L(x, y)).
  `square | mean` is the diagonal of the exact Fisher. A sample costs one gradient for each class.
  The reducer must be linear in T(g), for example mean or sum, or be absent (Kunstner et al. 2019,
  arXiv:1905.12558; Martens 2020, arXiv:1412.1193). For several positions a sample, or a squared
  error, T must be linear or quadratic in g; module `positions` has the formulas.

The probabilities p are constants here: no gradient goes through them.
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

LINEAR = ("mean", "sum", "second_moment")  # second_moment equals square | mean
QUADRATIC = ("kfac", "ekfac")  # these reducers read raw gradients and their weights
_HOMOGENEOUS = {"adam", "dot", "identity", "precondition", "project", "scale"}  # linear in g


class PositionWeights(NamedTuple):
    """Weights of a sample's rows that each belong to a position and class, not to a label."""

    linear: Tensor  # (samples, c), weights for the expectation of a linear function of g
    losses: Tensor  # (samples, c), weights for the expectation of the loss
    labels: str  # the reason why the labels are not enumerated


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """A batch that repeats each sample for every class; a sample's classes are adjacent."""

    # (samples, c): the probabilities of the classes; with `split`, the weights for a quadratic
    # function of g
    weights: Tensor
    split: PositionWeights | None = None


class Labels:
    """The labels of a scope, bound to its model and loss.

    With `own_loss` samples are coupled, so a sample must not be repeated in its batch.
    """

    def __init__(self, mode: Mode, problem: Problem, seed: int, *, own_loss: bool) -> None:
        require(mode, problem.loss)
        if mode == "exact" and own_loss:
            raise SpecError(
                "labels exact cannot be combined with own-loss gradients: it repeats each sample "
                "for every class, which changes the losses of coupled samples",
                where="labels exact",
                remedy='Use labels="sampled".',
            )
        self.mode: Mode = mode
        self.note = ""  # the definition of norms, if they are not ‖g‖
        self._problem, self._seed = problem, seed
        self._last: tuple[Batch, Batch] | None = None
        self._outputs: Tensor | None = None  # the outputs of the last batch

    def of(self, batch: Batch) -> Batch:
        """Return the batch with its labels; the last batch is cached."""
        if self.mode == "data":
            return batch
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self._labelled(batch)
        return self._last[1]

    def outputs(self, batch: Batch) -> Tensor | None:
        """Return the outputs that define a batch's labels, or None for the data's labels."""
        self.of(batch)
        return self._outputs

    def chain(self, chain: Chain) -> Chain:
        """Return the chain to compute with these labels.

        With exact labels the expectation is inserted directly before the reducer, so each transform
        acts on the gradients of single labels.
        """
        if self.mode != "exact":
            return chain
        before, reducer, name = chain.before, chain.reducer, _linear_reducer(chain)
        if name == "kfac":
            assert reducer is not None and reducer.add is not None
            start, add = (partial(self._of_same_positions, f) for f in (reducer.start, reducer.add))
            return replace(chain, reducer=reducer._replace(start=start, add=add))
        if name in QUADRATIC:
            return chain
        if name == "second_moment":
            before, reducer = (*before, transforms.get("square")()), reducers.get("mean")()
        last = NeedsProblem(partial(_expectation, chain.text, _degree(chain)))
        return replace(chain, before=(*before, last), reducer=reducer)

    def _of_same_positions(
        self, start: Callable[..., State], rows: Gradients, *state: State
    ) -> State:
        """Start `kfac` or add to it, or raise if a sample's rows are of different positions."""
        labelled = None if self._last is None else self._last[1]
        split = labelled.split if isinstance(labelled, LabelledBatch) else None
        if (
            split is not None
            and isinstance(labelled, LabelledBatch)
            and labelled.weights.shape[1] > 1
        ):
            raise SpecError(
                f"{split.labels}, but kfac with exact labels needs samples with one position",
                where="labels exact: kfac",
                remedy='Use labels="sampled".',
            )
        return start(rows, *state)

    def each(self, batch: Batch) -> int:
        """Return the number of gradients to compute for a sample."""
        return len(self._labelled(batch.one(0))) if self.mode == "exact" else 1

    def require_one(self) -> None:
        """Raise for exact labels: a sample then has one gradient for each class."""
        if self.mode == "exact":
            raise SpecError(
                "with exact labels a sample has one gradient for each class, not a single gradient",
                where="labels exact",
                remedy='Ask for an expectation such as "square | mean", or use labels="sampled".',
            )

    def _labelled(self, batch: Batch) -> Batch:
        """Return the batch with sampled labels, or expanded to all labels.

        The data's targets are used only to find ignored entries.
        """
        loss = self._problem.loss
        assert isinstance(loss, BoundLoss)  # checked by `require`
        found, n = loss.predictive, len(batch)
        seen: list[Any] = []

        def keep(answer: Any, targets: Any) -> Tensor:
            seen.append(map_tensors(Tensor.detach, answer))
            return torch.zeros(next((len(t) for t in tensors((targets, answer)) if t.dim()), n))

        replace(self._problem, loss=keep).losses(batch)  # it may run several passes: use the last
        answer = seen[-1]
        outputs = output(answer)
        if isinstance(found, Gaussian):
            self._outputs = outputs = _checked(outputs, n)
            if self.mode == "sampled":
                noise = _normal(outputs.shape[1:], batch.index, self._seed).to(outputs)
                return replace(batch, targets=outputs + found.std * noise)
            entries = positions.required(positions.residuals(loss, outputs), loss)
            return self._split(batch, entries, "a squared error has infinitely many labels")
        assert found is not None
        p = _probabilities(found, outputs, n).cpu()
        self._outputs = outputs
        if self.mode == "sampled":
            drawn = _drawn(p, batch.index, self._seed).to(outputs.device)
            return replace(batch, targets=found.targets(drawn, batch.targets, options(loss)))
        *places, classes = p.shape[1:]
        if prod(places) != 1:
            rows = positions.classes(loss, found, answer, p, batch.targets)
            many = f"{prod(places)} positions have {classes}^{prod(places)} possible labels"
            return self._split(batch, positions.required(rows, loss), many)
        many_labels = batch.select(torch.arange(n).repeat_interleave(classes))
        every = torch.arange(classes, device=outputs.device).repeat(n)
        every = every.reshape(n * classes, *places)
        targets = found.targets(every, many_labels.targets, options(loss))
        weights = p.reshape(n, classes).to(outputs.device)
        return LabelledBatch(many_labels.inputs, targets, many_labels.index, weights)

    def _split(self, batch: Batch, rows: positions.LabelRows, labels: str) -> LabelledBatch:
        """Return the batch with each sample repeated for each of its rows."""
        self.note = (
            f"labels exact: {labels}. The expectations are computed from one gradient for each "
            "position and class. A sample's norm is √E‖g‖²"
        )
        n, r = rows.squares.shape
        many = batch.select(torch.arange(n).repeat_interleave(r))
        split = PositionWeights(rows.linear, rows.losses, labels)
        return LabelledBatch(many.inputs, rows.targets, many.index, rows.squares, split)


def require(mode: Mode, loss: Loss, chains: Iterable[Chain] = ()) -> None:
    """Raise if the loss has no predictive distribution, or a chain no expectation over labels."""
    if mode == "data":
        return
    if not _has_labels(loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        known = [name for name in losses.names() if _has_labels(losses.get(name))]
        raise SpecError(
            f"the loss {name!r} defines no distribution of labels",
            where=f"labels {mode}",
            remedy=f'Use one of the losses {", ".join(known)}; or use labels="data".',
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

    With `split` weights (a row for each position and class) the result is √E‖g‖² instead.
    """
    if not isinstance(batch, LabelledBatch):
        return norms
    if batch.split is not None:
        return _weighted(norms.square(), batch.weights).sqrt()
    return _weighted(norms, batch.weights)


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    return (values.reshape(weights.shape) * weights.to(values.dtype)).sum(1)


def samples(batch: Batch) -> int:
    """Return the number of samples in a batch; a sample with several labels counts once."""
    return len(batch.weights) if isinstance(batch, LabelledBatch) else len(batch)


def over_labels(mask: Tensor, batch: Batch) -> Tensor:
    """Return the mask (n·c,), set to false for all labels of a sample if any is false."""
    if not isinstance(batch, LabelledBatch):
        return mask
    classes = batch.weights.shape[1]
    return mask.reshape(-1, classes).all(1).repeat_interleave(classes)


def chosen(batch: Batch, mask: Tensor) -> Batch:
    """Return the samples selected by a mask (n,), which is equal for all labels of a sample."""
    part = batch.select(mask)
    if not isinstance(batch, LabelledBatch):
        return part
    kept = mask.reshape(-1, batch.weights.shape[1])[:, 0].to(batch.weights.device)
    split = batch.split
    if split is not None:
        split = PositionWeights(split.linear[kept], split.losses[kept], split.labels)
    return LabelledBatch(part.inputs, part.targets, part.index, batch.weights[kept], split)


def _has_labels(loss: Loss) -> bool:
    found = loss.predictive if isinstance(loss, BoundLoss) else None
    return found.of_loss if isinstance(found, Predictive) else found is not None


def _checked(outputs: Any, n: int) -> Tensor:
    """Return the outputs of n samples, or raise if labels cannot be sampled from them."""
    of_samples = isinstance(outputs, Tensor) and outputs.shape[:1] == (n,)
    if of_samples and outputs.is_floating_point():
        found: Tensor = outputs
        return found
    told = f"{tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ModelError(
        f"the model returns {told} for {count(n, 'sample')}: labels cannot be sampled from it",
        where="labels",
        remedy="Return a floating-point tensor (n, ...), the loss's outputs, sample axis first.",
    )


def _probabilities(found: Predictive, outputs: Any, n: int) -> Tensor:
    """Return the probabilities (n, *positions, c) of labels, from the outputs of n samples."""
    try:
        return found.probabilities(_checked(outputs, n))
    except IndexError:  # there is no axis of classes
        return _checked(outputs, -1)


def _drawn(probabilities: Tensor, index: Tensor, seed: int) -> Tensor:
    """Return classes (n, *positions) drawn by inverting the cumulative distributions.

    `probabilities` are (n, *positions, c). A sample's random numbers do not depend on its batch.
    """
    rows = [generator.random(probabilities.shape[1:-1]) for generator in _generators(index, seed)]
    below = probabilities.cumsum(-1)
    wanted = torch.from_numpy(np.stack(rows)).unsqueeze(-1) * below[..., -1:]
    return (below <= wanted).sum(-1).clamp(max=probabilities.shape[-1] - 1)


def _normal(shape: tuple[int, ...], index: Tensor, seed: int) -> Tensor:
    """Return standard normal numbers (n, *shape) in float64, from each sample's generator."""
    rows = [np.asarray(g.standard_normal(shape)) for g in _generators(index, seed)]
    return torch.from_numpy(np.stack(rows))


def _generators(index: Tensor, seed: int) -> Iterator[np.random.Generator]:
    """Yield the random number generator of each sample."""
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
                remedy="Use second_moment, square | mean or norm | second_moment, with no stages "
                f'before it except {", ".join(sorted(_HOMOGENEOUS))}; or use labels="sampled".',
            )
        weights = split.linear if degree == 1 else weights

    def apply(gradients: Gradients) -> Gradients:
        blocks = {name: ExpectedBlock(block, weights) for name, block in gradients.items()}
        index = gradients.index
        return Gradients(blocks, None if index is None else index[:: weights.shape[1]])

    return apply


def _degree(chain: Chain) -> int | None:
    """Return 1 if a chain's rows are linear in g, 2 if they are quadratic in g, else None."""
    before = list(chain.stages[: len(chain.before)])
    names = [stage.name for stage in before]
    squared = _linear_reducer(chain) == "second_moment"
    if names[-1:] == ["square"] and not squared:
        names, before, squared = names[:-1], before[:-1], True
    if squared and names[-1:] == ["norm"] and float(before[-1].arguments.get("p", 2)) == 2:
        names, before = names[:-1], before[:-1]
    steps = any(stage.arguments.get("form") == "step" for stage in before)  # adam:form=step
    return None if steps or not set(names) <= _HOMOGENEOUS else 2 if squared else 1


def _linear_reducer(chain: Chain) -> str | None:
    """Return the name of a chain's reducer or None; raise if exact labels do not support it."""
    if chain.reducer is None:
        return None
    stage = next((stage for stage in chain.stages if stage.name in reducers), None)
    name = stage.name if stage is not None else "a reducer of your own"
    if name not in (*LINEAR, *QUADRATIC):
        raise SpecError(
            f"{name!r} has no expectation over labels: it is not linear in T(g)",
            where=f"labels exact: {chain.text}",
            remedy=f"Use {', '.join((*LINEAR, *QUADRATIC))} or no reducer; or use "
            'labels="sampled".',
        )
    return name
