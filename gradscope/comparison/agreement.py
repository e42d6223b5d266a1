"""The float64 loop, and whether one parameter's per-sample gradients are the loop's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscope.backends import backends
from gradscope.blocks.base import as_rows
from gradscope.comparison.diagnosis import Compared, Mistake, cosine, diagnose, factor, wrong_shape
from gradscope.core.batch import Batch
from gradscope.core.independence import COUPLED_REMEDY
from gradscope.core.problem import Problem
from gradscope.errors import CoupledSamplesError, ModelError


class Precision(NamedTuple):
    """How exact gradients of one dtype must be."""

    tolerance: float  # the largest relative error of a sample that agrees
    # the share of the sample's whole gradient below which a parameter's norm is rounding noise (a
    # gradient that is zero but for rounding: a key's bias in attention)
    floor: float


DOUBLE = Precision(1e-8, 1e-6)
_SINGLE, _HALF = Precision(1e-4, 1e-2), Precision(1e-2, 1e-2)
_PRECISIONS = {
    torch.float32: _SINGLE,
    torch.complex64: _SINGLE,
    torch.float16: _HALF,
    torch.bfloat16: _HALF,
}
_SMALLEST = 1e-6  # of the largest sample's norm: a sample that almost vanishes is noise
_SAME_LOSS = 1e-8


@dataclass(frozen=True)
class ParameterAgreement:
    """How close one parameter's per-sample gradients a are to the loop's b.

    Numbers are None where the shapes do not allow them.
    """

    name: str  # the parameter
    absolute: float | None  # the largest |a − b| of an entry
    # the largest ‖aᵢ − bᵢ‖ / ‖bᵢ‖ of a sample, with a floor below which a norm is noise
    relative: float | None
    cosine: float | None  # ⟨a, b⟩ / (‖a‖ ‖b‖) over all samples
    worst_sample: int | None  # the position in the batch where `relative` is reached
    factor: float | None  # c = ⟨a, b⟩ / ⟨b, b⟩, the factor that fits a ≈ c·b best
    kind: str  # one word for the mistake, or "agrees"
    meaning: str  # what it means and what to do
    agrees: bool  # whether `relative` is within the tolerance of a's dtype


@dataclass(frozen=True)
class Oracle:
    """The loop's gradients."""

    gradients: Mapping[str, Tensor]  # {name: (n, *shape)}
    norms: Tensor  # (n,), ‖gᵢ‖ over all parameters; zero where not finite
    coupled: bool = False  # the batch's losses differ from those of batches of one

    @classmethod
    def of(cls, problem: Problem, batch: Batch) -> "Oracle":
        """Run the loop on a problem and a batch in float64.

        Raises:
            CoupledSamplesError: The model runs on the batch, but not on one sample alone.
        """
        together = problem.losses(batch).detach()
        try:
            with backends.get("loop")(problem) as evaluate:
                evaluation = evaluate(batch)
        except ModelError as error:  # it ran on the batch
            raise CoupledSamplesError(
                f"on one sample alone {error.what}", where=error.where, remedy=COUPLED_REMEDY
            ) from error
        gradients, alone = evaluation.gradients.dense(), evaluation.losses
        norms = torch.stack([as_rows(g.abs().square()).sum(1) for g in gradients.values()])
        scale = float(alone.abs().where(alone.isfinite(), 0.0).max())
        same = torch.allclose(
            together, alone, rtol=_SAME_LOSS, atol=_SAME_LOSS * scale, equal_nan=True
        )
        return cls(
            gradients=gradients,
            norms=torch.nan_to_num(norms.double().sum(0).sqrt(), nan=0.0, posinf=0.0),
            coupled=not same,
        )


def agreements(found: Mapping[str, Any], oracle: Oracle) -> tuple[ParameterAgreement, ...]:
    """Compare {name: array (n, *shape)} with the oracle's gradients, parameter by parameter."""
    return tuple(_agreement(name, found.get(name), oracle) for name in oracle.gradients)


def _agreement(name: str, value: Any, oracle: Oracle) -> ParameterAgreement:
    loop, n = oracle.gradients[name], len(oracle.norms)
    if value is None:
        return _incomparable(name, Mistake("missing", "there is no gradient for this parameter"))
    found: Tensor = torch.as_tensor(value).detach()
    found = (found if found.layout == torch.strided else found.to_dense()).to(loop.device)
    if found.shape != loop.shape:
        return _incomparable(name, wrong_shape(tuple(found.shape), n, tuple(loop.shape[1:])))
    precision = _PRECISIONS.get(found.dtype, DOUBLE)
    wide = torch.complex128 if found.is_complex() or loop.is_complex() else torch.float64
    a, b = _real(found.to(wide)), _real(loop.to(wide))
    errors = relative_errors(a, b, precision, oracle.norms)
    finite = as_rows(a.isfinite() & b.isfinite()).all(1)
    gaps = (a - b)[finite].abs()
    agrees = bool((errors <= precision.tolerance).all())
    mistake = Mistake("agrees", "equal within the tolerance")
    if not agrees:
        seen = (errors > 0.0) | finite  # not the rows that are not finite on both sides
        mistake = diagnose(
            Compared(
                found=a[seen],
                loop=b[seen],
                errors=errors[seen],
                samples=torch.arange(n, device=a.device)[seen],
                n=n,
                tolerance=precision.tolerance,
                coupled=oracle.coupled,
            )
        )
    return ParameterAgreement(
        name=name,
        absolute=float(gaps.max()) if gaps.numel() else 0.0,
        relative=float(errors.max()),
        cosine=cosine(a[finite], b[finite]),
        worst_sample=int(errors.argmax()),
        factor=factor(a[finite], b[finite]),
        kind=mistake.kind,
        meaning=mistake.meaning,
        agrees=agrees,
    )


def _incomparable(name: str, mistake: Mistake) -> ParameterAgreement:
    return ParameterAgreement(
        name, None, None, None, None, None, mistake.kind, mistake.meaning, agrees=False
    )


def relative_errors(a: Tensor, b: Tensor, precision: Precision, norms: Tensor) -> Tensor:
    """Return ‖aᵢ − bᵢ‖ over the scale of sample i, (n,), for real a and b (n, *shape).

    The scale is ‖bᵢ‖, but never less than a share of the largest sample's norm and of `norms` (n,),
    those of the samples' whole gradients. An error is infinite where one side is not finite, and
    zero where neither is.
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
