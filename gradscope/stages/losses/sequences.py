"""Losses of sequences: positions t, logits over a vocabulary or an alphabet v."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.errors import SpecError
from gradscope.stages.losses.base import Fraction, Normaliser, losses
from gradscope.stages.losses.classification import IGNORED, NO_SMOOTHING, cross_entropy


@losses.register("causal_lm")
def causal_lm(
    outputs: Tensor,
    targets: Tensor,
    *,
    label_smoothing: Fraction = NO_SMOOTHING,
    weight: tuple[float, ...] | None = None,
    ignore_index: int = IGNORED,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Next-token cross-entropy of logits (n, t, v) with the token ids (n, t) they were fed.

    The logits at position t are held against token t + 1; the last logits and the first token have
    no partner. Padding is marked by `ignore_index`. The options are those of `cross_entropy`: a
    sample's mean is over its own counted tokens, which is not the mean over a batch's tokens.
    """
    if outputs.dim() != 3 or targets.shape != outputs.shape[:2] or targets.shape[1] < 2:
        raise SpecError(
            f"outputs are {tuple(outputs.shape)} and targets {tuple(targets.shape)}",
            where="loss causal_lm",
            remedy="Logits must be (n, t, v) and targets (n, t), with two positions or more.",
        )
    return cross_entropy(
        outputs[:, :-1].transpose(1, 2),
        targets[:, 1:],
        label_smoothing=label_smoothing,
        weight=weight,
        ignore_index=ignore_index,
        per_sample=per_sample,
    )


@losses.register("ctc")
def ctc(
    outputs: Tensor,
    targets: Any,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
    per_sample: Normaliser = "sum",
) -> Tensor:
    """Connectionist temporal classification of logits (n, t, v), label sequences (n, s).

    Graves et al. 2006. The logarithms of probabilities serve as logits too.

    Args:
        outputs: (n, t, v); samples first, unlike torch's.
        targets: Labels (n, s), negative where a sequence has ended; or a tuple of labels, lengths
            of the outputs (n,), and lengths of the labels (n,).
        blank: The label of no label.
        zero_infinity: Loss and gradient are zero where the labels cannot fit into the positions.
        per_sample: The negative log-likelihood ("sum"), or that over the number of labels, as
            torch's mean has it.
    """
    n, t = outputs.shape[:2]
    if isinstance(targets, Tensor):
        inside = targets >= 0
        labels, label_lengths = targets.clamp(min=0), inside.sum(1)
        lengths = torch.full((n,), t, device=outputs.device)
    else:
        labels, lengths, label_lengths = targets
    values = F.ctc_loss(
        outputs.log_softmax(-1).transpose(0, 1),
        labels,
        lengths,
        label_lengths,
        blank=blank,
        reduction="none",
        zero_infinity=zero_infinity,
    )
    return values if per_sample == "sum" else values / label_lengths.clamp(min=1)
