"""Transforms that draw random numbers: noise and stochastic rounding."""

from collections.abc import Callable
from functools import partial
from math import inf

import torch
from torch import Tensor

from gradscope.blocks import Gradients, RandomBlock
from gradscope.blocks.base import as_rows
from gradscope.stages.transforms import random
from gradscope.stages.transforms.base import Scope, Transform, transform, widened

_MOST_BITS = 24  # beyond, the levels are finer than float32


@transform("noise", Scope.ELEMENTWISE)
def noise(std: float, seed: int = 0) -> Transform:
    """T(g) = g + std · z, z standard normal, independent in every entry: the Gaussian mechanism.

    DP-SGD is `clip:max_norm=C | sum | noise:std=S` (Abadi et al. 2016, arXiv:1607.00133; Dwork &
    Roth 2014, appendix A). On samples z depends on seed, parameter and the sample's position in
    the data set, on an aggregate on seed and parameter. Of complex entries both parts get noise.
    """
    if not 0 <= std < inf:
        raise ValueError(f"std must be finite and not negative, not {std}")

    def draw(use: str, name: str, values: Tensor, keys: Tensor) -> Tensor:
        return values + std * random.normal(seed, use, name, keys, values)

    return _drawn("noise", draw)


@transform("quantize", Scope.VECTOR)
def quantize(bits: int, seed: int = 0) -> Transform:
    """Stochastic rounding to 2^bits − 1 even levels over [−max|g|, max|g|]; unbiased.

    With s = 2^(bits−1) − 1 the levels are k/s · max|g|, k = −s..s, the maximum taken for each
    sample and parameter. An entry between two levels goes to the upper one (in magnitude) with the
    probability that keeps its expectation: QSGD (Alistarh et al. 2017, arXiv:1610.02132), scaled
    by the largest entry instead of the norm; 2 bits are TernGrad (Wen et al. 2017,
    arXiv:1705.07878). Real and imaginary parts are rounded apart, with one maximum for both.
    """
    if not 2 <= bits <= _MOST_BITS:
        raise ValueError(f"bits must be from 2 to {_MOST_BITS}, not {bits}")
    steps = 2 ** (bits - 1) - 1

    def draw(use: str, name: str, values: Tensor, keys: Tensor) -> Tensor:
        parts = torch.view_as_real(values) if values.is_complex() else values
        rounded = _rounded(parts, steps, random.uniform(seed, use, name, keys, parts))
        return torch.view_as_complex(rounded) if values.is_complex() else rounded

    return _drawn("quantize", draw)


def _rounded(values: Tensor, steps: int, draws: Tensor) -> Tensor:
    """Round (n, ...) up in magnitude where the draw is below the fraction that is cut off."""
    if values[0].numel() == 0:
        return values
    largest = as_rows(values).abs().amax(1).double()
    largest = largest.reshape(-1, *[1] * (values.dim() - 1))
    unit = torch.where(largest == 0, 1.0, largest)  # a zero row stays zero
    exact = values.double().abs() / unit * steps
    below = exact.floor()
    level = below + (draws < exact - below)
    return (values.sgn() * (level / steps * largest)).to(values.dtype)


def _drawn(word: str, draw: Callable[[str, str, Tensor, Tensor], Tensor]) -> Transform:
    """Return the transform that applies `draw`(use, name, values, keys) when a row is needed."""

    def apply(gradients: Gradients) -> Gradients:
        use, keys = random.belonging(gradients, word)
        blocks = {
            name: RandomBlock(block, keys, partial(draw, use, name))
            for name, block in widened(gradients).items()
        }
        return gradients.of(blocks)

    return apply
