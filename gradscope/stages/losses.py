"""Losses by name, unreduced: `(outputs, targets) -> (n,)`.

Options are keyword arguments and are written like a stage's: `cross_entropy:label_smoothing=0.1`.
A sample may have several entries (positions, pixels, outputs). `per_sample` says whether the loss
is their mean or their sum. The two differ by the number of entries, so every result records it.

A weighted loss is weight times loss for each sample. torch's weighted mean also divides by the sum
of the weights in the batch. A sample's gradient would then depend on the rest of the batch.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial, update_wrapper, wraps
from math import inf, log, pi, prod
from typing import Any, Literal, NewType

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradscope.config import parse_loss
from gradscope.core.batch import output
from gradscope.core.grammar import Stage, entries, signature
from gradscope.core.precision import doubled
from gradscope.core.registry import Registry
from gradscope.core.texts import count
from gradscope.errors import ModelError, SpecError
from gradscope.model.locate import PACKED
from gradscope.model.problem import BoundLoss, Gaussian, Loss, Predictive, is_model_loss

Normaliser = Literal["mean", "sum"]
Fraction = NewType("Fraction", float)
Positive = NewType("Positive", float)

IGNORED = -100  # torch's default `ignore_index`
_WORDS = {"reduction": "per_sample"}  # torch's name of the option
NO_SMOOTHING = Fraction(0.0)
ONE = Positive(1.0)
TWO = Positive(2.0)
SMALL = Positive(1e-6)
_RESHAPE = "Reshape one of them: broadcasting would mix the samples."
_LAST = (
    " Here the classes seem to be on the last axis, as in transformers models for tokens. Use the "
    "loss token_cross_entropy for logits (n, ..., c) and classes (n, ...), or causal_lm to "
    "compare each position with the next token."
)


losses: Registry[Loss] = Registry("loss")


def loss(name: str, predictive: Predictive | Gaussian | None = None) -> Callable[[Loss], BoundLoss]:
    """Register a loss under a name; `predictive` is the distribution over labels it assumes.

    If the model does not return a tensor, the loss receives the logits, or the only tensor in it.
    """

    def add(function: Loss) -> BoundLoss:
        @wraps(function)
        def of_output(answer: Any, targets: Any, **options: Any) -> Tensor:
            return function(output(answer), targets, **options)

        whole = function if is_model_loss(function) else of_output
        bound = BoundLoss(whole, predictive=predictive)
        losses.register(name)(bound)
        return bound

    return add


def resolve(loss: str | Loss) -> Loss:
    """Return the loss for a name such as `mse:per_sample=sum`; a callable is returned unchanged."""
    if isinstance(loss, str):
        stage = parse_loss(loss)
        return bound(losses.get(stage.name), stage)
    if callable(loss):
        return loss
    raise SpecError(f"loss must be a name or a callable, not {type(loss).__name__}", where="loss")


def bound(loss: Loss, stage: Stage) -> Loss:
    """Return `loss` with the stage's arguments as its options."""
    if not stage.arguments:
        return loss
    own = signature(loss).parameters
    given = {k if k in own else _WORDS.get(k, k): v for k, v in stage.arguments.items()}
    if len(given) < len(stage.arguments):
        raise SpecError(
            "reduction and per_sample are the same option",
            where="loss",
            remedy="Give per_sample only.",
        )
    whole = loss if isinstance(loss, BoundLoss) else BoundLoss(loss)

    def factory(**options: Any) -> BoundLoss:
        return BoundLoss(whole.function, options, whole.predictive, of_model=whole.of_model)

    update_wrapper(factory, loss)  # the signature of `loss` lists the options
    try:
        return replace(stage, arguments=given).bind(factory, _CONVERTERS, _leading(loss))
    except SpecError as error:
        error.where = "loss"
        raise


def of_tokens(loss: Loss) -> Loss:
    """Return a built-in loss with one value a position (n, t); return a user's loss unchanged.

    Raises:
        SpecError: The loss asks for a mean over positions.
    """
    if not isinstance(loss, BoundLoss) or not reduces(loss):
        return loss
    if loss.options.get("per_sample") == "mean":
        raise SpecError(
            "per_sample=mean cannot be combined with one row a token: a token's loss is not "
            "averaged over positions",
            where="loss per_sample",
            remedy="Leave per_sample out. The sum of a sample's token rows is its row with "
            "per_sample=sum.",
        )
    kept = loss.options | {"per_sample": "none"}
    return BoundLoss(loss.function, kept, loss.predictive, of_model=loss.of_model)


def reduces(loss: Loss) -> bool:
    """Whether a loss has the option `per_sample`, the sum or mean over positions."""
    try:
        return bool(inspect.signature(loss).parameters["per_sample"].annotation == Normaliser)
    except (KeyError, TypeError, ValueError):
        return False


def options(loss: Loss) -> dict[str, Any]:
    """Return a loss's options by name, with the values in force, as plain data."""
    try:
        own = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError):  # built-in functions may lack a signature
        own = []
    values = {p.name: p.default for p in own[_leading(loss) :] if p.default is not p.empty}
    if isinstance(loss, BoundLoss):
        values |= loss.options
    return {name: _plain(value) for name, value in values.items()}


def per_sample_loss(
    values: Tensor, per_sample: Normaliser | Literal["none"], counted: Tensor | None = None
) -> Tensor:
    """Reduce the losses of entries (n, ...) to (n,): the sum, or the mean over counted entries.

    Entries outside of `counted` (n, ...) must be zero. A sample without counted entries has loss 0.
    With "none" the function returns the entries (n, t) and their flags `counted` (n, t).
    """
    if values.dim() == 1:
        return values
    rows = values.flatten(1)
    if per_sample == "none":
        return rows, None if counted is None else counted.flatten(1)  # type: ignore[return-value]
    if per_sample == "sum":
        return rows.sum(1)
    if counted is None:
        return rows.mean(1)
    return rows.sum(1) / counted.flatten(1).sum(1).clamp(min=1)


def class_weights(weight: tuple[float, ...] | None, logits: Tensor, axis: int) -> Tensor | None:
    """Return the weights (c,), one for each entry of `axis`, with dtype and device of `logits`."""
    if weight is None:
        return None
    if len(weight) != logits.shape[axis]:
        raise SpecError(
            f"{len(weight)} weights are given for {logits.shape[axis]} classes: outputs are "
            f"{tuple(logits.shape)}, with classes on axis {axis}",
            where="loss",
            remedy="Give one weight for each class.",
        )
    return torch.tensor(weight, dtype=logits.dtype, device=logits.device)


def _leading(loss: Loss) -> int:
    return 3 if is_model_loss(loss) else 2


def _fraction(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise SpecError(f"must be from 0 to 1, not {text}")
    return float(text)


def _positive(text: str) -> float:
    if not 0 < float(text) < inf:
        raise SpecError(f"must be positive, not {text}")
    return float(text)


def _weights(text: str) -> tuple[float, ...]:
    values = tuple(map(float, entries(text)))
    if not all(0 <= value < inf for value in values):
        raise SpecError(f"weights must not be negative: {text}")
    return values


_CONVERTERS = {Fraction: _fraction, Positive: _positive, tuple[float, ...]: _weights}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _require_tensors(outputs: Any, targets: Any) -> None:
    for what, value in (("what the model returns is", outputs), ("the targets are", targets)):
        if not isinstance(value, Tensor):
            raise ModelError(
                f"{what} not a tensor but {type(value).__name__}",
                where="loss",
                remedy="Give targets: this loss needs them."
                if value is None
                else "Write your own loss (outputs, targets) -> (n,) for this type.",
            )


def _misfit(what: str, outputs: Tensor, targets: Tensor, remedy: str) -> ModelError:
    """Return the error for outputs and targets that a loss cannot compare."""
    return ModelError(
        f"{what}: outputs are {tuple(outputs.shape)} {outputs.dtype}, "
        f"targets {tuple(targets.shape)} {targets.dtype}",
        where="loss",
        remedy=remedy,
    )


def _on_classes(outputs: Tensor, targets: Tensor) -> str:
    """Return the remedy for targets that are not classes (n, ...) of outputs (n, c, ...)."""
    if outputs.dim() > 1 and targets.shape == outputs.shape:
        return (
            "Convert one-hot targets to classes with y.argmax(1), or to floating-point "
            'probabilities: in a dataset spec, write dtype = { NAME = "float32" }.'
        )
    if outputs.dim() > 1 and targets.shape == (*outputs.shape[:1], *outputs.shape[2:]):
        return (
            'Convert the classes to int64: in a dataset spec, write dtype = { NAME = "int64" }. If '
            "a class is missing in a column, the whole column is read as floating point: remove "
            "that sample."
        )
    wanted = (*outputs.shape[:1], *outputs.shape[2:])
    if outputs.dim() > 1 and targets.dtype == torch.int64 and targets.numel() == prod(wanted):
        shape = list(wanted[1:])
        return (
            f"Reshape the classes to {tuple(wanted)}: in a dataset spec, write "
            f"reshape = {{ NAME = {shape} }}."
        )
    last = outputs.dim() > 2 and targets.shape == outputs.shape[:-1]
    return (
        "Give outputs (n, c, ...) with c classes on the second axis, and classes (n, ...) as int64 "
        f"targets.{_LAST if last else ''}"
    )


def _in_range(
    fn: Callable[..., Tensor],
    outputs: Tensor,
    targets: Tensor,
    weight: tuple[float, ...] | None,
    ignore_index: int,
    *,
    shares: bool = False,
) -> Tensor:
    """Return the losses of logits (n, c, ...) and classes (n, ...) or probabilities (n, c, ...).

    Raises:
        ModelError: The shapes or dtypes do not match.
        IndexError: A class is out of range; the caller knows the samples.
    """
    _require_tensors(outputs, targets)
    shared = shares and targets.is_floating_point()
    wanted = outputs.shape if shared else (*outputs.shape[:1], *outputs.shape[2:])
    dtypes = torch.int64, torch.uint8, *([targets.dtype] if shared else [])
    if outputs.dim() < 2 or tuple(targets.shape) != tuple(wanted) or targets.dtype not in dtypes:
        raise _misfit(
            "targets do not fit the outputs as classes",
            outputs,
            targets,
            _on_classes(outputs, targets),
        )
    try:
        own = class_weights(weight, outputs, 1)
        return fn(outputs, targets, own, ignore_index=ignore_index, reduction="none")
    except IndexError as error:
        shape = tuple(outputs.shape)
        text = f"{str(error).rstrip('.')}: outputs {shape} have classes 0 to {shape[1] - 1}"
        raise IndexError(text) from error


def _reshaped(outputs: Tensor, targets: Tensor) -> str:
    """Return what gives targets the shape of outputs (n, ...)."""
    shape = list(outputs.shape[1:])
    if not outputs.dim() or outputs.numel() != targets.numel():
        return _RESHAPE
    return (
        f"A dataset spec says reshape = {{ NAME = {shape} }} of the targets; in Python that is "
        f"targets.reshape({', '.join(['-1', *map(str, shape)])}). Else broadcasting mixes samples."
    )


def _entrywise(
    fn: Callable[..., Tensor], outputs: Tensor, targets: Tensor, per_sample: Normaliser, **how: Any
) -> Tensor:
    """Return a loss of equal shapes, else raise: torch would broadcast (n, 1), (n,) to (n, n)."""
    _require_tensors(outputs, targets)
    if outputs.shape != targets.shape:
        raise SpecError(
            f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} differ in shape",
            where="loss",
            remedy=f"The model returned {count(len(outputs), 'row')} for "
            f"{count(len(targets), 'sample')}: use no fixed number of samples in view and reshape. "
            f"{PACKED}"
            if outputs.dim() and targets.dim() and len(outputs) != len(targets)
            else _reshaped(outputs, targets),
        )
    return per_sample_loss(fn(outputs, targets, reduction="none", **how), per_sample)


def _two_classes(outputs: Tensor) -> Tensor:
    logits = doubled(outputs)
    return torch.stack([(-logits).sigmoid(), logits.sigmoid()], -1)


def _as_classes(drawn: Tensor, targets: Any, settings: dict[str, Any]) -> Tensor:
    """Return drawn labels; entries ignored in the data's labels stay ignored."""
    if not isinstance(targets, Tensor) or targets.shape != drawn.shape:
        return drawn
    return torch.where(targets == settings["ignore_index"], targets, drawn)


def _as_tokens(drawn: Tensor, targets: Any, settings: dict[str, Any]) -> Any:
    """Return drawn tokens; the first token (which has no prediction) and a mask stay unchanged."""
    if isinstance(targets, tuple):
        return (_as_tokens(drawn, targets[0], settings), *targets[1:])
    if not isinstance(targets, Tensor):
        return torch.cat([torch.zeros_like(drawn[:, :1]), drawn], 1)
    return torch.cat([targets[:, :1], _as_classes(drawn, targets[:, 1:], settings)], 1)


def _as_floats(drawn: Tensor, targets: Any, settings: dict[str, Any]) -> Tensor:
    return drawn.to(targets.dtype if isinstance(targets, Tensor) else torch.get_default_dtype())


def _chances(logits: Tensor) -> Tensor:
    """Return the probabilities of logits (..., c); torch's softmax takes 3 times as long for few c.

    As with softmax, NaN or +inf in a row makes all of it NaN, and -inf gives 0.
    """
    found = (logits - logits.amax(-1, keepdim=True)).exp()
    return found / (found @ found.new_ones(logits.shape[-1], 1))


_CLASSES = Predictive(lambda outputs: _chances(doubled(outputs).movedim(1, -1)), _as_classes)
_LAST_AXIS = Predictive(lambda outputs: _chances(doubled(outputs)), _as_classes)
_TOKENS = Predictive(lambda outputs: _chances(doubled(outputs[:, :-1, :])), _as_tokens)
_BITS = Predictive(_two_classes, _as_floats)
_CHANCES = Predictive(lambda outputs: torch.stack([1 - outputs, outputs], -1), _as_floats)


@loss("cross_entropy", _CLASSES)
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

    `label_smoothing` is the share of a uniform target. `weight` multiplies the loss of each entry
    by the factor of its class. Entries of the class `ignore_index` do not count. `per_sample` is
    the mean or the sum over the counted entries. It is 0 if a sample has no counted entry.
    """
    values = _in_range(
        partial(F.cross_entropy, label_smoothing=label_smoothing),
        outputs,
        targets,
        weight=weight,
        ignore_index=ignore_index,
        shares=True,
    )
    counted = None if targets.is_floating_point() else targets != ignore_index
    return per_sample_loss(values, per_sample, counted)


@loss("token_cross_entropy", _LAST_AXIS)
def token_cross_entropy(
    outputs: Tensor,
    targets: Tensor,
    *,
    label_smoothing: Fraction = NO_SMOOTHING,
    weight: tuple[float, ...] | None = None,
    ignore_index: int = IGNORED,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Cross-entropy of logits (n, t, c) with the classes (n, t) of the same positions, no shift.

    Use it for encoder-decoder models, masked language models and token classification, where
    transformers models return the classes on the last axis. It also takes more or fewer position
    axes, (n, ..., c) with (n, ...). It has the options of `cross_entropy`. Positions of the class
    `ignore_index` do not count. `causal_lm` compares each position with the next token instead.
    """
    _require_tensors(outputs, targets)
    classes = targets.dtype in (torch.int64, torch.uint8)
    if outputs.dim() < 2 or targets.shape != outputs.shape[:-1] or not classes:
        raise _misfit(
            "targets do not fit the outputs as classes",
            outputs,
            targets,
            "Give outputs (n, t, c) with c classes on the last axis, and classes (n, t) as int64 "
            'targets. In a dataset spec, write dtype = { NAME = "int64" }. With classes on the '
            "second axis, (n, c, ...), use the loss cross_entropy.",
        )
    return cross_entropy(
        outputs.movedim(-1, 1),
        targets,
        label_smoothing=label_smoothing,
        weight=weight,
        ignore_index=ignore_index,
        per_sample=per_sample,
    )


@loss("nll", _CLASSES)
def nll(
    outputs: Tensor,
    targets: Tensor,
    *,
    weight: tuple[float, ...] | None = None,
    ignore_index: int = IGNORED,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Negative log-likelihood of log-probabilities (n, c, ...) with classes (n, ...).

    It has the options of `cross_entropy`.
    """
    values = _in_range(F.nll_loss, outputs, targets, weight=weight, ignore_index=ignore_index)
    return per_sample_loss(values, per_sample, targets != ignore_index)


@loss("margin", _CLASSES._replace(of_loss=False))
def margin(
    outputs: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORED,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Minus the margin of class y, log Σ_{j≠y} exp z_j - z_y, of logits z (n, c, ...).

    The margin is the log odds of class y, log p_y - log(1 - p_y), by which TRAK measures queries
    (Park et al. 2023, arXiv:2303.14186). The loss is its negative, so that less is better, as with
    every loss. Classes are (n, ...). `ignore_index` and `per_sample` are as in `cross_entropy`.
    """
    values = _in_range(_less_the_margin, outputs, targets, weight=None, ignore_index=ignore_index)
    return per_sample_loss(values, per_sample, targets != ignore_index)


def _less_the_margin(
    outputs: Tensor, targets: Tensor, weight: None, *, ignore_index: int, reduction: str
) -> Tensor:
    """Return -log p_y + log(1 - p_y) of each entry, 0 for ignored entries."""
    classes = outputs.shape[1]
    if classes < 2:
        raise _misfit(
            "a margin needs at least two classes", outputs, targets, "Give logits (n, c, ...)."
        )
    values = F.cross_entropy(outputs, targets, ignore_index=ignore_index, reduction=reduction)
    every = torch.arange(classes, device=outputs.device).reshape(-1, *[1] * (targets.dim() - 1))
    others = outputs.masked_fill(targets.unsqueeze(1) == every, -inf)
    rest = others.logsumexp(1) - outputs.logsumexp(1)
    return values + rest.masked_fill(targets == ignore_index, 0.0)


def _probabilities(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return targets from 0 to 1, the integers 0 and 1 in the dtype of the outputs."""
    _require_tensors(outputs, targets)
    with suppress(RuntimeError):  # vmap cannot read a number
        if ((targets < 0) | (targets > 1)).any():  # NaN is reported with the sample's losses
            low, high = (float(v) for v in targets.aminmax())
            raise _misfit(
                f"targets are from {low:.3g} to {high:.3g}, but must be probabilities from 0 to 1",
                outputs,
                targets,
                "For classes 0, 1, 2, ... use the loss cross_entropy, with an output for each.",
            )
    return targets if targets.is_floating_point() else targets.to(outputs.dtype)


@loss("bce_with_logits", _BITS)
def bce_with_logits(
    outputs: Tensor,
    targets: Tensor,
    *,
    pos_weight: tuple[float, ...] | None = None,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Binary cross-entropy of logits; outputs and targets have the same shape (n, ...).

    Targets are probabilities, or the integers 0 and 1. `pos_weight` multiplies the positive part.
    It has a single factor, or a factor for each entry of the last axis.
    """
    targets = _probabilities(outputs, targets)
    if outputs.shape == targets.shape and outputs.dim() == 1:
        outputs, targets = outputs[:, None], targets[:, None]
    if pos_weight is not None and len(pos_weight) == 1:
        pos_weight *= outputs.shape[-1]
    factors = class_weights(pos_weight, outputs, -1)
    fn = F.binary_cross_entropy_with_logits
    return _entrywise(fn, outputs, targets, per_sample, pos_weight=factors)


@loss("bce", _CHANCES)
def bce(outputs: Tensor, targets: Tensor, *, per_sample: Normaliser = "mean") -> Tensor:
    """Binary cross-entropy of probabilities; outputs and targets have the same shape (n, ...).

    For logits use `bce_with_logits`.
    """
    targets = _probabilities(outputs, targets)
    with suppress(RuntimeError):  # vmap cannot read a number
        if not ((outputs >= 0) & (outputs <= 1)).all():
            low, high = (float(v) for v in outputs.detach().aminmax())
            raise ModelError(
                f"outputs are from {low:.3g} to {high:.3g}, but bce needs probabilities from 0 to "
                "1",
                where="loss bce",
                remedy="For logits use the loss bce_with_logits.",
            )
    return _entrywise(F.binary_cross_entropy, outputs, targets, per_sample)


@loss("kl")
def kl(
    outputs: Tensor, targets: Tensor, *, log_target: bool = False, per_sample: Normaliser = "sum"
) -> Tensor:
    """Kullback-Leibler divergence Σ t (log t - log p) of log-probabilities log p (n, c, ...).

    Targets are the probabilities t of the same shape, or their logarithms with `log_target`. The
    sum is over all entries of a sample, as in torch's `batchmean`.
    """
    return _entrywise(F.kl_div, outputs, targets, per_sample, log_target=log_target)


@loss("gaussian_nll")
def gaussian_nll(
    outputs: Any,
    targets: Tensor,
    *,
    log_variance: bool = False,
    full: bool = False,
    eps: Positive = SMALL,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Negative log-likelihood ½(log v + (y - m)² / v) of a normal distribution.

    The model returns (m, v), means and variances with the targets' shape (n, ...). With
    `log_variance` it returns (m, log v). Variances below `eps` are replaced by `eps`, as in torch's
    GaussianNLLLoss. `full` adds ½ log 2π.
    """
    if not (isinstance(outputs, tuple | list) and len(outputs) == 2):
        raise ModelError(
            f"the model returned {type(outputs).__name__}, but gaussian_nll needs a tuple (mean, "
            "variance)",
            where="loss gaussian_nll",
            remedy="Return (mean, variance), or (mean, log variance) with log_variance=true.",
        )
    mean, second = outputs
    _require_tensors(second, targets)
    variance = second.exp() if log_variance else second
    if variance.shape != targets.shape:
        raise _misfit("variances and targets differ in shape", variance, targets, _RESHAPE)
    with suppress(RuntimeError):  # vmap cannot read a number
        if (variance < 0).any():
            raise ModelError(
                f"a variance is negative: {float(variance.detach().min()):.3g}",
                where="loss gaussian_nll",
                remedy="Return positive variances, for example softplus of an output. Or return "
                "log variances and set log_variance=true.",
            )
    bounded = variance + (variance.clamp(min=eps) - variance).detach()

    def likelihood(mean: Tensor, targets: Tensor, reduction: str) -> Tensor:
        found: Tensor = (bounded.log() + (targets - mean).square() / bounded) / 2
        return found + log(2 * pi) / 2 if full else found

    return _entrywise(likelihood, mean, targets, per_sample)


@loss("triplet")
def triplet(
    outputs: Any, targets: Any, *, margin: Positive = ONE, p: Positive = TWO, swap: bool = False
) -> Tensor:
    """Triplet loss max(0, d(a, b) - d(a, c) + margin), where d is the p-norm of a difference.

    A sample has three inputs. The model returns their embeddings: the tuple (a, b, c) of anchor,
    positive and negative (n, d), or one tensor (n, 3, d). Targets are not used. With `swap`,
    d(a, c) is replaced by d(b, c) if that is smaller (Balntas et al. 2016).
    """
    anchor, positive, negative = _embeddings(outputs, 3, "triplet")
    return F.triplet_margin_loss(
        anchor, positive, negative, margin=margin, p=p, swap=swap, reduction="none"
    )


@loss("contrastive")
def contrastive(outputs: Any, targets: Tensor, *, margin: Positive = ONE) -> Tensor:
    """Contrastive loss ½ y d² + ½ (1 - y) max(0, margin - d)² of embeddings with distance d.

    A sample is a pair of inputs. The model returns their embeddings: the tuple (a, b), (n, d) each,
    or one tensor (n, 2, d). Targets y (n,) are 1 for similar pairs and 0 for dissimilar pairs
    (Hadsell, Chopra & LeCun 2006, where y has the opposite meaning).
    """
    first, second = _embeddings(outputs, 2, "contrastive")
    _require_tensors(first, targets)
    if targets.shape != first.shape[:1]:
        raise _misfit(
            "targets must have one number a pair", first, targets, "Give y (n,) of 1 and 0."
        )
    distance = F.pairwise_distance(first, second)
    alike = targets.to(distance.dtype)
    apart = (margin - distance).clamp(min=0)
    return (alike * distance.square() + (1 - alike) * apart.square()) / 2


def _embeddings(outputs: Any, count: int, name: str) -> tuple[Tensor, ...]:
    """Return the `count` embeddings (n, d) of each sample."""
    whole = isinstance(outputs, Tensor) and outputs.dim() == 3 and outputs.shape[1] == count
    found = outputs.unbind(1) if whole else outputs
    embeddings = isinstance(found, tuple | list) and len(found) == count
    if embeddings and all(isinstance(t, Tensor) and t.dim() == 2 for t in found):
        return tuple(found)
    shown = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ModelError(
        f"the model returned {shown}, but {name} needs {count} embeddings a sample",
        where=f"loss {name}",
        remedy=f"Return a tuple of {count} tensors (n, d), or one tensor (n, {count}, d).",
    )


@loss("mse", Gaussian(std=0.5**0.5))
def mse(outputs: Tensor, targets: Tensor, *, per_sample: Normaliser = "mean") -> Tensor:
    """Squared error; outputs and targets have the same shape (n, ...)."""
    return _entrywise(F.mse_loss, outputs, targets, per_sample)


@loss("l1")
def l1(outputs: Tensor, targets: Tensor, *, per_sample: Normaliser = "mean") -> Tensor:
    """Absolute error; outputs and targets have the same shape (n, ...)."""
    return _entrywise(F.l1_loss, outputs, targets, per_sample)


@loss("huber")
def huber(
    outputs: Tensor, targets: Tensor, *, delta: Positive = ONE, per_sample: Normaliser = "mean"
) -> Tensor:
    """Huber loss: e²/2 up to |e| = δ, then δ(|e| − δ/2); outputs and targets of the same shape."""
    return _entrywise(F.huber_loss, outputs, targets, per_sample, delta=delta)


@loss("poisson_nll")
def poisson_nll(
    outputs: Tensor,
    targets: Tensor,
    *,
    log_input: bool = True,
    full: bool = False,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Poisson negative log-likelihood of log-rates; outputs and targets of the same shape (n, ...).

    With `log_input=false`, outputs are rates instead of log-rates. `full` adds Stirling's
    approximation of log(target!), which has no gradient.
    """
    given = {"log_input": log_input, "full": full}
    return _entrywise(F.poisson_nll_loss, outputs, targets, per_sample, **given)


@loss("causal_lm", _TOKENS)
def causal_lm(
    outputs: Tensor,
    targets: Any,
    *,
    label_smoothing: Fraction = NO_SMOOTHING,
    weight: tuple[float, ...] | None = None,
    ignore_index: int = IGNORED,
    mask: str | None = None,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Next-token cross-entropy of logits (n, t, v) with the model's input tokens (n, t).

    The logits at position t are compared with token t + 1. The last logits and the first token are
    not used. To leave out prompt or padding tokens, set their targets to `ignore_index`. Or give
    the targets as (tokens, mask): a token counts if the mask (n, t), integer or boolean, is above
    0. In a run, `mask` names the data column to use as the mask. The remaining options are as in
    `cross_entropy`. A sample's mean is over its own counted tokens, not over the batch.
    """
    if isinstance(targets, tuple) and len(targets) == 2:
        targets = _masked(targets[0], targets[1], ignore_index)
    elif mask is not None:
        raise SpecError(
            f"mask={mask!r} is set, but the targets contain no mask",
            where="loss causal_lm",
            remedy="Give targets as (tokens, mask).",
        )
    _require_tensors(outputs, targets)
    if outputs.dim() != 3 or targets.shape != outputs.shape[:2] or targets.shape[1] < 2:
        raise SpecError(
            f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} do not fit",
            where="loss causal_lm",
            remedy="Give logits (n, t, v) and targets (n, t), with two positions or more.",
        )
    return cross_entropy(
        outputs[:, :-1].transpose(1, 2),
        targets[:, 1:],
        label_smoothing=label_smoothing,
        weight=weight,
        ignore_index=ignore_index,
        per_sample=per_sample,
    )


def _masked(tokens: Tensor, mask: Tensor, ignored: int) -> Tensor:
    _require_tensors(tokens, mask)
    if mask.shape != tokens.shape or mask.is_floating_point() or mask.is_complex():
        raise SpecError(
            f"the mask {tuple(mask.shape)} {mask.dtype} does not fit the tokens "
            f"{tuple(tokens.shape)}",
            where="loss causal_lm",
            remedy="Give a mask with an integer or boolean for each token: 1 if the token counts.",
        )
    return tokens.masked_fill(mask <= 0, ignored)


@loss("ctc")
def ctc(
    outputs: Tensor,
    targets: Any,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
    per_sample: Normaliser = "sum",
) -> Tensor:
    """Connectionist temporal classification of logits (n, t, v) with label sequences (n, s).

    Source: Graves et al. 2006. Log-probabilities can be given as logits. Targets are negative after
    the end of a sequence. Or they are a tuple of labels, output lengths (n,) and label lengths
    (n,). `blank` is the index of the blank label. With `zero_infinity`, loss and gradient are zero
    where the labels do not fit into the positions. `per_sample` is the negative log-likelihood
    ("sum"), or the negative log-likelihood divided by the number of labels ("mean", as in torch).
    """
    labels = targets[0] if isinstance(targets, tuple) and len(targets) == 3 else targets
    _require_tensors(outputs, labels)
    whole = labels.dtype in (torch.int64, torch.int32)
    if outputs.dim() != 3 or labels.dim() != 2 or len(labels) != len(outputs) or not whole:
        remedy = "Give logits (n, t, v) and integer labels (n, s)."
        raise _misfit("targets do not fit the outputs as labels", outputs, labels, remedy)
    n, t, v = outputs.shape
    if isinstance(targets, Tensor):
        inside = targets >= 0
        labels, label_lengths = targets.clamp(min=0), inside.sum(1)
        lengths = torch.full((n,), t, device=outputs.device)
    else:
        labels, lengths, label_lengths = targets
        inside = torch.arange(labels.shape[1], device=labels.device) < label_lengths[:, None]
    safe = labels.clamp(0, v - 1)  # with larger labels torch would read memory beyond the logits
    wrong = inside & (labels != safe)
    with suppress(RuntimeError):  # vmap cannot read a number: the loss of such a sample is NaN
        if wrong.any():
            first = int(labels[wrong][0])
            raise IndexError(f"Target {first} is out of bounds: labels are 0 to {v - 1}")
    values = F.ctc_loss(
        outputs.log_softmax(-1).transpose(0, 1),
        safe,
        lengths,
        label_lengths,
        blank=blank,
        reduction="none",
        zero_infinity=zero_infinity,
    ).masked_fill(wrong.any(1), torch.nan)
    return values if per_sample == "sum" else values / label_lengths.clamp(min=1)
