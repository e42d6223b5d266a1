"""Notes about losses that get the wrong kind of numbers, such as probabilities instead of logits.

One forward pass of a few samples inspects the inputs of torch's losses, also inside a user's loss.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradscope.model.problem import BoundLoss, Problem
from gradscope.model.sample_axis import running_place

WATCHED = 64  # the number of inspected samples, at most
_CLOSE = 1e-2  # tolerance for sums of probabilities (1) and their logarithm (0), also in bfloat16
_PASSED = {
    *("Alias", "Clamp", "ClampMax", "ClampMin", "Clone", "Expand", "Permute", "Reshape", "Select"),
    *("Slice", "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View"),
    "ReshapeAlias",
}  # operations that keep or limit values
_SQUASHED = {"Hardsigmoid", "Sigmoid", "Softmax"}
_POSITIVE = {"Exp", "Softplus"}
_OURS = {
    "binary_cross_entropy_with_logits": "bce_with_logits",
    "kl_div": "kl",
    "nll_loss": "nll",
    "poisson_nll_loss": "poisson_nll",
}  # {name in torch: name in gradscope}


@contextmanager
def watching_loss_inputs(problem: Problem, found: list[str]) -> Iterator[Problem]:
    """Add a note to `found` for each torch loss that gets the wrong kind of numbers.

    The body runs the forward pass of the yielded problem, on `WATCHED` samples.
    """
    notes: dict[str, None] = {}
    with _Watch(notes):
        yield _watched(problem, notes)
    found += notes


def _watched(problem: Problem, notes: dict[str, None]) -> Problem:
    """Return a problem that also inspects the inputs of `gaussian_nll:log_variance=true`."""
    loss = problem.loss
    named = isinstance(loss, BoundLoss) and getattr(loss, "__name__", "") == "gaussian_nll"
    if not named or not loss.options.get("log_variance"):  # type: ignore[attr-defined]
        return problem

    def watched(outputs: Any, targets: Any) -> Tensor:
        second = outputs[1] if isinstance(outputs, tuple | list) and len(outputs) == 2 else None
        if isinstance(second, Tensor) and _maker(second) in _POSITIVE and bool((second >= 0).all()):
            notes[
                f"gaussian_nll with log_variance expects log-variances but gets variances "
                f"from {_maker(second).lower()}. Remove log_variance=true"
            ] = None
        return loss(outputs, targets)

    return replace(problem, loss=watched)


class _Watch(TorchFunctionMode):
    """Inspects the first argument of torch's losses."""

    def __init__(self, notes: dict[str, None]) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (look := _LOOKS.get(func)) is not None:
            given = (*args, *(kwargs[k] for k in ("input", "log_probs") if k in kwargs))
            self._inspect(look, given, kwargs, func.__name__)
        return func(*args, **kwargs)

    def _inspect(
        self, look: "_Look", given: tuple[Any, ...], options: dict[str, Any], name: str
    ) -> None:
        if given and isinstance(given[0], Tensor):
            values = given[0].detach()
            if values.is_floating_point() and values.numel() and bool(values.isfinite().any()):
                self._add(look(values, _maker(given[0]), options), name)

    def _add(self, what: str | None, name: str) -> None:
        if what is None:
            return
        line, _ = running_place() or (None, None)
        name = f"{name} ({line.filename}, line {line.lineno})" if line else _OURS.get(name, name)
        self._notes[f"{name} {what}"] = None


def _cross_entropy(values: Tensor, made_by: str, options: dict[str, Any]) -> str | None:
    axis = min(1, values.dim() - 1)
    if values.shape[axis] < 2 or not _within_one(values):
        return None
    if not _sum_to_one(values, axis) and made_by != "Sigmoid":
        return None
    return (
        f"expects logits but gets probabilities: {_between(values)}. Remove the softmax or sigmoid "
        "from the model; or give the logarithm of the probabilities to the loss nll"
    )


def _with_logits(values: Tensor, made_by: str, options: dict[str, Any]) -> str | None:
    if made_by not in _SQUASHED or not _within_one(values):
        return None
    return (
        f"expects logits but gets probabilities from {made_by.lower()}: {_between(values)}. "
        "Remove it from the model, or use the loss bce"
    )


def _nll(values: Tensor, made_by: str, options: dict[str, Any]) -> str | None:
    return _log_probabilities(values, min(1, values.dim() - 1))


def _ctc(values: Tensor, made_by: str, options: dict[str, Any]) -> str | None:
    return _log_probabilities(values, -1)


def _log_probabilities(values: Tensor, axis: int) -> str | None:
    sums = values.logsumexp(axis)
    if values.shape[axis] < 2 or not bool((sums.abs() > _CLOSE).all()):
        return None
    if _within_one(values) and _sum_to_one(values, axis):
        return f"expects log-probabilities but gets probabilities: {_between(values)}. Add .log()"
    return (
        "expects log-probabilities but gets logits: exp of the first row sums to "
        f"{float(sums.flatten()[0].exp()):.3g}, not 1. Use the loss cross_entropy, or end the "
        "model with log_softmax"
    )


def _kl(values: Tensor, made_by: str, options: dict[str, Any]) -> str | None:
    if not bool((values > _CLOSE).any()):
        return None
    axes = range(min(1, values.dim() - 1), values.dim())
    if _within_one(values) and any(_sum_to_one(values, axis) for axis in axes):
        return f"expects log-probabilities but gets probabilities: {_between(values)}. Add .log()"
    return (
        f"expects log-probabilities but gets values up to {float(values.max()):.3g}. End the model "
        "with log_softmax"
    )


def _poisson(values: Tensor, made_by: str, options: dict[str, Any]) -> str | None:
    logs = options.get("log_input", True)
    if not logs or made_by not in _POSITIVE or bool((values < 0).any()):
        return None
    return (
        f"expects log-rates but gets rates from {made_by.lower()}. Set log_input=false, or "
        "remove it from the model"
    )


_Look = Callable[[Tensor, str, dict[str, Any]], str | None]
_LOOKS: dict[Callable[..., Any], _Look] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll,
    F.kl_div: _kl,
    F.binary_cross_entropy_with_logits: _with_logits,
    F.poisson_nll_loss: _poisson,
    F.ctc_loss: _ctc,
}


def _within_one(values: Tensor) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


def _sum_to_one(values: Tensor, axis: int) -> bool:
    """Whether all rows along an axis of at least two entries sum to 1."""
    sums = values.float().sum(axis)
    return values.shape[axis] > 1 and bool(((sums - 1).abs() < _CLOSE).all())


def _between(values: Tensor) -> str:
    low, high = float(values.min()), float(values.max())
    return f"all {values.numel():,} values are from {low:.3g} to {high:.3g}"


def _maker(values: Tensor) -> str:
    """Return the operation that computed the values, such as Sigmoid; "" if unknown."""
    node: Any = values.grad_fn
    while node is not None:
        name = str(node.name()).partition("Backward")[0]
        if name not in _PASSED:
            return name
        node = node.next_functions[0][0]
    return ""
