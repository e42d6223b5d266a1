"""Transforms that act on each entry of a gradient separately."""

from collections.abc import Callable, Mapping
from math import inf, isfinite

import torch
from torch import Tensor

from gradscope.blocks import Block, CenteredBlock, Gradients, MappedBlock, SquaredBlock
from gradscope.core.precision import double
from gradscope.stages.transforms.base import (
    NeedsMean,
    Transform,
    TransformScope,
    blockwise,
    by_parts,
    transform,
    widened,
)

_ROOT = 1e9  # more than √P of any model's P parameters: ‖g‖₂ ≤ √P max |gⱼ|


@transform("identity", TransformScope.ELEMENTWISE)
def identity() -> Transform:
    """T(g) = g: the raw per-sample gradient."""
    return lambda gradients: gradients


@transform("square", TransformScope.ELEMENTWISE)
def square() -> Transform:
    """T(g) = |g|² elementwise; `square | mean` is the diagonal of the empirical Fisher."""
    return blockwise(SquaredBlock)


@transform("sign", TransformScope.ELEMENTWISE)
def sign() -> Transform:
    """The sign of each entry, 0 at 0; g/|g| for complex entries (Bernstein et al. 2018)."""
    return _mapped(torch.sgn, lambda bound: torch.where(bound < inf, _ROOT, bound))


@transform("abs", TransformScope.ELEMENTWISE)
def absolute() -> Transform:
    """T(g) = |g| elementwise."""
    return _mapped(torch.abs, lambda bound: bound)


@transform("power", TransformScope.ELEMENTWISE)
def power(p: float) -> Transform:
    """T(g) = gᵖ elementwise for integer p, else sgn(g)·|g|ᵖ, which is real also for negative g.

    After `abs` or `square` the two definitions agree. p must be > 0 and finite.
    """
    if not 0 < p < inf:
        raise ValueError(f"p must be positive and finite, not {p}")

    def grows(bound: Tensor) -> Tensor:
        return _ROOT * bound**p

    if not float(p).is_integer():
        return _mapped(lambda t: torch.sgn(t) * t.abs().pow(p), grows)
    whole = int(p) if p < 2**31 else p

    def apply(block: Block) -> Block:
        if whole == 2 and not block.dtype.is_complex:
            return SquaredBlock(block)
        return MappedBlock(block, lambda t: t.pow(whole), grows)

    return blockwise(apply)


@transform("clamp", TransformScope.ELEMENTWISE)
def clamp(min_: float | None = None, max_: float | None = None) -> Transform:
    """T(g) = max(min, min(max, g)) elementwise; real and imaginary parts are clamped separately.

    This is gradient clipping by value. Give min, max or both.
    """
    if min_ is None and max_ is None:
        raise ValueError("give min, max or both")
    low, high = -inf if min_ is None else min_, inf if max_ is None else max_
    if not low <= high:
        raise ValueError(f"min must not be above max, but min is {low} and max is {high}")
    most = max(abs(limit) for limit in (min_, max_) if limit is not None)

    return _mapped(
        lambda t: by_parts(lambda parts: parts.clamp(low, high), t),
        lambda bound: bound + _ROOT * most,
    )


@transform("threshold", TransformScope.ELEMENTWISE)
def threshold(value: float) -> Transform:
    """T(g) = g where |g| > value, else 0: the hard threshold (Donoho & Johnstone 1994)."""
    if not value >= 0:
        raise ValueError(f"value must not be negative, not {value}")

    def apply(t: Tensor) -> Tensor:  # a NaN is kept: |NaN| <= value is False
        return torch.where(t.abs() <= value, torch.zeros_like(t), t)

    return _mapped(apply, lambda bound: bound)


@transform("scale", TransformScope.FACTOR)
def scale(by: float) -> Transform:
    """T(g) = by · g."""
    if not isfinite(by):
        raise ValueError(f"by must be finite, not {by}")
    return blockwise(
        lambda b: b.scale(torch.full((b.n,), by, dtype=double(b.device), device=b.device))
    )


@transform("center", TransformScope.LINEAR)
def center() -> NeedsMean:
    """T(g) = g − E[g], where E[g] is the mean of this stage's input over all samples.

    The mean needs an earlier pass over the data. `clip:max_norm=1 | center` subtracts the mean of
    the clipped gradients. The difference is computed in float64.
    """

    def given(mean: Mapping[str, Tensor]) -> Transform:
        def apply(gradients: Gradients) -> Gradients:
            # a mean of complex gradients is complex128, a mean of real gradients float64
            blocks = {
                name: CenteredBlock(block, mean[name].to(block.device))
                for name, block in widened(gradients).items()
            }
            return gradients.of(blocks)

        return apply

    return NeedsMean(given)


def _mapped(fn: Callable[[Tensor], Tensor], grows: Callable[[Tensor], Tensor]) -> Transform:
    """Return the transform by `fn`; `grows` maps an upper bound of norms to the new bound."""
    return blockwise(lambda block: MappedBlock(block, fn, grows))
