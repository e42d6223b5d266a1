"""The model's prediction for each sample, taken from the outputs that give the losses.

With a loss over classes the prediction is the most probable class. Its margin is
log p_y - log(1 - p_y): the log odds that the model gives to the sample's class y (Park et al. 2023,
arXiv:2303.14186). With any other loss the prediction is the model's output, if a sample's output is
a single number. In other cases (a class at each position, images, a loss of model, inputs and
targets) there is no prediction.

The outputs come from the forward pass that computed the losses of the result. A backend that runs
one sample at a time, or all samples under a transformation, shows no such pass. Then one more
forward pass runs without a gradient. Its predictions are used for samples with the same loss.
"""

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradscope.blocks import Evaluation
from gradscope.core.batch import Batch
from gradscope.model.problem import BoundLoss, Loss, Predictive, Problem
from gradscope.model.rounding import same
from gradscope.process.shortage import is_machine_error
from gradscope.stages.labels import Labels

Columns = dict[str, Tensor]  # prediction (n,), margin (n,)

NO_CLASS = -1  # the class of a sample with outputs that are not finite


def predicted(loss: Loss, outputs: Any, targets: Any) -> Columns:
    """Return the columns `prediction` (n,) and, for classes, `margin` (n,), or an empty dict.

    A prediction is a class (int64, -1 where the outputs are not finite) or a number. A margin is
    NaN where the target is not a class. There are no margins if a target is not one number.
    """
    if type(outputs) is not Tensor or not outputs.is_floating_point() or not one_each(targets):
        return {}
    outputs = outputs.detach()  # the stored columns must not keep the graph
    n, found = len(targets), loss.predictive if isinstance(loss, BoundLoss) else None
    if not isinstance(found, Predictive):
        return {"prediction": outputs.flatten()} if outputs.numel() == n else {}
    p = found.probabilities(outputs)
    if prod(p.shape[1:-1]) != 1:
        return {}
    p = p.reshape(n, -1)
    top, most = p.max(1)
    columns = {"prediction": most.where(top.isfinite(), NO_CLASS)}
    if targets.numel() == n:
        columns["margin"] = _margins(p, targets.detach().flatten(), outputs.dtype)
    return columns


def _margins(p: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return log p_y - log Σ_{j≠y} p_j (n,) for p (n, c); it is also exact for p_y near 1."""
    y = targets.long().clamp(0, p.shape[1] - 1)
    own = p.gather(1, y[:, None])
    others = p.scatter(1, y[:, None], 0) @ p.new_ones(p.shape[1], 1)
    odds = (own / others).log()[:, 0].where(y == targets, torch.nan)
    return odds.to(torch.promote_types(dtype, torch.float32))


def one_each(targets: Any) -> bool:
    """Whether each sample's target is a number, or a row of numbers such as probabilities."""
    if type(targets) is not Tensor or not targets.dim():
        return False
    return prod(targets.shape[1:]) == 1 or (targets.dim() == 2 and targets.is_floating_point())


class Predictions:
    """The predictions for the batches that a session evaluates."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Columns]] = []  # losses and their columns
        self._kinds: dict[str, torch.dtype] = {}  # dtypes of the columns found so far

    def watch(self, loss: Loss, outputs: Any, targets: Any, losses: Tensor) -> None:
        """Keep the predictions of a forward pass; `Problem.losses` calls this."""
        if found := predicted(loss, outputs, targets):
            self._seen.append((losses.detach(), found))

    def forget(self) -> None:
        """Drop the predictions of earlier forward passes."""
        self._seen.clear()

    def of(self, problem: Problem, labels: Labels, batch: Batch, evaluation: Evaluation) -> Columns:
        """Return the columns of the last batch, compared with the data's own targets."""
        if problem.of_model or not one_each(batch.targets):
            return {}
        if labels.mode != "data":
            return predicted(problem.loss, labels.outputs(batch), batch.targets)
        found = next((c for losses, c in self._seen if _is(losses, evaluation.losses)), None)
        if found is None:
            found = _once_more(problem, batch, evaluation.losses)
        if found is None:  # all are unknown
            found = {k: _unknown(len(batch), dtype) for k, dtype in self._kinds.items()}
        self._kinds = self._kinds or {name: column.dtype for name, column in found.items()}
        self.forget()
        return found


def _is(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _once_more(problem: Problem, batch: Batch, losses: Tensor) -> Columns | None:
    """Predict by one more forward pass: all samples together, or else one at a time."""
    whole = _passed(problem, batch, graph=False)
    if whole is not None and same(whole[0], losses, precision=problem.precision):
        return whole[1]
    each = [_passed(problem, batch.one(k), graph=True) for k in range(len(batch))]
    made = [one for one in each if one is not None]
    if len(made) < len(batch):
        return None
    found = {name: torch.cat([columns[name] for _, columns in made]) for name in made[0][1]}
    agree = [
        same(one, losses[k : k + 1], precision=problem.precision) for k, (one, _) in enumerate(made)
    ]
    right = torch.tensor(agree, device=losses.device)
    return {k: torch.where(right, v, _unknown(len(v), v.dtype, v)) for k, v in found.items()}


def _passed(problem: Problem, batch: Batch, *, graph: bool) -> tuple[Tensor, Columns] | None:
    """Return losses and columns of a forward pass, or None if it fails or gives no columns."""
    seen: list[Columns] = []

    def keep(loss: Loss, outputs: Any, targets: Any, losses: Tensor) -> None:
        seen.append(predicted(loss, outputs, targets))

    try:
        losses = replace(problem, observer=keep).losses(batch, graph=graph)
    except Exception as error:  # no backend runs the model's code like this, so it may fail
        if is_machine_error(error):
            raise
        return None
    return (losses.detach(), seen[0]) if seen else None


def _unknown(n: int, dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
    missing = torch.nan if dtype.is_floating_point else NO_CLASS
    return torch.full((n,), missing, dtype=dtype, device=None if like is None else like.device)
