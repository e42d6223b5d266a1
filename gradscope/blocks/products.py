"""Sums of outer products as matrix products, by whichever kernel is faster here.

A long sum of outer products is what a convolution with a kernel of size one computes too. oneDNN's
convolution uses the widest vector instructions of every processor; the matrix kernels that torch is
built with do not on some (1.8 times slower on AMD processors with AVX-512).
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.backends import mkldnn

from gradscope.blocks.ways import Way, fastest

_FLOPS, _BYTES, _CALL = 1e11, 1e10, 2e-5  # a machine of no particular kind: a second's, a call's

_LEAF = 64  # positions below which a Gram matrix is taken whole


def seconds(flops: float, moved: float = 0.0, calls: float = 1.0) -> float:
    """Return the predicted seconds of so many multiplications, bytes moved and kernels started."""
    return flops / _FLOPS + moved / _BYTES + calls * _CALL


def contracted(left: Tensor, right: Tensor) -> Tensor:
    """Return Σᵢₜ left[i, k, t, r] right[i, k, t, c] as (k, r, c)."""
    rows, columns = (f.transpose(0, 1).flatten(1, 2) for f in (left, right))  # (k, n·t, ·)
    columns = columns.to(rows.dtype)
    k, t, r = rows.shape
    c = columns.shape[2]
    flops = 2.0 * k * t * r * c

    def convolved() -> Tensor:
        found = F.conv1d(columns.reshape(1, k * t, c), rows.mT.reshape(k * r, t, 1), groups=k)
        return found.view(k, r, c)

    def turned() -> Tensor:
        found = F.conv1d(rows.reshape(1, k * t, r), columns.mT.reshape(k * c, t, 1), groups=k)
        return found.view(k, c, r).mT.contiguous()

    ways = {"gemm": Way(seconds(flops), lambda: torch.bmm(rows.mT, columns))}
    if _by_onednn(rows):  # faster with the longer side as the positions of the image
        straight, across = (0.8, 0.9) if c >= r else (0.9, 0.8)
        ways["convolution"] = Way(seconds(straight * flops, 0, 2), convolved)
        ways["turned convolution"] = Way(seconds(across * flops, 0, 2), turned)
    return fastest(f"sums of products {r}x{c}", k * t, rows, ways)


def ghost(left: Tensor, right: Tensor) -> Tensor:
    """Return ‖Σₜ leftₜ ⊗ rightₜ‖² (m,) = Σₜₛ (leftₜ·leftₛ)(rightₜ·rightₛ).

    The Gram matrices over positions are symmetric: of many positions half are left out (Li et al.
    2021, arXiv:2110.05679, "ghost norms").

    Args:
        left: (m, t, r).
        right: (m, t, c).
    """
    t = left.shape[1]
    if t < 2 * _LEAF:
        return _met(left, left, right, right)
    (a, b), (c, d) = ((f[:, : t // 2], f[:, t // 2 :]) for f in (left, right))
    return ghost(a, c) + ghost(b, d) + 2 * _met(a, b, c, d)


def _met(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return Re Σ (a bᴴ) ∘ (c dᴴ) (m,)."""
    return (torch.bmm(a, b.mH) * torch.bmm(c, d.mH)).sum((1, 2)).real


def _by_onednn(t: Tensor) -> bool:
    if t.device.type != "cpu" or t.dtype != torch.float32:
        return False
    return bool(mkldnn.is_available() and mkldnn.enabled)  # type: ignore[no-untyped-call]
