"""The distributions over labels that losses define by a model's outputs, and draws from them."""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradscope.core.problem import Loss
from gradscope.stages.losses import bce_with_logits, causal_lm, cross_entropy, nll


class Predictive(NamedTuple):
    """How a model's outputs give a distribution over labels.

    Attributes:
        probabilities: From outputs to (n, *positions, c).
        targets: From classes (n, *positions), old targets and the loss's options to targets.
    """

    probabilities: Callable[[Tensor], Tensor]
    targets: Callable[[Tensor, Any, dict[str, Any]], Tensor]


def predictive(loss: Loss) -> Predictive | None:
    """Return the distribution that a loss stands for, or None."""
    own = inspect.unwrap(loss)
    return next((found for fn, found in PREDICTIVE.items() if fn is own), None)


def draw(probabilities: Tensor, index: Tensor, seed: int) -> Tensor:
    """Return classes (n, *positions) by inverting the distribution functions (n, *positions, c)."""
    shape = probabilities.shape[1:-1]
    uniform = np.stack([_uniform(seed, int(i), shape) for i in index])
    below = probabilities.cumsum(-1)
    wanted = torch.from_numpy(uniform).unsqueeze(-1) * below[..., -1:]
    return (below <= wanted).sum(-1).clamp(max=probabilities.shape[-1] - 1)


def _uniform(seed: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the numbers in [0, 1) that belong to a sample, whatever batch it is in."""
    digest = hashlib.sha256(f"labels {seed} {index}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype=np.uint64)
    return np.asarray(np.random.Generator(np.random.Philox(key=key)).random(shape))


def _classes(outputs: Tensor) -> Tensor:
    return outputs.double().movedim(1, -1).softmax(-1)


def _tokens(outputs: Tensor) -> Tensor:
    return outputs[:, :-1].double().softmax(-1)


def _two_classes(outputs: Tensor) -> Tensor:
    one = outputs.double().sigmoid()
    return torch.stack([1 - one, one], -1)


def _as_classes(drawn: Tensor, targets: Any, settings: dict[str, Any]) -> Tensor:
    """Entries that the data's labels ignore stay ignored."""
    if not isinstance(targets, Tensor) or targets.shape != drawn.shape:
        return drawn
    return torch.where(targets == settings["ignore_index"], targets, drawn)


def _as_tokens(drawn: Tensor, targets: Any, settings: dict[str, Any]) -> Tensor:
    """The first token has no prediction: it stays."""
    if not isinstance(targets, Tensor):
        return torch.cat([torch.zeros_like(drawn[:, :1]), drawn], 1)
    return torch.cat([targets[:, :1], _as_classes(drawn, targets[:, 1:], settings)], 1)


def _as_floats(drawn: Tensor, targets: Any, settings: dict[str, Any]) -> Tensor:
    return drawn.to(targets.dtype if isinstance(targets, Tensor) else torch.get_default_dtype())


PREDICTIVE: dict[Loss, Predictive] = {
    cross_entropy: Predictive(_classes, _as_classes),
    nll: Predictive(_classes, _as_classes),
    causal_lm: Predictive(_tokens, _as_tokens),
    bce_with_logits: Predictive(_two_classes, _as_floats),
}
