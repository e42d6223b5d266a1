"""Losses by name, unreduced: `(outputs, targets) -> (n,)`.

Options are keyword arguments, set as those of a stage: `cross_entropy:label_smoothing=0.1`. A loss
over several entries a sample (positions, pixels, outputs) takes their mean or their sum, as
`per_sample` says: the two differ by the number of entries, so it is recorded with every result.

A weighted loss is weight times loss for each sample. torch's weighted mean divides by the sum of
the weights in the batch, which makes a sample's gradient depend on its neighbours: not here.
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

IGNORED = -100  # torch's own word for a position that does not count
_WORDS = {"reduction": "per_sample"}  # torch's word for it
NO_SMOOTHING = Fraction(0.0)
ONE = Positive(1.0)
TWO = Positive(2.0)
SMALL = Positive(1e-6)
_RESHAPE = "Reshape one of them: broadcasting would mix the samples."
_LAST = (
    " Here the classes seem to be on the last axis, as transformers has them for tokens: use the "
    "loss token_cross_entropy, for logits (n, ..., c) and classes (n, ...); or causal_lm, which "
    "compares each position with the next token."
)


losses: Registry[Loss] = Registry("loss")


def loss(name: str, predictive: Predictive | Gaussian | None = None) -> Callable[[Loss], BoundLoss]:
    """Register a loss under a name; `predictive` is the distribution over labels it stands for.

    Of a model's answer that is no tensor it is given the logits, or the only tensor there is.
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
    """Return the loss of a name such as `mse:per_sample=sum`, or the callable itself."""
    if isinstance(loss, str):
        stage = parse_loss(loss)
        return bound(losses.get(stage.name), stage)
    if callable(loss):
        return loss
    raise SpecError(f"a loss is a name or a callable, not {type(loss).__name__}", where="loss")


def bound(loss: Loss, stage: Stage) -> Loss:
    """Return `loss` with the stage's arguments as its options."""
    if not stage.arguments:
        return loss
    own = signature(loss).parameters
    given = {k if k in own else _WORDS.get(k, k): v for k, v in stage.arguments.items()}
    if len(given) < len(stage.arguments):
        raise SpecError("reduction and per_sample are the same option", where="loss")
    whole = loss if isinstance(loss, BoundLoss) else BoundLoss(loss)

    def factory(**options: Any) -> BoundLoss:
        return BoundLoss(whole.function, options, whole.predictive, of_model=whole.of_model)

    update_wrapper(factory, loss)  # whose signature says which options there are
    try:
        return replace(stage, arguments=given).bind(factory, _CONVERTERS, _leading(loss))
    except SpecError as error:
        error.where = "loss"
        raise


def of_tokens(loss: Loss) -> Loss:
    """Return the form of a loss of ours that keeps positions apart, (n, t); others as they are.

    Raises:
        SpecError: A mean over positions is asked for.
    """
    if not isinstance(loss, BoundLoss) or not reduces(loss):
        return loss
    if loss.options.get("per_sample") == "mean":
        raise SpecError(
            "a token's loss is divided by nothing, so there is no mean over positions",
            where="loss per_sample",
            remedy="Leave it out: with per_sample sum, a sample's row is the sum of its tokens'.",
        )
    kept = loss.options | {"per_sample": "none"}
    return BoundLoss(loss.function, kept, loss.predictive, of_model=loss.of_model)


def reduces(loss: Loss) -> bool:
    """Whether a loss sums or averages over positions, as it is told."""
    try:
        return bool(inspect.signature(loss).parameters["per_sample"].annotation == Normaliser)
    except (KeyError, TypeError, ValueError):
        return False


def options(loss: Loss) -> dict[str, Any]:
    """Return a loss's options by name, with the values in force, as plain data."""
    try:
        own = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have none
        own = []
    values = {p.name: p.default for p in own[_leading(loss) :] if p.default is not p.empty}
    if isinstance(loss, BoundLoss):
        values |= loss.options
    return {name: _plain(value) for name, value in values.items()}


def per_sample_loss(
    values: Tensor, per_sample: Normaliser | Literal["none"], counted: Tensor | None = None
) -> Tensor:
    """Reduce the losses of entries (n, ...) to (n,): their sum, or the mean of those that count.

    Entries outside of `counted` (n, ...) are zero; a sample of which none counts has loss 0.
    With "none" the entries (n, t) are returned as they are, and which of them count.
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
    """Return the weights (c,), one for each entry of `axis`, as a tensor that fits `logits`."""
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
                f"{what} no tensor, which the loss takes, but {type(value).__name__}",
                where="loss",
                remedy="Give a loss (outputs, targets) -> (n,) of your own that takes these.",
            )


def _misfit(what: str, outputs: Tensor, targets: Tensor, remedy: str) -> ModelError:
    """Return the error of outputs and targets that a loss cannot hold against each other."""
    return ModelError(
        f"{what}: outputs are {tuple(outputs.shape)} {outputs.dtype}, "
        f"targets {tuple(targets.shape)} {targets.dtype}",
        where="loss",
        remedy=remedy,
    )


def _on_classes(outputs: Tensor, targets: Tensor) -> str:
    """Return what to do about targets that are no classes (n, ...) of outputs (n, c, ...)."""
    if outputs.dim() > 1 and targets.shape == outputs.shape:
        return (
            "One-hot targets must be classes, y.argmax(1), or probabilities in floating point: a "
            'dataset spec says dtype = { NAME = "float32" }.'
        )
    if outputs.dim() > 1 and targets.shape == (*outputs.shape[:1], *outputs.shape[2:]):
        return (
            'Classes must be int64: a dataset spec says dtype = { NAME = "int64" }. A missing '
            "class makes floating-point numbers of its whole column: leave that sample out."
        )
    wanted = (*outputs.shape[:1], *outputs.shape[2:])
    if outputs.dim() > 1 and targets.dtype == torch.int64 and targets.numel() == prod(wanted):
        shape = list(wanted[1:])
        return (
            f"The classes must be {tuple(wanted)}: a dataset spec says "
            f"reshape = {{ NAME = {shape} }}."
        )
    last = outputs.dim() > 2 and targets.shape == outputs.shape[:-1]
    return (
        "Outputs must be (n, c, ...), c classes on the second axis, and targets the classes "
        f"(n, ...) as int64.{_LAST if last else ''}"
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
    """Return the losses of classes (n, ...), or probabilities (n, c, ...), by logits (n, c, ...).

    Raises:
        ModelError: The shapes or dtypes do not go together.
        IndexError: A class is out of range; who catches it knows the samples.
    """
    _require_tensors(outputs, targets)
    shared = shares and targets.is_floating_point()
    wanted = outputs.shape if shared else (*outputs.shape[:1], *outputs.shape[2:])
    dtypes = torch.int64, torch.uint8, *([targets.dtype] if shared else [])
    if outputs.dim() < 2 or tuple(targets.shape) != tuple(wanted) or targets.dtype not in dtypes:
        raise _misfit(
            "targets are no classes of these outputs",
            outputs,
            targets,
            _on_classes(outputs, targets),
        )
    try:
        own = class_weights(weight, outputs, 1)
        return fn(outputs, targets, own, ignore_index=ignore_index, reduction="none")
    except IndexError as error:
        shape = tuple(outputs.shape)
        text = f"{str(error).rstrip('.')}: outputs {shape} have the classes 0 to {shape[1] - 1}"
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
    """Refuse shapes that differ: torch would broadcast (n, 1) with (n,) to (n, n)."""
    _require_tensors(outputs, targets)
    if outputs.shape != targets.shape:
        raise SpecError(
            f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} differ in shape",
            where="loss",
            remedy=f"The model returned {count(len(outputs), 'row')} for "
            f"{count(len(targets), 'sample')}: give view and reshape no fixed number of samples. "
            f"{PACKED}"
            if outputs.dim() and targets.dim() and len(outputs) != len(targets)
            else _reshaped(outputs, targets),
        )
    return per_sample_loss(fn(outputs, targets, reduction="none", **how), per_sample)


def _two_classes(outputs: Tensor) -> Tensor:
    logits = doubled(outputs)
    return torch.stack([(-logits).sigmoid(), logits.sigmoid()], -1)


def _as_classes(drawn: Tensor, targets: Any, settings: dict[str, Any]) -> Tensor:
    """Entries that the data's labels ignore stay ignored."""
    if not isinstance(targets, Tensor) or targets.shape != drawn.shape:
        return drawn
    return torch.where(targets == settings["ignore_index"], targets, drawn)


def _as_tokens(drawn: Tensor, targets: Any, settings: dict[str, Any]) -> Any:
    """The first token has no prediction: it stays, and so does a mask."""
    if isinstance(targets, tuple):
        return (_as_tokens(drawn, targets[0], settings), *targets[1:])
    if not isinstance(targets, Tensor):
        return torch.cat([torch.zeros_like(drawn[:, :1]), drawn], 1)
    return torch.cat([targets[:, :1], _as_classes(drawn, targets[:, 1:], settings)], 1)


def _as_floats(drawn: Tensor, targets: Any, settings: dict[str, Any]) -> Tensor:
    return drawn.to(targets.dtype if isinstance(targets, Tensor) else torch.get_default_dtype())


_CLASSES = Predictive(lambda outputs: doubled(outputs).movedim(1, -1).softmax(-1), _as_classes)
_LAST_AXIS = Predictive(lambda outputs: doubled(outputs).softmax(-1), _as_classes)
_TOKENS = Predictive(lambda outputs: doubled(outputs[:, :-1, :]).softmax(-1), _as_tokens)
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
    by its class's factor. Entries of the class `ignore_index` count for nothing: `per_sample` is
    the mean over those that count, or their sum, and 0 where none is left.
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

    Of an encoder with a decoder, a masked language model, or a class a token: transformers has the
    classes on the last axis. There may be more position axes, (n, ..., c) with (n, ...), or none.
    The options are those of `cross_entropy`: positions of the class `ignore_index` count for
    nothing. `causal_lm` compares each position with the next token instead.
    """
    _require_tensors(outputs, targets)
    classes = targets.dtype in (torch.int64, torch.uint8)
    if outputs.dim() < 2 or targets.shape != outputs.shape[:-1] or not classes:
        raise _misfit(
            "targets are no classes of these outputs",
            outputs,
            targets,
            "Outputs must be (n, t, c), c classes on the last axis, and targets the classes "
            '(n, t) as int64: a dataset spec says dtype = { NAME = "int64" }. With classes on the '
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

    The options are those of `cross_entropy`.
    """
    values = _in_range(F.nll_loss, outputs, targets, weight=weight, ignore_index=ignore_index)
    return per_sample_loss(values, per_sample, targets != ignore_index)


def _require_probabilities(outputs: Any, targets: Any) -> None:
    _require_tensors(outputs, targets)
    if not targets.is_floating_point():
        remedy = 'They are probabilities: a dataset spec says dtype = { NAME = "float32" }.'
        raise _misfit("targets are no floating-point numbers", outputs, targets, remedy)


@loss("bce_with_logits", _BITS)
def bce_with_logits(
    outputs: Tensor,
    targets: Tensor,
    *,
    pos_weight: tuple[float, ...] | None = None,
    per_sample: Normaliser = "mean",
) -> Tensor:
    """Binary cross-entropy of logits, outputs and targets of one shape (n, ...).

    Targets are probabilities. The positive part is multiplied by `pos_weight`: one factor, or one
    for each entry of the last axis.
    """
    _require_probabilities(outputs, targets)
    if outputs.shape == targets.shape and outputs.dim() == 1:
        outputs, targets = outputs[:, None], targets[:, None]
    if pos_weight is not None and len(pos_weight) == 1:
        pos_weight *= outputs.shape[-1]
    factors = class_weights(pos_weight, outputs, -1)
    fn = F.binary_cross_entropy_with_logits
    return _entrywise(fn, outputs, targets, per_sample, pos_weight=factors)


@loss("bce", _CHANCES)
def bce(outputs: Tensor, targets: Tensor, *, per_sample: Normaliser = "mean") -> Tensor:
    """Binary cross-entropy of probabilities, outputs and targets of one shape (n, ...).

    For logits use `bce_with_logits`.
    """
    _require_probabilities(outputs, targets)
    with suppress(RuntimeError):  # vmap reads no number
        if not ((outputs >= 0) & (outputs <= 1)).all():
            low, high = (float(v) for v in outputs.detach().aminmax())
            raise ModelError(
                f"outputs are from {low:.3g} to {high:.3g}, and bce takes probabilities",
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
    sum is over all entries of a sample, as torch's `batchmean` has it.
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

    The model returns (m, v), means and variances of the targets' shape (n, ...); or log v with
    `log_variance`. Variances below `eps` count as `eps`, as torch's GaussianNLLLoss has it. `full`
    adds ½ log 2π.
    """
    if not (isinstance(outputs, tuple | list) and len(outputs) == 2):
        raise ModelError(
            f"the model returned {type(outputs).__name__}, and gaussian_nll takes (mean, variance)",
            where="loss gaussian_nll",
            remedy="Return the tuple (mean, variance); with log_variance=true, (mean, log).",
        )
    mean, second = outputs
    _require_tensors(second, targets)
    variance = second.exp() if log_variance else second
    if variance.shape != targets.shape:
        raise _misfit("variances have another shape than targets", variance, targets, _RESHAPE)
    with suppress(RuntimeError):  # vmap reads no number
        if (variance < 0).any():
            raise ModelError(
                f"a variance is negative: {float(variance.detach().min()):.3g}",
                where="loss gaussian_nll",
                remedy="Return variances, for example softplus of an output; or their logarithms, "
                "with log_variance=true.",
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
    """Triplet loss max(0, d(a, b) - d(a, c) + margin), d the p-norm of a difference.

    A sample is three inputs, and the model returns the three embeddings: the tuple (a, b, c) of
    anchor, positive and negative (n, d), or one tensor (n, 3, d). Targets are not used. With `swap`
    d(b, c) takes the place of d(a, c) if it is less (Balntas et al. 2016).
    """
    anchor, positive, negative = _embeddings(outputs, 3, "triplet")
    return F.triplet_margin_loss(
        anchor, positive, negative, margin=margin, p=p, swap=swap, reduction="none"
    )


@loss("contrastive")
def contrastive(outputs: Any, targets: Tensor, *, margin: Positive = ONE) -> Tensor:
    """Contrastive loss ½ y d² + ½ (1 - y) max(0, margin - d)², d the distance of two embeddings.

    A sample is a pair of inputs, and the model returns the two embeddings: the tuple (a, b), (n, d)
    each, or one tensor (n, 2, d). Targets y (n,) are 1 for a pair of one kind and 0 for others
    (Hadsell, Chopra & LeCun 2006, where y is the other way round).
    """
    first, second = _embeddings(outputs, 2, "contrastive")
    _require_tensors(first, targets)
    if targets.shape != first.shape[:1]:
        raise _misfit("targets are not one number a pair", first, targets, "Give y (n,), 1 or 0.")
    distance = F.pairwise_distance(first, second)
    alike = targets.to(distance.dtype)
    apart = (margin - distance).clamp(min=0)
    return (alike * distance.square() + (1 - alike) * apart.square()) / 2


def _embeddings(outputs: Any, count: int, name: str) -> tuple[Tensor, ...]:
    """Return the embeddings (n, d) of what a sample consists of."""
    whole = isinstance(outputs, Tensor) and outputs.dim() == 3 and outputs.shape[1] == count
    found = outputs.unbind(1) if whole else outputs
    embeddings = isinstance(found, tuple | list) and len(found) == count
    if embeddings and all(isinstance(t, Tensor) and t.dim() == 2 for t in found):
        return tuple(found)
    shown = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ModelError(
        f"the model returned {shown}, and {name} takes {count} embeddings a sample",
        where=f"loss {name}",
        remedy=f"Return a tuple of {count} tensors (n, d), or one tensor (n, {count}, d).",
    )


@loss("mse", Gaussian(std=0.5**0.5))
def mse(outputs: Tensor, targets: Tensor, *, per_sample: Normaliser = "mean") -> Tensor:
    """Squared error, outputs and targets of one shape (n, ...)."""
    return _entrywise(F.mse_loss, outputs, targets, per_sample)


@loss("l1")
def l1(outputs: Tensor, targets: Tensor, *, per_sample: Normaliser = "mean") -> Tensor:
    """Absolute error, outputs and targets of one shape (n, ...)."""
    return _entrywise(F.l1_loss, outputs, targets, per_sample)


@loss("huber")
def huber(
    outputs: Tensor, targets: Tensor, *, delta: Positive = ONE, per_sample: Normaliser = "mean"
) -> Tensor:
    """Huber's loss: e²/2 up to |e| = δ, then δ(|e| − δ/2); outputs and targets of one shape."""
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
    """Poisson negative log-likelihood of log-rates, outputs and targets of one shape (n, ...).

    With `log_input=false` outputs are the rates themselves. `full` adds Stirling's approximation of
    log(target!), which has no gradient.
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
    """Next-token cross-entropy of logits (n, t, v) with the token ids (n, t) they were fed.

    The logits at position t are held against token t + 1; the last logits and the first token have
    no partner. Which tokens count (those of a completion, not its prompt; no padding) is said by
    labels `ignore_index` in the place of the others, or by a mask: targets are (tokens, mask), a
    token counts where the mask (n, t) of whole numbers or booleans is above 0. `mask` is the name
    of the data's column with it, which a run adds to its targets. The other options are those of
    `cross_entropy`: a sample's mean is over its own counted tokens, not over those of a batch.
    """
    if isinstance(targets, tuple) and len(targets) == 2:
        targets = _masked(targets[0], targets[1], ignore_index)
    elif mask is not None:
        raise SpecError(
            f"there is no mask {mask!r} beside the targets",
            where="loss causal_lm",
            remedy="Give targets as (tokens, mask).",
        )
    _require_tensors(outputs, targets)
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


def _masked(tokens: Tensor, mask: Tensor, ignored: int) -> Tensor:
    _require_tensors(tokens, mask)
    if mask.shape != tokens.shape or mask.is_floating_point() or mask.is_complex():
        raise SpecError(
            f"the mask is {tuple(mask.shape)} {mask.dtype}, the tokens are {tuple(tokens.shape)}",
            where="loss causal_lm",
            remedy="A mask has a whole number or a boolean for each token: 1 where it counts.",
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
    """Connectionist temporal classification of logits (n, t, v), label sequences (n, s).

    Graves et al. 2006. The logarithms of probabilities serve as logits too. Targets are negative
    where a sequence has ended; or they are a tuple of labels, lengths of the outputs (n,), and
    lengths of the labels (n,). The label of no label is `blank`. With `zero_infinity`, loss and
    gradient are zero where the labels cannot fit into the positions. `per_sample` is the negative
    log-likelihood ("sum"), or that over the number of labels, as torch's mean has it.
    """
    labels = targets[0] if isinstance(targets, tuple) and len(targets) == 3 else targets
    _require_tensors(outputs, labels)
    whole = labels.dtype in (torch.int64, torch.int32)
    if outputs.dim() != 3 or labels.dim() != 2 or len(labels) != len(outputs) or not whole:
        remedy = "Logits must be (n, t, v), and labels whole numbers (n, s)."
        raise _misfit("targets are no labels of these outputs", outputs, labels, remedy)
    n, t, v = outputs.shape
    if isinstance(targets, Tensor):
        inside = targets >= 0
        labels, label_lengths = targets.clamp(min=0), inside.sum(1)
        lengths = torch.full((n,), t, device=outputs.device)
    else:
        labels, lengths, label_lengths = targets
        inside = torch.arange(labels.shape[1], device=labels.device) < label_lengths[:, None]
    safe = labels.clamp(0, v - 1)  # for others torch would read memory beyond the logits
    wrong = inside & (labels != safe)
    with suppress(RuntimeError):  # vmap reads no number: there, such a sample's loss is NaN
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
