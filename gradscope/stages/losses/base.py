"""What a loss is, how its options are set, and how its entries become one number a sample.

A loss over several entries a sample (positions, pixels, outputs) takes their mean or their sum, as
`per_sample` says: the two differ by the number of entries, so it is recorded with every result.
"""

import inspect
from collections.abc import Mapping
from functools import partial, update_wrapper, wraps
from typing import Any, Literal, NewType

import torch
from torch import Tensor

from gradscope.config import parse_loss
from gradscope.core.grammar import Stage
from gradscope.core.problem import Loss, is_model_loss
from gradscope.core.registry import Registry
from gradscope.errors import SpecError

Normaliser = Literal["mean", "sum"]
Fraction = NewType("Fraction", float)
Positive = NewType("Positive", float)

losses: Registry[Loss] = Registry("loss")


def resolve(loss: str | Loss) -> Loss:
    """Return the loss of that name with the options behind it, or the callable itself.

    Args:
        loss: For example `mse`, `cross_entropy:label_smoothing=0.1`, or a function.

    Raises:
        SpecError: The name or an option is unknown, or `loss` is neither.
    """
    if isinstance(loss, str):
        stage = parse_loss(loss)
        return bound(losses.get(stage.name), stage)
    if callable(loss):
        return loss
    raise SpecError(f"a loss is a name or a callable, not {type(loss).__name__}", where="loss")


def bound(loss: Loss, stage: Stage) -> Loss:
    """Return `loss` with the stage's arguments in its keyword parameters.

    Args:
        loss: Takes outputs and targets (a model loss: model, inputs and targets), then options.
        stage: The loss as written.

    Raises:
        SpecError: An argument is unknown, missing or of the wrong kind.
    """
    if not stage.arguments:
        return loss

    @wraps(loss)
    def factory(**values: Any) -> Loss:
        made = partial(loss, **values)
        update_wrapper(made, loss)  # name, docstring, and the mark of a model loss
        return made

    try:
        return stage.bind(factory, _CONVERTERS, _leading(loss))
    except SpecError as error:
        error.where = "loss"
        raise


def options(loss: Loss) -> dict[str, Any]:
    """Return a loss's options by name, with the values in force, as plain data."""
    try:
        own = list(inspect.signature(inspect.unwrap(loss)).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have none
        own = []
    every = {p.name: p.default for p in own[_leading(loss) :] if p.default is not p.empty}
    values: Mapping[str, Any] = {**every, **getattr(loss, "keywords", {})}
    return {name: _plain(value) for name, value in values.items()}


def per_sample_loss(
    values: Tensor, per_sample: Normaliser, counted: Tensor | None = None
) -> Tensor:
    """Reduce values (n, ...) to (n,).

    Args:
        values: The loss of each entry, zero where it does not count.
        per_sample: "sum", or "mean" over the entries that count.
        counted: (n, ...) bool, which entries count; all of them when None. A sample of which none
            counts has loss 0.
    """
    if values.dim() == 1:
        return values
    rows = values.flatten(1)
    if per_sample == "sum":
        return rows.sum(1)
    if counted is None:
        return rows.mean(1)
    return rows.sum(1) / counted.flatten(1).sum(1).clamp(min=1)


def class_weights(weight: tuple[float, ...] | None, logits: Tensor, axis: int) -> Tensor | None:
    """Return the weights (c,) as a tensor that fits `logits`.

    Raises:
        SpecError: There is not one weight for each entry of `axis`.
    """
    if weight is None:
        return None
    if len(weight) != logits.shape[axis]:
        raise SpecError(
            f"{len(weight)} weights are given for {logits.shape[axis]} classes",
            where="loss",
            remedy=f"Outputs are {tuple(logits.shape)}, classes on axis {axis}.",
        )
    return torch.tensor(weight, dtype=logits.dtype, device=logits.device)


def _leading(loss: Loss) -> int:
    return 3 if is_model_loss(loss) else 2


def _fraction(text: str) -> Fraction:
    value = float(text)
    if not 0 <= value <= 1:
        raise SpecError(f"must be from 0 to 1, not {text}")
    return Fraction(value)


def _positive(text: str) -> Positive:
    value = float(text)
    if not 0 < value < float("inf"):
        raise SpecError(f"must be positive, not {text}")
    return Positive(value)


def _weights(text: str) -> tuple[float, ...]:
    values = tuple(map(float, text.split(",")))
    if not all(0 <= value < float("inf") for value in values):
        raise SpecError(f"weights must not be negative: {text}")
    return values


_CONVERTERS = {Fraction: _fraction, Positive: _positive, tuple[float, ...]: _weights}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
