"""Random numbers that belong to a seed, a use, a parameter and a sample, and to nothing else.

Each has a stream of its own of the counter-based generator Philox (Salmon et al. 2011): the key is
a hash of seed, use and parameter, the counter begins at the sample's index. So batch size, order,
backend, device and sharding change nothing. Large matrices, whose entries belong to no sample, are
drawn by SFC64 (Doty-Humphrey, PractRand), at twice the speed, in pieces each seeded by a hash.
"""

import hashlib
from math import prod

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Gradients

_STREAM = 192  # bits of the counter within a stream; the 64 above them tell the streams apart


def generator(seed: int, use: str, name: str, stream: int = 0) -> np.random.Generator:
    """Return the generator of one stream.

    Args:
        seed: The user's.
        use: What the numbers are for, so that two uses never share them.
        name: The parameter's.
        stream: A sample's index, or the number of a row, from 0.
    """
    key = _hash(seed, use, name)
    return np.random.Generator(np.random.Philox(key=key, counter=(stream % 2**64) << _STREAM))


def words(seed: int, use: str, name: str, row: int, column: int, count: int) -> np.ndarray:
    """Return the first `count` raw words, uint64, of the stream that begins at an entry."""
    bits = np.random.SFC64(_hash(seed, use, name, row, column))
    return np.random.Generator(bits).integers(0, 2**64, count, np.uint64)  # raw, without the GIL


def keys(gradients: Gradients) -> Tensor:
    """Return (n,) int64: what the samples draw by, which is their position in the data set.

    An aggregate is one row, number 0, and draws for a use of its own.
    """
    return torch.arange(gradients.n) if gradients.index is None else gradients.index.cpu()


def use_of(gradients: Gradients, word: str) -> str:
    """Return the use of the numbers that `word` draws: samples and aggregates never share them."""
    return f"{word} of aggregate" if gradients.index is None else word


def normal(seed: int, use: str, name: str, keys: Tensor, like: Tensor) -> Tensor:
    """Return standard normal numbers (n, ...) like `like`, a row for each key; complex in parts."""
    shape = (*like.shape[1:], 2) if like.is_complex() else tuple(like.shape[1:])
    rows = [generator(seed, use, name, int(k)).standard_normal(shape) for k in keys]
    values = _stacked(rows, (len(keys), *shape)).to(like.device)
    return (torch.view_as_complex(values) if like.is_complex() else values).to(like.dtype)


def uniform(seed: int, use: str, name: str, keys: Tensor, like: Tensor) -> Tensor:
    """Return float64 numbers from [0, 1), (n, ...) as `like`, a row for each key."""
    shape = tuple(like.shape[1:])
    rows = [generator(seed, use, name, int(k)).random(shape) for k in keys]
    return _stacked(rows, (len(keys), *shape)).to(like.device)


def _hash(*parts: str | int) -> int:
    """Return 128 bits that belong to `parts`."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


def _stacked(rows: list[np.ndarray], shape: tuple[int, ...]) -> Tensor:
    if not rows or not prod(shape):
        return torch.zeros(shape, dtype=torch.float64)
    return torch.from_numpy(np.stack(rows))
