"""Gradients held against ordinary autograd's: each parameter by itself, in its own precision.

What is compared is Σ wᵢ gᵢ with ∇ Σ wᵢ Lᵢ; a single sample has weight 1. Where the two differ by
more than the tolerance, rounding may be to blame, and has to show it: by the gradient of the same
samples in other company, for parameters whose gradient all but vanishes; or in float64, by what
other last digits of the parameters do to the gradient, as where an activation is at its kink.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.backends.base import refusing
from gradscope.backends.loop import dense
from gradscope.blocks import Gradients
from gradscope.core.batch import Batch
from gradscope.core.independence import regrouped
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


def ordinary(problem: Problem, batch: Batch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses (n,) and ∇ Σ wᵢ Lᵢ by every parameter, as autograd gives them."""
    losses = problem.losses(batch)
    if not losses.requires_grad:
        return losses, {name: torch.zeros_like(p) for name, p in problem.parameters.items()}
    with refusing("autograd", problem.model, "Its backward pass fails in ordinary training too."):
        found = torch.autograd.grad(
            summed(losses, weights.to(losses)),
            list(problem.parameters.values()),
            retain_graph=True,  # a part of the graph may be the model's own, and be needed again
            allow_unused=True,
            materialize_grads=True,
        )
    gradients = {name: dense(g) for name, g in zip(problem.parameters, found, strict=True)}
    return losses.detach(), gradients


def judged(
    problem: Problem,
    batch: Batch,
    claim: Claim,
    right: Mapping[str, Tensor],
    *,
    alone_too: bool = True,
) -> Check:
    """Compare a claim with what is right, and have rounding answer for what differs.

    Args:
        problem: What was evaluated.
        batch: The n samples.
        claim: About them.
        right: ∇ Σ wᵢ Lᵢ, evaluated in one batch.
        alone_too: The samples may be evaluated in other company.
    """
    tolerance = TOLERANCES[problem.precision]
    errors = {name: _error(claim, right, name) for name in right}
    allowed = dict.fromkeys(right, tolerance)
    doubtful = [name for name in right if not errors[name] <= tolerance]
    small: list[str] = []
    if doubtful and alone_too:
        other = _in_other_company(problem, batch, claim.weights)
        small = [name for name in doubtful if _is_noise(problem, claim, right, other, name)]
        doubtful = [name for name in doubtful if name not in small]
    dtype = problem.precision
    truth, spread = right, dict[str, float]()
    if doubtful and dtype != torch.float64:
        with suppress(RefusedError, ModelError):  # not every model can be copied, or be another one
            truth, spread = _in_float64(problem, batch, claim.weights, doubtful)
            dtype = torch.float64
        for name, most in spread.items():
            errors[name] = _error(claim, truth, name)
            size = max(claim.sizes[name], _norm(truth[name]))
            allowed[name] = max(tolerance, _KINKS * _relative(most, size))
            if errors[name] <= allowed[name] and allowed[name] > _MOST:
                small.append(name)
    told = [name for name in right if name not in small]
    worst = max(told, key=lambda k: _rank(errors[k], allowed[k]), default="")
    return Check(
        error=errors.get(worst, 0.0),
        parameter=worst,
        tolerance=allowed.get(worst, tolerance),
        dtype=str(dtype).removeprefix("torch."),
        small=tuple(small),
    )


def _rank(error: float, allowed: float) -> float:
    if error != error:
        return float("inf")
    return error / allowed if allowed else error


def _error(claim: Claim, right: Mapping[str, Tensor], name: str) -> float:
    """Return ‖Σ wᵢ gᵢ − ∇ Σ wᵢ Lᵢ‖ relative to the size of what is summed."""
    size = max(claim.sizes[name], _norm(right[name]))
    return _relative(_distance(claim.values[name], right[name]), size)


def _relative(gap: float, size: float) -> float:
    return gap / size if size else (0.0 if gap == 0 else float("inf"))


def _in_other_company(problem: Problem, batch: Batch, weights: Tensor) -> dict[str, Tensor]:
    """Return ∇ Σ wᵢ Lᵢ of the same samples in two batches; of a single one, as two halves."""
    n = len(batch)
    if n == 1:
        return ordinary(problem, batch.resized(2), weights.expand(2) / 2)[1]
    groups = regrouped(n, torch.Generator().manual_seed(n))
    parts = [ordinary(problem, batch.select(rows), weights[rows])[1] for rows in groups]
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def _is_noise(
    problem: Problem,
    claim: Claim,
    right: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    name: str,
) -> bool:
    """Whether a parameter's gradient is so small that autograd agrees with itself no better."""
    gap, eps = _distance(claim.values[name], right[name]), torch.finfo(problem.precision).eps
    if problem.precision == torch.float64 and gap <= _LAST_DIGITS * eps * claim.whole:
        return True  # there is no wider precision to judge it in
    share = min(_NOISE * eps, 0.05)
    return gap <= share * claim.whole and gap <= _LUCK * _distance(right[name], other[name])


def _in_float64(
    problem: Problem, batch: Batch, weights: Tensor, names: list[str]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradient without rounding, and how far rounding can lead away from it."""
    wide, cast = problem.converted(torch.float64), batch.in_double_precision()
    with double_precision():
        truth = ordinary(wide, cast, weights)[1]
    spread = dict.fromkeys(names, 0.0)
    for near in nearby(problem, _TRIALS):
        found = ordinary(near, batch, weights)[1]
        for name in names:
            spread[name] = max(spread[name], _distance(found[name], truth[name]))
    return truth, spread


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(t)))


def _distance(a: Tensor, b: Tensor) -> float:
    return _norm(_wide(a) - _wide(b))


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)
