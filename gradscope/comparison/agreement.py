"""Whether one parameter's per-sample gradients are the loop's, and by how much they are not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscope.blocks.base import as_rows
from gradscope.comparison.mistakes import Mistake, Pair, cosine, diagnose, factor, wrong_shape
from gradscope.comparison.result import ParameterAgreement


class Precision(NamedTuple):
    """How exact gradients of one dtype must be.

    Attributes:
        tolerance: The largest relative error of a sample that agrees.
        floor: The share of the sample's whole gradient below which a parameter's norm is
            rounding noise (a gradient that is zero but for rounding: a key's bias in attention).
    """

    tolerance: float
    floor: float


DOUBLE = Precision(1e-8, 1e-6)
SINGLE = Precision(1e-4, 1e-2)
HALF = Precision(1e-2, 1e-2)
_PRECISIONS = {
    torch.float32: SINGLE,
    torch.complex64: SINGLE,
    torch.float16: HALF,
    torch.bfloat16: HALF,
}
_AGREES = Mistake("agrees", "equal within the tolerance")
_SMALLEST = 1e-6  # of the largest sample's norm: a sample that almost vanishes is noise


def precision_of(dtype: torch.dtype) -> Precision:
    """Return what to ask of gradients that come in `dtype`."""
    return _PRECISIONS.get(dtype, DOUBLE)


@dataclass(frozen=True)
class Oracle:
    """The loop's gradients.

    Attributes:
        gradients: {name: (n, *shape)}.
        norms: (n,), ‖gᵢ‖ over all parameters; zero where not finite.
        parameters: {name: (*shape)}, the parameters themselves.
        sizes: What has which size in the batch.
        coupled: Whether the batch's losses differ from those of batches of one.
    """

    gradients: Mapping[str, Tensor]
    norms: Tensor
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    sizes: Mapping[int, str] = field(default_factory=dict)
    coupled: bool = False

    @property
    def n(self) -> int:
        """The number of samples."""
        return int(self.norms.shape[0])


def agreements(found: Mapping[str, Any], oracle: Oracle) -> tuple[ParameterAgreement, ...]:
    """Compare {name: array (n, *shape)} with the oracle's gradients, parameter by parameter."""
    return tuple(_agreement(name, found.get(name), oracle) for name in oracle.gradients)


def _agreement(name: str, found: Any, oracle: Oracle) -> ParameterAgreement:
    loop = oracle.gradients[name]
    if found is None:
        return _incomparable(name, Mistake("missing", "there is no gradient for this parameter"))
    found = tensor(found).to(loop.device)
    if found.shape != loop.shape:
        shape = tuple(loop.shape[1:])
        return _incomparable(name, wrong_shape(tuple(found.shape), oracle.n, shape))
    precision = precision_of(found.dtype)
    wide = torch.complex128 if found.is_complex() or loop.is_complex() else torch.float64
    a, b = real(found.to(wide)), real(loop.to(wide))
    errors = relative_errors(a, b, precision, oracle.norms)
    finite = as_rows(a.isfinite() & b.isfinite()).all(1)
    gaps = (a - b)[finite].abs()
    agrees = bool((errors <= precision.tolerance).all())
    mistake = _AGREES if agrees else _diagnosed(name, a, b, errors, precision, oracle)
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


def _diagnosed(
    name: str, a: Tensor, b: Tensor, errors: Tensor, precision: Precision, oracle: Oracle
) -> Mistake:
    seen = errors > 0.0  # not the rows that are not finite on both sides
    seen |= as_rows(a.isfinite() & b.isfinite()).all(1)
    own = oracle.parameters.get(name)
    pair = Pair(
        found=a[seen],
        loop=b[seen],
        errors=errors[seen],
        samples=torch.arange(oracle.n, device=a.device)[seen],
        n=oracle.n,
        tolerance=precision.tolerance,
        parameter=None if own is None or a.dim() != own.dim() + 1 else own.double(),
        sizes=oracle.sizes,
        coupled=oracle.coupled,
    )
    return diagnose(pair)


def _incomparable(name: str, mistake: Mistake) -> ParameterAgreement:
    return ParameterAgreement(
        name, None, None, None, None, None, mistake.kind, mistake.meaning, agrees=False
    )


def relative_errors(a: Tensor, b: Tensor, precision: Precision, norms: Tensor) -> Tensor:
    """Return ‖aᵢ − bᵢ‖ over the scale of sample i, (n,); infinite where one is not finite.

    The scale is ‖bᵢ‖, but never less than a share of the largest sample's norm and of the norm
    of the sample's whole gradient. Rows that are not finite on both sides agree.

    Args:
        a: (n, *shape), real.
        b: (n, *shape), real.
        precision: The floor.
        norms: (n,), of the whole gradients.
    """
    a, b = as_rows(a), as_rows(b)
    broken = ~a.isfinite().all(1), ~b.isfinite().all(1)
    own = b.norm(dim=1).masked_fill(broken[1], 0.0)
    tiny = torch.finfo(own.dtype).tiny
    scale = torch.stack(
        [own, (_SMALLEST * own.max()).expand_as(own), precision.floor * norms.to(own)]
    ).amax(0)
    errors: Tensor = (a - b).norm(dim=1) / scale.clamp_min(tiny)
    errors[broken[0] ^ broken[1]] = torch.inf
    errors[broken[0] & broken[1]] = 0.0
    return errors


def tensor(value: Any) -> Tensor:
    """Return an array of any library as a dense, detached tensor.

    Raises:
        TypeError: It is no array of numbers.
    """
    result: Tensor = torch.as_tensor(value).detach()
    return result if result.layout == torch.strided else result.to_dense()


def real(t: Tensor) -> Tensor:
    """Return `t`, or (..., 2) for complex numbers."""
    if not t.is_complex():
        return t
    parts: Tensor = torch.view_as_real(t.resolve_conj())
    return parts
