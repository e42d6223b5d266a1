"""Losses by name, unreduced: `(outputs, targets) -> (n,)`.

Options are keyword arguments, set as those of a stage: `cross_entropy:label_smoothing=0.1`.
"""

from gradscope.stages.losses import classification, regression, sequences
from gradscope.stages.losses.base import (
    Normaliser,
    bound,
    losses,
    options,
    per_sample_loss,
    resolve,
)
from gradscope.stages.losses.classification import bce_with_logits, cross_entropy, nll
from gradscope.stages.losses.sequences import causal_lm, ctc

__all__ = [
    "Normaliser",
    "bce_with_logits",
    "bound",
    "causal_lm",
    "classification",
    "cross_entropy",
    "ctc",
    "losses",
    "nll",
    "options",
    "per_sample_loss",
    "regression",
    "resolve",
    "sequences",
]
