"""Gradients held against ordinary autograd's: each parameter by itself, in its own precision.

What is compared is Σ wᵢ gᵢ with ∇ Σ wᵢ Lᵢ; a single sample has weight 1. Where the two differ by
more than the tolerance, rounding may be to blame, and has to show it: by the gradient of the same
samples in other company, for parameters whose gradient all but vanishes; or in float64, by what
other last digits of the parameters do to the gradient, as where an activation is at its kink.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradscope.backends.base import refusing
from gradscope.backends.loop import dense
from gradscope.blocks import Gradients
from gradscope.blocks.base import precise
from gradscope.core.batch import Batch
from gradscope.core.problem import Problem, double_precision
from gradscope.core.rounding import nearby
from gradscope.core.scalar import summed
from gradscope.errors import ModelError, RefusedError

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_NOISE = 1e3  # roundings, relative to the whole gradient, that may be all there is of a parameter's
_LAST_DIGITS = 64.0  # the same, where nobody can tell what is rounding
_LUCK = 10.0  # times that two roundings may differ from what two others do
_TRIALS = 8  # changes of the parameters in their last digits
_MOST = 0.5  # of a gradient that may be rounding, for it to be proved
_KINKS = 3.0  # times the largest change of the gradient that these make


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        error: The relative error of the parameter that is worst off.
        parameter: Which one it is.
        tolerance: The largest error of it that passes.
        dtype: The precision in which it was judged.
        small: Parameters whose gradient is no more than rounding: nothing is proved of them.
    """

    error: float
    parameter: str
    tolerance: float
    dtype: str = ""
    small: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance

    @property
    def rank(self) -> float:
        """How near it is to failing, from 1 on beyond that."""
        return _rank(self.error, self.tolerance)


NOTHING = Check(0.0, "", 0.0)  # where there was nothing to compare


@dataclass(frozen=True)
class Claim:
    """What a backend says about a weighted sum of samples' gradients.

    Attributes:
        weights: (n,), of the samples' losses.
        values: {name: Σ wᵢ gᵢ (*shape)}.
        sizes: {name: (Σ wᵢ² ‖gᵢ‖²)^½}.
    """

    weights: Tensor
    values: Mapping[str, Tensor]
    sizes: Mapping[str, float]

    @classmethod
    def of(cls, gradients: Gradients, weights: Tensor) -> "Claim":
        """Read it off the gradients of n samples."""
        squares = weights.double().square()
        sizes = {
            name: float((squares.to(value.device) * value.double()).sum().sqrt())
            for name, value in gradients.squared_norms.items()
        }
        values = {name: block.weighted_sum(weights) for name, block in gradients.items()}
        return cls(weights, values, sizes)

    @property
    def whole(self) -> float:
        """The size of all parameters together."""
        return math.sqrt(sum(size**2 for size in self.sizes.values()))


@dataclass(frozen=True)
class Objective:
    """Σ wᵢ Lᵢ of some samples, and in which batches they are evaluated.

    Attributes:
        batches: The samples.
        weights: (n,) for each batch.
    """

    batches: tuple[Batch, ...]
    weights: tuple[Tensor, ...]

    @classmethod
    def together(cls, batch: Batch, weights: Tensor) -> "Objective":
        """Return that of n samples in one batch."""
        return cls((batch,), (weights,))

    @classmethod
    def apart(cls, batch: Batch, weights: Tensor, rows: Sequence[Tensor]) -> "Objective":
        """Return that of n samples in several batches, the positions `rows` in each."""
        own = (weights[k.to(weights.device)] for k in rows)
        return cls(tuple(batch.select(k) for k in rows), tuple(own))

    @classmethod
    def twice(cls, sample: Batch) -> "Objective":
        """Return that of a single sample, as the mean of two of it."""
        half = torch.full((2,), 0.5)
        return cls((sample.resized(2),), (half,))

    def in_double_precision(self) -> "Objective":
        """Return the same on widened inputs and targets."""
        return replace(self, batches=tuple(b.in_double_precision() for b in self.batches))

    def evaluated(self, problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses (n,) and ∇ Σ wᵢ Lᵢ by every parameter, as autograd gives them."""
        found: list[Tensor] = []
        total = {name: torch.zeros_like(p) for name, p in problem.parameters.items()}
        for batch, weights in zip(self.batches, self.weights, strict=True):
            losses, slopes = _slopes(problem, batch, weights)  # one graph at a time
            found.append(losses)
            for name, slope in zip(total, slopes, strict=False):
                total[name] += dense(slope)
        return torch.cat(found), total


def _slopes(problem: Problem, batch: Batch, weights: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the losses (n,) of one batch, and ∇ Σ wᵢ Lᵢ by every parameter if there is one."""
    losses = problem.losses(batch)
    if not losses.requires_grad:
        return losses.detach(), ()
    with refusing("loop", problem.model, "Its backward pass fails in ordinary training too."):
        slopes = torch.autograd.grad(
            summed(losses, weights.to(losses)),
            list(problem.parameters.values()),
            retain_graph=True,  # part of the graph may be the model's own, and needed again
            allow_unused=True,
            materialize_grads=True,
        )
    return losses.detach(), slopes


def judged(
    problem: Problem,
    claim: Claim,
    objective: Objective,
    right: Mapping[str, Tensor],
    other: Objective | None = None,
    small: frozenset[str] = frozenset(),
) -> Check:
    """Compare a claim with what is right, and have rounding answer for what differs.

    Args:
        problem: What was evaluated.
        claim: About the objective's gradient.
        objective: What it is of.
        right: Its gradient by autograd.
        other: The same samples in other company, if they may be evaluated so.
        small: Parameters of which it is known that their gradient is mere rounding.
    """
    tolerance = TOLERANCES[problem.precision]
    errors = {name: _error(claim, right, name) for name in right}
    allowed = dict.fromkeys(right, tolerance)
    doubtful = [name for name in right if not errors[name] <= tolerance]
    share = _noise(problem) * claim.whole
    tiny = [k for k in doubtful if _distance(claim.values[k], right[k]) <= share]
    widest = problem.precision == torch.float64  # there is no wider format to tell
    noise = [k for k in tiny if k in small or (widest and _is_last_digits(claim, right, k))]
    if other is not None and set(tiny) - set(noise):
        again = other.evaluated(problem)[1]
        noise = [k for k in tiny if k in noise or _differs_no_more(claim, right, again, k)]
    doubtful = [name for name in doubtful if name not in noise]
    dtype = problem.precision
    if doubtful and dtype != torch.float64:
        with suppress(RefusedError, ModelError):  # not every model can be copied, or be another one
            truth, spread = _in_float64(problem, objective, doubtful)
            dtype = torch.float64
            for name in doubtful:
                size = max(claim.sizes[name], _norm(truth[name]))
                errors[name] = _relative(_distance(claim.values[name], truth[name]), size)
                allowed[name] = max(tolerance, _KINKS * _relative(spread[name], size))
                if errors[name] <= allowed[name] and allowed[name] > _MOST:
                    noise.append(name)
    told = [name for name in right if name not in noise]
    worst = max(told, key=lambda k: _rank(errors[k], allowed[k]), default="")
    return Check(
        error=errors.get(worst, 0.0),
        parameter=worst,
        tolerance=allowed.get(worst, tolerance),
        dtype=str(dtype).removeprefix("torch."),
        small=tuple(noise),
    )


def _rank(error: float, allowed: float) -> float:
    if error != error:
        return float("inf")
    return error / allowed if allowed else error


def _error(claim: Claim, right: Mapping[str, Tensor], name: str) -> float:
    """Return ‖Σ wᵢ gᵢ − ∇ Σ wᵢ Lᵢ‖ relative to the size of what is summed."""
    size = claim.sizes[name] or _norm(right[name])
    return _relative(_distance(claim.values[name], right[name]), size)


def _relative(gap: float, size: float) -> float:
    return gap / size if size else (0.0 if gap == 0 else float("inf"))


def _noise(problem: Problem) -> float:
    """Return which share of the whole gradient a parameter's may have that is mere rounding."""
    return min(_NOISE * torch.finfo(problem.precision).eps, 0.05)


def _is_last_digits(claim: Claim, right: Mapping[str, Tensor], name: str) -> bool:
    """Whether nobody can tell a parameter's gradient in float64 from rounding."""
    gap, eps = _distance(claim.values[name], right[name]), torch.finfo(torch.float64).eps
    return gap <= _LAST_DIGITS * eps * claim.whole


def _differs_no_more(
    claim: Claim, right: Mapping[str, Tensor], again: Mapping[str, Tensor], name: str
) -> bool:
    """Whether autograd agrees with itself about a parameter no better than with the claim."""
    gap = _distance(claim.values[name], right[name])
    return gap <= _LUCK * _distance(right[name], again[name])


def _in_float64(
    problem: Problem, objective: Objective, names: list[str]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradient without rounding, and how far rounding can lead away from it."""
    with double_precision():
        wide = problem.converted(torch.float64)
        truth = objective.in_double_precision().evaluated(wide)[1]
    spread = dict.fromkeys(names, 0.0)
    for near in nearby(problem, _TRIALS):
        found = objective.evaluated(near)[1]
        for name in names:
            spread[name] = max(spread[name], _distance(found[name], truth[name]))
    return truth, spread


def _norm(t: Tensor) -> float:
    found = float(torch.linalg.vector_norm(precise(t)))
    if 0 < found < math.inf:
        return found
    return float(torch.linalg.vector_norm(_wide(t)))  # squares may not be numbers of its own dtype


def _distance(a: Tensor, b: Tensor) -> float:
    return _norm(a - b)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)
