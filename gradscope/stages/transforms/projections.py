"""Random projections of a sample's gradient to few numbers, keeping inner products on average."""

from collections.abc import Callable
from functools import reduce
from math import isqrt, prod, sqrt
from operator import add

import torch
from torch import Tensor

from gradscope.blocks import Block, DenseBlock, Gradients
from gradscope.stages.transforms.base import Scope, Transform, one_of, transform, widened
from gradscope.stages.transforms.matrices import KINDS, RandomMatrices

_LARGEST = 2**24  # numbers of a projection


@transform("project", Scope.LINEAR)
def project(dim: int, kind: str = "gaussian", seed: int = 0) -> Transform:
    """T(g) = P g / √dim, P random: the single entry `project` (n, dim), in float64.

    Over the choice of P, E⟨Pg, Ph⟩/dim = ⟨g, h⟩ (Johnson & Lindenstrauss 1984). P depends on seed,
    kind and each parameter's name and shape alone; with a smaller dim it is the first rows of the
    larger one (but for kronecker). Products are taken in the gradients' own precision, in float32
    at least. Up to 256 MiB of P are kept for the next batch; what is beyond is drawn again. The
    entries of P are independent of mean 0 and variance 1:

    - gaussian: standard normal, rounded to 2^16 values of equal probability, ±4.3 the outermost;
    - rademacher: ±1 (Achlioptas 2003), the fastest to draw;
    - sparse: ±√3 with probability 1/6 each, else 0 (Achlioptas 2003), rounded to 16 bits: ±1.73202
      with probability 10923/65536 each;
    - kronecker: P = A ⊗ C for each parameter seen as a matrix (first axis, all others), A (a, r)
      and C (b, c) normal with a·b = dim, as square as dim's divisors allow. Then
      P Σₜ bₜ⊗aₜ = Σₜ (A bₜ)(C aₜ)ᵀ, and no gradient of an outer block is formed (Choe et al. 2024,
      arXiv:2405.13954, "LoGra"). Its variance is larger for gradients of low rank.

    Args:
        dim: How many numbers remain, from 1 to 2^24.
        kind: One of these words.
        seed: Which projection.

    Raises:
        ValueError: dim is out of its range, or kind is no known word.
    """
    if not 1 <= dim <= _LARGEST:
        raise ValueError(f"dim must be from 1 to {_LARGEST:,}, not {dim:,}")
    one_of("kind", kind, (*KINDS, "kronecker"))
    projected = _two_sided(dim, seed) if kind == "kronecker" else _full(dim, kind, seed)

    def apply(gradients: Gradients) -> Gradients:
        found = reduce(add, (projected(k, b) for k, b in widened(gradients).items()))
        return gradients.of({"project": DenseBlock(found / sqrt(dim))})

    return apply


def _full(dim: int, kind: str, seed: int) -> Callable[[str, Block], Tensor]:
    """Return what multiplies a block by its projection (dim, entries), tile by tile."""
    matrices = RandomMatrices(dim, kind, seed, f"project {kind}")

    def projected(name: str, block: Block) -> Tensor:
        size = prod(block.shape)
        found = torch.zeros(block.n, dim, dtype=_sum_dtype(block), device=block.device)
        for samples, part, values in block.pieces():
            for rows, columns, entries in matrices.tiles(name, size, part, block.device):
                inside = slice(columns.start - part.start, columns.stop - part.start)
                # a tile's product in the gradients' own dtype, the sum over tiles in float64
                found[samples, rows] += values[:, inside] @ entries.to(values.dtype).mT
        return found

    return projected


def _two_sided(dim: int, seed: int) -> Callable[[str, Block], Tensor]:
    """Return what projects a block from both sides."""
    a = max(d for d in range(1, isqrt(dim) + 1) if dim % d == 0)
    left, right = (
        RandomMatrices(rows, "gaussian", seed, f"project {side}")
        for rows, side in ((a, "left"), (dim // a, "right"))
    )

    def projected(name: str, block: Block) -> Tensor:
        rows = block.shape[0] if block.shape else 1
        columns = prod(block.shape[1:])
        found = block.two_sided(
            left.whole(name, rows, block.device), right.whole(name, columns, block.device)
        )
        return found.flatten(1).to(_sum_dtype(block))

    return projected


def _sum_dtype(block: Block) -> torch.dtype:
    return torch.promote_types(block.dtype, torch.float64)
