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
    """Return the generator of a stream, which is a sample's index; two uses share no numbers."""
    key = _hash(seed, use, name)
    return np.random.Generator(np.random.Philox(key=key, counter=(stream % 2**64) << _STREAM))


def words(seed: int, use: str, name: str, row: int, column: int, count: int) -> np.ndarray:
    """Return the first `count` raw words, uint64, of the stream that begins at an entry."""
    bits = np.random.SFC64(_hash(seed, use, name, row, column))
    return np.random.Generator(bits).integers(0, 2**64, count, np.uint64)  # raw, without the GIL


def belonging(gradients: Gradients, word: str) -> tuple[str, Tensor]:
    """Return the use of the numbers that `word` draws, and what each row draws by (n,) int64.

    Samples draw by their position in the data set. An aggregate is one row, number 0, and draws
    for a use of its own.
    """
    if gradients.index is None:
        return f"{word} of aggregate", torch.arange(gradients.n)
    return word, gradients.index.cpu()


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
