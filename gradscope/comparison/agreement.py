"""The float64 loop, and the comparison of one parameter's gradients with the loop's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscope.backends.base import backends
from gradscope.blocks import in_groups
from gradscope.blocks.base import as_rows
from gradscope.comparison.mistakes import (
    GradientPair,
    Mistake,
    cosine,
    diagnose,
    factor,
    undone,
    wrong_shape,
)
from gradscope.core.batch import Batch, Tokens, tensors
from gradscope.core.groups import Groups
from gradscope.errors import CoupledSamplesError, ModelError
from gradscope.model.independence import coupled_remedy
from gradscope.model.locate import alone_remedy
from gradscope.model.problem import Problem
from gradscope.model.rounding import same


class Precision(NamedTuple):
    """How exact gradients of a dtype must be."""

    tolerance: float  # the largest relative error of a sample that agrees
    # below this share of the norm of the sample's whole gradient, a parameter's norm is rounding
    # noise (for example a key's bias in attention, whose exact gradient is zero)
    floor: float


VAGUE = frozenset(("unknown", "unrelated", "coupled", "some_samples"))  # kinds without a relation
DOUBLE = Precision(1e-8, 1e-6)
_SINGLE, _HALF = Precision(1e-4, 1e-2), Precision(1e-2, 1e-2)
_PRECISIONS = {
    torch.float32: _SINGLE,
    torch.complex64: _SINGLE,
    torch.float16: _HALF,
    torch.bfloat16: _HALF,
}
_SMALLEST = 1e-6  # below this share of the largest sample's norm, a sample's norm is noise


def precision_of(dtype: torch.dtype) -> Precision:
    """Return how exact gradients of a dtype must be."""
    return _PRECISIONS.get(dtype, DOUBLE)


@dataclass(frozen=True, kw_only=True)
class ParameterAgreement:
    """How close one parameter's per-sample gradients a are to the loop's b.

    If the shapes differ, the numbers are missing (None).
    """

    name: str  # the parameter
    absolute: float | None = None  # the largest |a − b| of an entry
    # the largest ‖aᵢ − bᵢ‖ / ‖bᵢ‖ of a sample, with a floor below which a norm is noise
    relative: float | None = None
    cosine: float | None = None  # ⟨a, b⟩ / (‖a‖ ‖b‖) over all samples
    worst_sample: int | None = None  # the position in the batch where `relative` is reached
    factor: float | None = None  # c = ⟨a, b⟩ / ⟨b, b⟩, the factor that fits a ≈ c·b best
    kind: str  # one word for the mistake, or "agrees"
    meaning: str  # an explanation, with what to do
    agrees: bool  # whether `relative` is within the tolerance of a's dtype


@dataclass(frozen=True)
class Oracle:
    """The loop's gradients."""

    gradients: Mapping[str, Tensor]  # {name: (n, *shape)}
    norms: Tensor  # (n,), ‖gᵢ‖ over all parameters; zero where not finite
    coupled: bool = False  # losses in the batch differ from losses in batches of one
    noun: str = "sample"  # the kind of row: sample, token or group
    parameters: Mapping[str, Tensor] = field(default_factory=dict)  # their values
    facts: Mapping[str, Tensor] = field(default_factory=dict)  # (n,) each; see `GradientPair`

    @classmethod
    def of(cls, problem: Problem, batch: Batch) -> "Oracle":
        """Run the loop on a problem and a batch in float64.

        Raises:
            CoupledSamplesError: The model runs on the batch, but not on one sample alone.
        """
        samples = batch.computed
        together = problem.losses(samples).detach()
        try:
            with backends.get("loop")(problem) as evaluate:
                evaluation = evaluate(samples)
        except ModelError as error:  # it ran on the batch
            raise CoupledSamplesError(
                f"on one sample alone {error.what}",
                where=error.where,
                remedy=alone_remedy(error, problem.model, samples, samples.one(0))
                or coupled_remedy(None, samples, problem.model),
            ) from error
        coupled = not same(evaluation.losses, together)
        if isinstance(batch, Groups):
            evaluation = in_groups(evaluation, batch.sizes, batch.index, batch.shares)
        gradients, alone = evaluation.gradients.dense(), evaluation.losses
        norms = torch.stack([as_rows(g.abs().square()).sum(1) for g in gradients.values()])
        norms = torch.nan_to_num(norms.double().sum(0).sqrt(), nan=0.0, posinf=0.0)
        return cls(
            gradients,
            norms,
            coupled=coupled,
            noun="group" if isinstance(batch, Groups) else problem.rows,
            parameters={k: p.detach() for k, p in problem.parameters.items()},
            facts=_facts(batch, alone, norms),
        )


def _facts(batch: Batch, losses: Tensor, norms: Tensor) -> dict[str, Tensor]:
    """Return factors (n,) by which samples' gradients may have been multiplied, by description."""
    positive = losses.double().clamp_min(0.0)
    facts = {
        "norm": norms,
        "2 times its loss (the loss was squared)": 2 * positive,
        "1 / (2 √loss) (the root of the loss was taken)": 0.5 * positive.rsqrt(),
        "1 / its loss (the logarithm of the loss was taken)": positive.reciprocal(),
        "exp(its loss) (a perplexity)": positive.exp(),
    }
    targets = tensors(batch.targets)
    if isinstance(batch, Tokens | Groups) or len(targets) != 1 or targets[0].dtype != torch.int64:
        return facts
    labels = targets[0]
    if labels.shape == (len(batch),):
        return facts | {"class": labels}
    if labels.dim() > 1:
        counted = (as_rows(labels) != -100).sum(1).to(losses)
        what = "number of targets (without -100)"
        facts |= {f"its {what}": counted, f"1 / its {what} (a mean)": counted.reciprocal()}
    return facts


def agreements(found: Mapping[str, Any], oracle: Oracle) -> tuple[ParameterAgreement, ...]:
    """Compare {name: array (n, *shape)} with the oracle's gradients, parameter by parameter."""
    return tuple(_agreement(name, found.get(name), oracle) for name in oracle.gradients)


def _agreement(name: str, value: Any, oracle: Oracle) -> ParameterAgreement:
    loop, n = oracle.gradients[name], len(oracle.norms)
    if value is None:
        missing = "there is no gradient for this parameter"
        return ParameterAgreement(name=name, kind="missing", meaning=missing, agrees=False)
    found: Tensor = torch.as_tensor(value).detach()
    found = (found if found.layout == torch.strided else found.to_dense()).to(loop.device)
    if found.shape != loop.shape:
        mistake = wrong_shape(tuple(found.shape), n, tuple(loop.shape[1:]), oracle.noun)
        meaning = mistake.meaning + _numbers_of(found, loop, name, oracle)
        return ParameterAgreement(name=name, agrees=False, kind="shape", meaning=meaning)
    precision = precision_of(found.dtype)
    wide = torch.complex128 if found.is_complex() or loop.is_complex() else torch.float64
    a, b = _real(found.to(wide)), _real(loop.to(wide))
    errors = relative_errors(a, b, precision, oracle.norms)
    finite = as_rows(a.isfinite() & b.isfinite()).all(1)
    gaps = (a - b)[finite].abs()
    agrees = bool((errors <= precision.tolerance).all())
    mistake = Mistake("agrees", "equal within the tolerance")
    if not agrees:
        seen = (errors > 0.0) | finite  # not the rows that are not finite on both sides
        value = oracle.parameters.get(name)
        mistake = diagnose(
            GradientPair(
                found=a[seen],
                loop=b[seen],
                errors=errors[seen],
                samples=torch.arange(n, device=a.device)[seen],
                n=n,
                tolerance=precision.tolerance,
                coupled=oracle.coupled,
                noun=oracle.noun,
                value=None if value is None else _real(value.to(wide)),
                facts={k: f.to(a)[seen] for k, f in oracle.facts.items()},
            )
        )
    return ParameterAgreement(
        name=name,
        absolute=float(gaps.max()) if gaps.numel() else 0.0,
        relative=float(errors.max()),
        cosine=cosine(a[finite], b[finite]),
        worst_sample=int(errors.argmax()),
        factor=factor(a[finite], b[finite]),
        agrees=agrees,
        **mistake._asdict(),
    )


def _numbers_of(found: Tensor, loop: Tensor, name: str, oracle: Oracle) -> str:
    """Return a text on the numbers of gradients of a wrong shape, or ""."""
    n, wide = len(loop), torch.complex128 if loop.is_complex() else torch.float64
    total = loop.to(wide).sum(0)
    if found.shape in (total.shape, (1, *total.shape)):
        one = found.to(wide).reshape(total.shape)
        for c, what in ((1.0, "sum"), (1 / n, "mean")):
            if bool((one - c * total).norm() <= 1e-4 * (c * total).norm()):
                return f"; the numbers are the {what} of all {oracle.noun}s' gradients"
        return ""
    rows = undone(found, loop)
    if rows is None:
        return ""
    again = _agreement(name, rows, oracle)
    if again.agrees:
        return "; in the right shape, the numbers are right"
    return "" if again.kind in VAGUE else f"; the numbers are wrong as well: {again.meaning}"


def relative_errors(a: Tensor, b: Tensor, precision: Precision, norms: Tensor) -> Tensor:
    """Return ‖aᵢ − bᵢ‖ over the scale of sample i, (n,), for real a and b (n, *shape).

    The scale is ‖bᵢ‖, or if larger, a share of the largest sample's norm or of `norms` (n,), the
    norms of the samples' whole gradients. An error is infinite if one side is not finite, and zero
    if both are not.
    """
    a, b = as_rows(a), as_rows(b)
    broken = ~a.isfinite().all(1), ~b.isfinite().all(1)
    own = b.norm(dim=1).masked_fill(broken[1], 0.0)
    scale = torch.stack(
        [own, (_SMALLEST * own.max()).expand_as(own), precision.floor * norms.to(own)]
    ).amax(0)
    errors: Tensor = (a - b).norm(dim=1) / scale.clamp_min(torch.finfo(own.dtype).tiny)
    errors[broken[0] ^ broken[1]] = torch.inf
    errors[broken[0] & broken[1]] = 0.0
    return errors


def _real(t: Tensor) -> Tensor:
    """Return `t`, or (..., 2) for complex numbers."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
