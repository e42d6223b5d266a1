"""Losses by name, unreduced: `(outputs, targets) -> (n,)`.

Losses over several output entries a sample (positions, pixels, outputs) take the mean over them,
as torch does within one sample; the sum differs by the number of entries, so the choice is
recorded with every result.
"""

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.core.problem import Loss
from gradscope.core.registry import Registry
from gradscope.errors import SpecError

losses: Registry[Loss] = Registry("loss")


@losses.register("cross_entropy")
def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (n, c, ...) with classes (n, ...) or probabilities (n, c, ...)."""
    return _sample_mean(F.cross_entropy(outputs, targets, reduction="none"))


@losses.register("nll")
def nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of log-probabilities (n, c, ...) with classes (n, ...)."""
    return _sample_mean(F.nll_loss(outputs, targets, reduction="none"))


@losses.register("mse")
def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, outputs and targets of one shape (n, ...)."""
    return _pointwise(F.mse_loss, outputs, targets)


@losses.register("l1")
def l1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute error, outputs and targets of one shape (n, ...)."""
    return _pointwise(F.l1_loss, outputs, targets)


@losses.register("huber")
def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Huber's loss with δ = 1, outputs and targets of one shape (n, ...)."""
    return _pointwise(F.huber_loss, outputs, targets)


@losses.register("bce_with_logits")
def bce_with_logits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of logits, outputs and targets of one shape (n, ...)."""
    return _pointwise(F.binary_cross_entropy_with_logits, outputs, targets)


@losses.register("poisson_nll")
def poisson_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Poisson negative log-likelihood of log-rates, outputs and targets of one shape (n, ...)."""
    return _pointwise(F.poisson_nll_loss, outputs, targets)


def resolve(loss: str | Loss) -> Loss:
    """Return the loss of that name, or the callable itself.

    Raises:
        SpecError: The name is unknown, or `loss` is neither.
    """
    if isinstance(loss, str):
        return losses.get(loss)
    if callable(loss):
        return loss
    raise SpecError(f"a loss is a name or a callable, not {type(loss).__name__}", where="loss")


def _pointwise(fn: Callable[..., Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape != targets.shape:  # torch would broadcast (n, 1) with (n,) to (n, n)
        raise SpecError(
            f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} differ in shape",
            where="loss",
            remedy="Reshape one of them: broadcasting would mix the samples.",
        )
    return _sample_mean(fn(outputs, targets, reduction="none"))


def _sample_mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.dim() > 1 else values
