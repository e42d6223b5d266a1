"""Losses against classes.

A weighted loss is weight times loss for each sample. torch's weighted mean divides by the sum of
the weights in the batch, which makes a sample's gradient depend on its neighbours: not here.
"""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.stages.losses.base import (
    Fraction,
    Normaliser,
    class_weights,
    losses,
    per_sample_loss,
)
from gradscope.stages.losses.regression import require_one_shape

IGNORED = -100  # torch's own word for a position that does not count
NO_SMOOTHING = Fraction(0.0)


@losses.register("cross_entropy")
def cross_entropy(
    outputs: Tensor,
    targets: Tensor,
    *,
    label_smoothing: Fraction = NO_SMOOTHING,
    weight: tuple[float, ...] | None = None,
    ignore_index: int = IGNORED,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Cross-entropy of logits (n, c, ...) with classes (n, ...) or probabilities (n, c, ...).

    Args:
        outputs: Logits (n, c, ...).
        targets: Integers (n, ...), or probabilities (n, c, ...).
        label_smoothing: The share of a uniform target, from 0 to 1.
        weight: One factor a class; multiplies the loss of each entry by its class's.
        ignore_index: Entries of this class count for nothing; with none left the loss is 0.
        per_sample: Mean over the entries that count, or sum.
    """
    values = F.cross_entropy(
        outputs,
        targets,
        class_weights(weight, outputs, 1),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    counted = None if targets.is_floating_point() else targets != ignore_index
    return per_sample_loss(values, per_sample, counted)


@losses.register("nll")
def nll(
    outputs: Tensor,
    targets: Tensor,
    *,
    weight: tuple[float, ...] | None = None,
    ignore_index: int = IGNORED,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Negative log-likelihood of log-probabilities (n, c, ...) with classes (n, ...).

    The options are those of `cross_entropy`.
    """
    values = F.nll_loss(
        outputs,
        targets,
        class_weights(weight, outputs, 1),
        ignore_index=ignore_index,
        reduction="none",
    )
    return per_sample_loss(values, per_sample, targets != ignore_index)


@losses.register("bce_with_logits")
def bce_with_logits(
    outputs: Tensor,
    targets: Tensor,
    *,
    pos_weight: tuple[float, ...] | None = None,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Binary cross-entropy of logits, outputs and targets of one shape (n, ...).

    Args:
        outputs: Logits (n, ...).
        targets: Probabilities (n, ...).
        pos_weight: What the positive part is multiplied by: one factor, or one an entry of the
            last axis.
        per_sample: Mean over a sample's entries, or sum.
    """
    require_one_shape(outputs, targets)
    if outputs.dim() == 1:
        outputs, targets = outputs[:, None], targets[:, None]
    if pos_weight is not None and len(pos_weight) == 1:
        pos_weight *= outputs.shape[-1]
    factors = class_weights(pos_weight, outputs, -1)
    values = F.binary_cross_entropy_with_logits(
        outputs, targets, pos_weight=factors, reduction="none"
    )
    return per_sample_loss(values, per_sample)
