"""Losses that compare outputs and targets of one shape (n, ...), entry by entry."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.errors import SpecError
from gradscope.stages.losses.base import Normaliser, Positive, losses, per_sample_loss

ONE = Positive(1.0)


@losses.register("mse")
def mse(outputs: Tensor, targets: Tensor, *, per_sample: Normaliser = "mean") -> Tensor:
    """Squared error, outputs and targets of one shape (n, ...)."""
    require_one_shape(outputs, targets)
    return per_sample_loss(F.mse_loss(outputs, targets, reduction="none"), per_sample)


@losses.register("l1")
def l1(outputs: Tensor, targets: Tensor, *, per_sample: Normaliser = "mean") -> Tensor:
    """Absolute error, outputs and targets of one shape (n, ...)."""
    require_one_shape(outputs, targets)
    return per_sample_loss(F.l1_loss(outputs, targets, reduction="none"), per_sample)


@losses.register("huber")
def huber(
    outputs: Tensor,
    targets: Tensor,
    *,
    delta: Positive = ONE,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Huber's loss: e²/2 up to |e| = δ, then δ(|e| − δ/2); outputs and targets of one shape."""
    require_one_shape(outputs, targets)
    values = F.huber_loss(outputs, targets, reduction="none", delta=delta)
    return per_sample_loss(values, per_sample)


@losses.register("poisson_nll")
def poisson_nll(
    outputs: Tensor,
    targets: Tensor,
    *,
    log_input: bool = True,
    full: bool = False,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Poisson negative log-likelihood of log-rates, outputs and targets of one shape (n, ...).

    Args:
        outputs: The logarithms of the rates (n, ...), or the rates.
        targets: Counts (n, ...).
        log_input: Outputs are logarithms.
        full: Add Stirling's approximation of log(target!), which has no gradient.
        per_sample: Mean over a sample's entries, or sum.
    """
    require_one_shape(outputs, targets)
    values = F.poisson_nll_loss(outputs, targets, log_input=log_input, full=full, reduction="none")
    return per_sample_loss(values, per_sample)


def require_one_shape(outputs: Tensor, targets: Tensor) -> None:
    """Raise unless the shapes are equal: torch would broadcast (n, 1) with (n,) to (n, n).

    Raises:
        SpecError: They differ.
    """
    if outputs.shape != targets.shape:
        raise SpecError(
            f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} differ in shape",
            where="loss",
            remedy="Reshape one of them: broadcasting would mix the samples.",
        )
