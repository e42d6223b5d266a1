"""Which labels the losses are held against: the data's, drawn ones, or all of them.

- `data`: the targets as they are; `square | mean` is the diagonal of the empirical Fisher.
- `sampled`: one draw from the model's own predictive distribution: the Fisher by Monte Carlo. The
  random numbers depend on the seed and the sample's index only.
- `exact`: the expectation over all classes, E_{y ~ p(y|x)} T(∇L(x, y)), in every sample's place:
  `square | mean` is the diagonal of the exact Fisher. A sample costs as many gradients as there
  are classes. An expectation over labels goes through T(g) only in a linear reducer: mean, sum, or
  none (Kunstner et al. 2019, arXiv:1905.12558; Martens 2020, arXiv:1412.1193).

The weights p are no function of the parameters here: no gradient goes through them.
"""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import ExpectedBlock, Gradients
from gradscope.core.batch import Batch, output
from gradscope.core.problem import BoundLoss, Loss, Predictive, Problem
from gradscope.core.texts import count
from gradscope.errors import ModelError, SpecError
from gradscope.stages.chain import Chain
from gradscope.stages.losses import losses, options
from gradscope.stages.reducers.base import reducers
from gradscope.stages.transforms.base import NeedsProblem, Transform, transforms

Mode = Literal["data", "sampled", "exact"]

LINEAR = ("mean", "sum", "second_moment")  # second_moment is square | mean


@dataclass(frozen=True)
class Expanded(Batch):
    """Each sample once a class, the classes of a sample next to each other."""

    weights: Tensor  # (samples, c), the probabilities of the classes


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
        before, reducer = chain.before, chain.reducer
        if _linear_reducer(chain) == "second_moment":
            before, reducer = (*before, transforms.get("square")()), reducers.get("mean")()
        return replace(chain, before=(*before, NeedsProblem(_expectation)), reducer=reducer)

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
        found = _predictive(self._problem.loss)
        assert found is not None  # `require` has let the loss through
        settings = options(self._problem.loss)
        seen: list[Any] = []

        def keep(answer: Any, targets: Any) -> Tensor:
            seen.append(output(answer))
            return torch.zeros(len(batch))

        replace(self._problem, loss=keep).losses(batch)
        p = _probabilities(found, seen[0], len(batch)).detach().cpu()
        self._outputs = outputs = seen[0].detach()
        if self.mode == "sampled":
            drawn = _drawn(p, batch.index, self._seed).to(outputs.device)
            return replace(batch, targets=found.targets(drawn, batch.targets, settings))
        *positions, classes = p.shape[1:]
        if prod(positions) != 1:
            raise SpecError(
                f"exact labels need one class a sample; here there are {prod(positions)} "
                f"positions, so {classes}^{prod(positions)} labels",
                where="labels exact",
                remedy='Use labels="sampled".',
            )
        n = len(batch)
        many = batch.select(torch.arange(n).repeat_interleave(classes))
        every = torch.arange(classes, device=outputs.device).repeat(n)
        every = every.reshape(n * classes, *positions)
        targets = found.targets(every, many.targets, settings)
        return Expanded(many.inputs, targets, many.index, p.reshape(n, classes).to(outputs.device))


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


def mean(values: Tensor, batch: Batch) -> Tensor:
    """Return the expectation (samples,) of values (n,) over a batch's labels."""
    if not isinstance(batch, Expanded):
        return values
    weights = batch.weights.to(values.dtype)
    return (values.reshape(weights.shape) * weights).sum(1)


def samples(batch: Batch) -> int:
    """Return how many samples a batch has, however many labels each of them has."""
    return len(batch.weights) if isinstance(batch, Expanded) else len(batch)


def over_labels(mask: Tensor, batch: Batch) -> Tensor:
    """Return the mask (n·c,) of a batch, false for every label of a sample where one is false."""
    if not isinstance(batch, Expanded):
        return mask
    classes = batch.weights.shape[1]
    return mask.reshape(-1, classes).all(1).repeat_interleave(classes)


def chosen(batch: Batch, mask: Tensor) -> Batch:
    """Return the samples of a mask (n,) that keeps the labels of a sample together."""
    part = batch.select(mask)
    if not isinstance(batch, Expanded):
        return part
    kept = mask.reshape(-1, batch.weights.shape[1])[:, 0].to(batch.weights.device)
    return Expanded(part.inputs, part.targets, part.index, batch.weights[kept])


def _predictive(loss: Loss) -> Predictive | None:
    return loss.predictive if isinstance(loss, BoundLoss) else None


def _probabilities(found: Predictive, outputs: Any, n: int) -> Tensor:
    """Return what the outputs of n samples say of labels (n, *positions, c)."""
    of_samples = isinstance(outputs, Tensor) and outputs.shape[:1] == (n,)
    if of_samples and outputs.is_floating_point():
        with suppress(IndexError):  # there is no axis of classes
            return found.probabilities(outputs)
    told = f"{tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ModelError(
        f"no labels can be drawn from what the model returns for {count(n, 'sample')}: {told}",
        where="labels",
        remedy="It must be logits as the loss takes them, the sample axis first.",
    )


def _drawn(probabilities: Tensor, index: Tensor, seed: int) -> Tensor:
    """Return classes (n, *positions) by inverting the distribution functions (n, *positions, c).

    The random numbers belong to a sample, whatever batch it is in.
    """
    rows = []
    for i in index:
        digest = hashlib.sha256(f"labels {seed} {int(i)}".encode()).digest()
        key = np.frombuffer(digest[:16], dtype=np.uint64)
        rows.append(
            np.random.Generator(np.random.Philox(key=key)).random(probabilities.shape[1:-1])
        )
    below = probabilities.cumsum(-1)
    wanted = torch.from_numpy(np.stack(rows)).unsqueeze(-1) * below[..., -1:]
    return (below <= wanted).sum(-1).clamp(max=probabilities.shape[-1] - 1)


def _expectation(problem: Problem, batch: Batch) -> Transform:
    assert isinstance(batch, Expanded)
    weights = batch.weights

    def apply(gradients: Gradients) -> Gradients:
        blocks = {name: ExpectedBlock(block, weights) for name, block in gradients.items()}
        index = gradients.index
        return Gradients(blocks, None if index is None else index[:: weights.shape[1]])

    return apply


def _linear_reducer(chain: Chain) -> str | None:
    """Return the name of a chain's reducer, if it has one, and refuse one not linear in T(g)."""
    if chain.reducer is None:
        return None
    stage = next((stage for stage in chain.stages if stage.name in reducers), None)
    name = stage.name if stage is not None else "a reducer of your own"
    if name not in LINEAR:
        raise SpecError(
            f"{name!r} has no expectation over labels: it is not linear in T(g)",
            where=f"labels exact: {chain.text}",
            remedy=f"Reducers that go with exact labels: {', '.join(LINEAR)}, or none.",
        )
    return name
