"""Transforms that treat each entry of a gradient alone: dense, but for what the blocks know."""

from collections.abc import Callable
from math import inf, isfinite

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients, MappedBlock, SquaredBlock
from gradscope.stages.transforms.base import Scope, Transform, blockwise, transform, widened


@transform("identity", Scope.ELEMENTWISE)
def identity() -> Transform:
    """T(g) = g: the raw per-sample gradient."""
    return lambda gradients: gradients


@transform("square", Scope.ELEMENTWISE)
def square() -> Transform:
    """T(g) = |g|² elementwise; `square | mean` is the diagonal of the empirical Fisher."""
    return blockwise(SquaredBlock)


@transform("sign", Scope.ELEMENTWISE)
def sign() -> Transform:
    """The sign of each entry, 0 at 0; g/|g| for complex ones (Bernstein et al. 2018)."""
    return _mapped(torch.sgn, lambda bound: torch.where(bound < inf, _ROOT, bound))


@transform("abs", Scope.ELEMENTWISE)
def absolute() -> Transform:
    """T(g) = |g| elementwise."""
    return _mapped(torch.abs, _no_longer)


@transform("power", Scope.ELEMENTWISE)
def power(p: float) -> Transform:
    """T(g) = gᵖ elementwise for whole p, else sgn(g)·|g|ᵖ, which is real for negative g too.

    After `abs` or `square` the two are the same.

    Args:
        p: The exponent, > 0 and finite.

    Raises:
        ValueError: p is not.
    """
    if not 0 < p < inf:
        raise ValueError(f"p must be positive and finite, not {p}")

    def grows(bound: Tensor) -> Tensor:
        return _ROOT * bound**p

    if not float(p).is_integer():
        return _mapped(lambda t: torch.sgn(t) * t.abs().pow(p), grows)
    whole = int(p) if p < 2**31 else p

    def apply(block: Block) -> Block:
        real_square = whole == 2 and not block.dtype.is_complex
        if real_square:
            return SquaredBlock(block)
        return MappedBlock(block, lambda t: t.pow(whole), grows)

    return blockwise(apply)


@transform("clamp", Scope.ELEMENTWISE)
def clamp(min_: float | None = None, max_: float | None = None) -> Transform:
    """T(g) = max(min, min(max, g)) elementwise; real and imaginary parts apart if complex.

    Gradient clipping by value. At least one bound is given.

    Args:
        min_: The lower bound, argument `min`.
        max_: The upper bound, argument `max`.

    Raises:
        ValueError: There is no bound, one is NaN, or min > max.
    """
    if min_ is None and max_ is None:
        raise ValueError("give min, max or both")
    low, high = -inf if min_ is None else min_, inf if max_ is None else max_
    if not low <= high:
        raise ValueError(f"min must not be above max, and is {low} with max {high}")
    most = max(abs(limit) for limit in (min_, max_) if limit is not None)
    return _mapped(_by_parts(lambda t: t.clamp(low, high)), lambda bound: bound + _ROOT * most)


@transform("threshold", Scope.ELEMENTWISE)
def threshold(value: float) -> Transform:
    """T(g) = g where |g| > value, else 0: the hard threshold (Donoho & Johnstone 1994).

    Args:
        value: The largest magnitude that becomes zero, ≥ 0.

    Raises:
        ValueError: value is negative or NaN.
    """
    if not value >= 0:
        raise ValueError(f"value must not be negative, not {value}")
    # a NaN is kept: |NaN| <= value is False
    return _mapped(lambda t: torch.where(t.abs() <= value, torch.zeros_like(t), t), _no_longer)


@transform("scale", Scope.FACTOR)
def scale(by: float) -> Transform:
    """T(g) = by · g.

    Args:
        by: Any finite number.

    Raises:
        ValueError: by is not finite.
    """
    if not isfinite(by):
        raise ValueError(f"by must be finite, not {by}")

    def apply(gradients: Gradients) -> Gradients:
        return widened(gradients).map(
            lambda b: b.scale(torch.full((b.n,), by, dtype=torch.float64, device=b.device))
        )

    return apply


_ROOT = 1e9  # more than √P of any model's P parameters: ‖g‖₂ ≤ √P max |gⱼ|


def _no_longer(bound: Tensor) -> Tensor:
    return bound


def _mapped(fn: Callable[[Tensor], Tensor], grows: Callable[[Tensor], Tensor]) -> Transform:
    """Return a map of entries, and how it changes a number that no gradient is longer than."""
    return blockwise(lambda block: MappedBlock(block, fn, grows))


def _by_parts(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `fn` applied to real and imaginary parts apart where the tensor is complex."""

    def apply(t: Tensor) -> Tensor:
        return torch.view_as_complex(fn(torch.view_as_real(t))) if t.is_complex() else fn(t)

    return apply
