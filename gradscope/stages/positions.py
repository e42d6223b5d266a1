"""Expectation over labels at T independent positions, from one gradient per position and class.

A model's outputs give each position t its own distribution p_tc over labels c. The positions are
independent, and the loss is a sum over them, L = w Σₜ ℓₜ. Here w is 1, or 1 over the number of
counted positions. The C^T labels of the whole sample are then not needed:

    E[g] = ḡ = w Σ_tc p_tc ∇ℓₜ(c),
    E[g gᵀ] = Σ_tc p_tc g̃_tc g̃_tcᵀ + ḡ ḡᵀ,  g̃_tc = w (∇ℓₜ(c) − Σ_k p_tk ∇ℓₜ(k)).

The scores of independent positions are uncorrelated (Martens 2020, arXiv:1412.1193, section 8).
Where ℓₜ is the negative log-likelihood of p, the expectation of ∇ℓₜ is zero, and T·C gradients are
enough. With class weights or label smoothing it is not zero. It is then subtracted.

A squared error assumes labels y ~ N(μ, ½) for every entry. Its gradient is −2w (y − μ) ∇μ. So one
gradient for each entry, with a residual of one standard deviation, gives the second moment.
"""

from collections.abc import Iterator
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscope.core.batch import map_tensors, output
from gradscope.core.precision import doubled
from gradscope.errors import SpecError
from gradscope.model.problem import BoundLoss, Gaussian, Loss, Predictive
from gradscope.stages.losses import options, reduces

_SCORE = 1e-9  # float64: a mean gradient below this share of its terms is rounding error
_SAME = 1e-3  # largest relative difference between a loss and the sum over its positions


class AtPosition(NamedTuple):
    """Targets of rows (m,); the loss of a row is the loss of one position."""

    targets: Any  # the row's class at every position
    position: Tensor  # (m,) int64, the position t of each row
    scale: Tensor  # (m,), the factor w


class CentredLabels(NamedTuple):
    """Like `AtPosition`, minus the expectation over labels; position T is the expectation."""

    targets: Any
    position: Tensor
    scale: Tensor


class ResidualTargets(NamedTuple):
    """Targets of rows (m,); a row's target differs from one output entry by one std."""

    position: Tensor  # (m,) int64, the entry of each row
    scale: Tensor  # (m,), the factor w


class LabelRows(NamedTuple):
    """The r rows that replace the labels of each of n samples, with their weights."""

    targets: AtPosition | CentredLabels | ResidualTargets  # n·r rows
    squares: Tensor  # (n, r), weights for the expectation of a quadratic function of g
    linear: Tensor  # (n, r), weights for a linear function of g
    losses: Tensor  # (n, r), weights for the loss


def by_position(loss: Loss) -> Loss:
    """Return a loss that also takes the targets of this module: one position a row."""
    if not isinstance(loss, BoundLoss) or loss.predictive is None or loss.of_model:
        return loss
    plain, found = loss.function, loss.predictive

    @wraps(plain)
    def function(answer: Any, targets: Any, **how: Any) -> Tensor:
        if not isinstance(targets, AtPosition | CentredLabels | ResidualTargets):
            return plain(answer, targets, **how)
        if isinstance(targets, ResidualTargets):
            assert isinstance(found, Gaussian)
            values = _residual(loss, output(answer), found.std)
        else:
            assert isinstance(found, Predictive)
            values, _ = entries(loss, answer, targets.targets)
            if isinstance(targets, CentredLabels):
                expected = sum(_expected(loss, found, answer, targets.targets))
                assert isinstance(expected, Tensor)
                values = torch.cat([values - expected, expected.sum(1, keepdim=True)], 1)
        picked = values.gather(1, targets.position.unsqueeze(1)).squeeze(1)
        return picked * targets.scale.to(picked.dtype)

    return BoundLoss(function, loss.options, found)


def entries(loss: BoundLoss, answer: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
    """Return the loss of each position (n, T), and a bool mask (n, T) or None if all count."""
    found: Any = loss.function(answer, targets, **(loss.options | {"per_sample": "none"}))
    values, counted = found if isinstance(found, tuple) else (found, None)
    return (values.unsqueeze(1) if values.dim() == 1 else values), counted


def classes(
    loss: BoundLoss, found: Predictive, answer: Any, p: Tensor, targets: Any
) -> LabelRows | None:
    """Return the rows of all classes at all positions that count.

    Returns None if the loss is not a sum over positions.

    Args:
        loss: A loss with a predictive distribution.
        found: The predictive distribution.
        answer: What the model returned for n samples.
        p: The probabilities (n, *positions, c).
        targets: The data's targets, used to find ignored entries.
    """
    if not reduces(loss) or loss.of_model:
        return None
    outputs, shape, settings = output(answer), p.shape[1:-1], options(loss)
    p = p.reshape(len(p), -1, p.shape[-1]).to(outputs.device)
    with torch.no_grad():
        labels = torch.zeros(len(p), *shape, dtype=torch.int64, device=outputs.device)
        first = found.targets(labels, targets, settings)
        values, counted = entries(loss, answer, first)
        if values.shape != p.shape[:2]:
            return None
        counted = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
        scale = _scale(settings, counted)
        off = (values * scale.unsqueeze(1)).sum(1) - loss(answer, first)
        if bool((off.abs() > _SAME * (values.abs() * scale.unsqueeze(1)).sum(1)).any()):
            return None
    kept = counted.any(0).nonzero().flatten()  # positions that count in some sample
    kept = kept if len(kept) else kept.new_zeros(1)
    probable = torch.where(counted.unsqueeze(2), p, 0)[:, kept].flatten(1)  # (n, t·c)
    score = _is_score(loss, found, outputs, targets)
    (n, r), c = probable.shape, p.shape[2]
    place = kept.repeat_interleave(c)
    label = torch.arange(c, device=kept.device).repeat(len(kept))
    if not score:  # add a last row for the expectation
        place = torch.cat([place, place.new_tensor([p.shape[1]])])
        label = torch.cat([label, label.new_zeros(1)])
        r += 1
    every = label.repeat(n).reshape(n * r, *[1] * len(shape)).expand(n * r, *shape)
    own = map_tensors(lambda t: t.repeat_interleave(r, 0) if t.dim() else t, targets)
    where = place.repeat(n), scale.repeat_interleave(r)
    made = found.targets(every, own, settings)
    if score:
        return LabelRows(AtPosition(made, *where), probable, probable, probable)
    last = torch.zeros(n, r, dtype=probable.dtype, device=probable.device)
    last[:, -1] = 1
    return LabelRows(
        CentredLabels(made, *where), torch.cat([probable, last[:, -1:]], 1), last, last
    )


def residuals(loss: BoundLoss, outputs: Tensor) -> LabelRows | None:
    """Return the rows of a squared error (one for each entry of the outputs (n, ...)), or None."""
    if not reduces(loss) or loss.of_model:
        return None
    n, count = len(outputs), outputs[0].numel()
    ones = torch.ones(n, count, dtype=torch.float64, device=outputs.device)
    scale = _scale(options(loss), ones).repeat_interleave(count)
    place = torch.arange(count, device=outputs.device).repeat(n)
    return LabelRows(ResidualTargets(place, scale), ones, torch.zeros_like(ones), ones)


def _scale(settings: dict[str, Any], counted: Tensor) -> Tensor:
    """Return the factor w (n,) of each sample's sum over its counted positions (n, T)."""
    count = counted.sum(1).clamp(min=1).double()
    return 1 / count if settings["per_sample"] == "mean" else torch.ones_like(count)


def _expected(loss: BoundLoss, found: Predictive, answer: Any, targets: Any) -> Iterator[Tensor]:
    """Yield p_tk ℓₜ(k) (n, T) for each class k; no gradient goes through p."""
    p, settings = found.probabilities(output(answer).detach()), options(loss)
    shape = p.shape[:-1]
    for k in range(p.shape[-1]):
        labels = torch.full(shape, k, dtype=torch.int64, device=p.device)
        values, _ = entries(loss, answer, found.targets(labels, targets, settings))
        yield values * p[..., k].reshape(values.shape).to(values.dtype)


def _is_score(loss: BoundLoss, found: Predictive, outputs: Tensor, targets: Any) -> bool:
    """Whether Σ_c p_tc ∇ℓₜ(c) = 0 at the outputs, as for a negative log-likelihood."""
    with torch.enable_grad():
        at = doubled(outputs.detach()).requires_grad_()
        total, size = torch.zeros_like(at), torch.zeros_like(at)
        for term in _expected(loss, found, at, targets):
            (slope,) = torch.autograd.grad(term.sum(), at, materialize_grads=True)
            total, size = total + slope, size + slope.abs()
    return bool((total.abs() <= _SCORE * size.amax()).all())


def _residual(loss: BoundLoss, outputs: Tensor, std: float) -> Tensor:
    """Return the losses (n, T) for targets at a distance of `std` from the outputs."""
    moved = outputs - outputs.detach()  # zeros: adding std to large outputs would be rounded
    return entries(loss, moved, torch.full_like(moved, std))[0]


def required(rows: LabelRows | None, loss: BoundLoss) -> LabelRows:
    """Return the rows, or raise if the loss does not return a number for each position."""
    if rows is None:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise SpecError(
            f"the loss {name!r} does not return a number for each position, so exact labels would "
            "need every combination of classes",
            where="labels exact",
            remedy="Add an option `per_sample: Normaliser` to the loss and pass it to "
            '`gradscope.extend.per_sample_loss`; or use labels="sampled".',
        )
    return rows
