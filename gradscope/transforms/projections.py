"""Random projections of a sample's gradient to few numbers, keeping inner products on average."""

from collections.abc import Callable
from functools import reduce
from math import isqrt, prod, sqrt
from operator import add

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks import Block, DenseBlock, Gradients
from gradscope.transforms import random
from gradscope.transforms.base import Scope, Transform, one_of, transform

_CHUNK_BYTES = 2**26  # rows of the projection that exist at a time
_KEPT_BYTES = 2**28  # projections that are kept for the next batch, over all parameters

Row = Callable[[np.random.Generator, int], np.ndarray]


def _sparse(generator: np.random.Generator, size: int) -> np.ndarray:
    sides = np.array([sqrt(3), -sqrt(3), 0, 0, 0, 0])
    return sides[generator.integers(0, 6, size)]


def _rademacher(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.integers(0, 2, size) * 2.0 - 1.0


_ROWS: dict[str, Row] = {
    "gaussian": lambda generator, size: generator.standard_normal(size),
    "rademacher": _rademacher,
    "sparse": _sparse,
}


@transform("project", Scope.LINEAR)
def project(dim: int, kind: str = "gaussian", seed: int = 0) -> Transform:
    """T(g) = P g / √dim, P random: the single entry `project` (n, dim), in float64.

    Over the choice of P, E⟨Pg, Ph⟩/dim = ⟨g, h⟩ (Johnson & Lindenstrauss 1984). P depends on seed,
    kind and each parameter's name and shape alone. Its entries are independent of mean 0 and
    variance 1:

    - gaussian: standard normal;
    - rademacher: ±1 (Achlioptas 2003);
    - sparse: ±√3 with probability 1/6 each, else 0 (Achlioptas 2003);
    - kronecker: P = A ⊗ C for each parameter seen as a matrix (first axis, all others), A (a, r)
      and C (b, c) normal with a·b = dim, as square as dim's divisors allow. Then
      P Σₜ bₜ⊗aₜ = Σₜ (A bₜ)(C aₜ)ᵀ, and no gradient of an outer block is formed (Choe et al. 2024,
      arXiv:2405.13954, "LoGra"). Its variance is larger for gradients of low rank.

    Args:
        dim: How many numbers remain, ≥ 1.
        kind: One of these words.
        seed: Which projection.

    Raises:
        ValueError: dim is below 1, or kind is no known word.
    """
    if dim < 1:
        raise ValueError(f"dim must be at least 1, not {dim}")
    one_of("kind", kind, (*_ROWS, "kronecker"))
    projected = _two_sided(dim, seed) if kind == "kronecker" else _full(dim, kind, seed)

    def apply(gradients: Gradients) -> Gradients:
        found = reduce(add, (projected(name, block) for name, block in gradients.items()))
        return gradients.of({"project": DenseBlock(found / sqrt(dim))})

    return apply


def _full(dim: int, kind: str, seed: int) -> Callable[[str, Block], Tensor]:
    """Return what multiplies a block by its projection (dim, *shape), some rows at a time."""
    kept: dict[tuple[str, int], Tensor] = {}

    def rows(name: str, size: int, first: int, last: int) -> Tensor:
        if (name, first) in kept:
            return kept[name, first]
        use = f"project {kind}"
        made = [_ROWS[kind](random.generator(seed, use, name, j), size) for j in range(first, last)]
        chunk = torch.from_numpy(np.stack(made))
        if sum(t.nbytes for t in kept.values()) + chunk.nbytes <= _KEPT_BYTES:
            kept[name, first] = chunk
        return chunk

    def projected(name: str, block: Block) -> Tensor:
        size = prod(block.shape)
        step = max(1, _CHUNK_BYTES // max(1, 8 * size))
        chunks = (rows(name, size, j, min(j + step, dim)) for j in range(0, dim, step))
        return torch.cat(
            [block.dots(c.to(block.device).view(len(c), *block.shape)) for c in chunks], 1
        )

    return projected


def _two_sided(dim: int, seed: int) -> Callable[[str, Block], Tensor]:
    """Return what projects a block from both sides."""
    a = max(d for d in range(1, isqrt(dim) + 1) if dim % d == 0)

    def factor(side: str, name: str, height: int, width: int) -> Tensor:
        values = random.generator(seed, f"project {side}", name).standard_normal((height, width))
        return torch.from_numpy(values)

    def projected(name: str, block: Block) -> Tensor:
        r = block.shape[0] if block.shape else 1
        left = factor("left", name, a, r).to(block.device)
        right = factor("right", name, dim // a, prod(block.shape[1:])).to(block.device)
        return block.two_sided(left, right).flatten(1)

    return projected
