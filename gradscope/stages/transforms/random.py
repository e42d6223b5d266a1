"""Random numbers, and the transforms that draw them: noise and stochastic rounding.

Random numbers depend on seed, use, parameter and sample only. Batch size, order, backend, device
and sharding do not change them. Each combination has a separate stream of the counter-based
generator Philox (Salmon et al. 2011). The key is a hash of seed, use and parameter, and the counter
starts at the sample's index. The entries of large matrices belong to no sample. SFC64
(Doty-Humphrey, PractRand) draws them at twice the speed, in pieces that are each seeded by a hash.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from math import inf

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Gradients, RandomBlock
from gradscope.blocks.base import as_rows
from gradscope.core.precision import double, doubled
from gradscope.stages.transforms.base import Transform, TransformScope, by_parts, transform, widened

_STREAM = 192  # bits of the counter within a stream; the upper 64 bits identify the stream
_MOST_BITS = 24  # with more bits, the levels are finer than float32


@transform("noise", TransformScope.ELEMENTWISE)
def noise(std: float, seed: int = 0) -> Transform:
    """T(g) = g + std · z, z standard normal, independent in every entry: the Gaussian mechanism.

    DP-SGD is `clip:max_norm=C | sum | noise:std=S` (Abadi et al. 2016, arXiv:1607.00133; Dwork &
    Roth 2014, appendix A). For a sample, z depends on seed, parameter and the sample's position in
    the data set. After a reducer it depends on seed and parameter. Complex entries get noise in
    both parts.
    """
    if not 0 <= std < inf:
        raise ValueError(f"std must be finite and not negative, not {std}")

    def draw(use: str, name: str, values: Tensor, keys: Tensor) -> Tensor:
        return values + std * normal(seed, use, name, keys, values)

    return _drawn("noise", draw)


@transform("quantize", TransformScope.VECTOR)
def quantize(bits: int, seed: int = 0) -> Transform:
    """Unbiased stochastic rounding to 2^bits − 1 evenly spaced levels over [−max|g|, max|g|].

    With s = 2^(bits−1) − 1 the levels are k/s · max|g|, k = −s..s. Each sample and parameter has
    its own maximum. An entry is rounded up in magnitude with the probability that keeps its
    expectation, else down. This is QSGD (Alistarh et al. 2017, arXiv:1610.02132), scaled by the
    largest entry instead of the norm. With 2 bits it is TernGrad (Wen et al. 2017,
    arXiv:1705.07878). Real and imaginary parts are rounded separately, with a common maximum.
    """
    if not 2 <= bits <= _MOST_BITS:
        raise ValueError(f"bits must be from 2 to {_MOST_BITS}, not {bits}")
    steps = 2 ** (bits - 1) - 1

    def draw(use: str, name: str, values: Tensor, keys: Tensor) -> Tensor:
        def rounded(parts: Tensor) -> Tensor:
            largest = doubled(as_rows(parts).abs().amax(1))
            largest = largest.reshape(-1, *[1] * (parts.dim() - 1))
            unit = torch.where(largest == 0, 1.0, largest)  # a zero row stays zero
            exact = doubled(parts).abs() / unit * steps
            below = exact.floor()  # rounded up if the draw is below the fractional part
            level = below + (uniform(seed, use, name, keys, parts) < exact - below)
            found: Tensor = parts.sgn() * (level / steps * largest)
            return found.to(parts.dtype)

        return by_parts(rounded, values) if values[0].numel() else values

    return _drawn("quantize", draw)


def _drawn(word: str, draw: Callable[[str, str, Tensor, Tensor], Tensor]) -> Transform:
    """Return the transform that calls `draw`(use, name, values, keys) when rows are needed."""

    def apply(gradients: Gradients) -> Gradients:
        use, keys = belonging(gradients, word)
        blocks = {
            name: RandomBlock(block, keys, partial(draw, use, name))
            for name, block in widened(gradients).items()
        }
        return gradients.of(blocks)

    return apply


def generator(seed: int, use: str, name: str, stream: int = 0) -> np.random.Generator:
    """Return the generator of a stream (a sample's index); different uses share no numbers."""
    key = _hash(seed, use, name)
    return np.random.Generator(np.random.Philox(key=key, counter=(stream % 2**64) << _STREAM))


def words(seed: int, use: str, name: str, row: int, column: int, count: int) -> np.ndarray:
    """Return the first `count` raw words (uint64) of the stream that starts at an entry."""
    bits = np.random.SFC64(_hash(seed, use, name, row, column))
    return np.random.Generator(bits).integers(0, 2**64, count, np.uint64)  # raw, without the GIL


def belonging(gradients: Gradients, word: str) -> tuple[str, Tensor]:
    """Return the use of the random numbers and the key of each row (n,) int64.

    The key of a sample is its position in the data set. An aggregate has the single row 0 and a
    separate use. `word` is the name of the transform.
    """
    if gradients.index is None:
        return f"{word} of aggregate", torch.arange(gradients.n)
    return word, gradients.index.cpu()


def normal(seed: int, use: str, name: str, keys: Tensor, like: Tensor) -> Tensor:
    """Return standard normal numbers (n, ...) like `like`, a row for each key.

    Real and imaginary parts of complex numbers are each standard normal.
    """
    values = np.empty((len(keys), *like.shape[1:], *([2] if like.is_complex() else [])))
    for row, key in enumerate(keys.tolist()):
        generator(seed, use, name, key).standard_normal(out=values[row : row + 1])
    drawn = torch.from_numpy(values)
    return (torch.view_as_complex(drawn) if like.is_complex() else drawn).to(like)


def uniform(seed: int, use: str, name: str, keys: Tensor, like: Tensor) -> Tensor:
    """Return uniform float64 numbers in [0, 1), of shape (n, ...) like `like`, a row a key."""
    values = np.empty((len(keys), *like.shape[1:]))
    for row, key in enumerate(keys.tolist()):
        generator(seed, use, name, key).random(out=values[row : row + 1])
    return torch.from_numpy(values).to(double(like.device)).to(like.device)


def _hash(*parts: str | int) -> int:
    """Return a 128-bit hash of `parts`."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
