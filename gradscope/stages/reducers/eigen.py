"""Eigenvectors of large positive semidefinite matrices."""

import torch
from torch import Tensor

_LARGE = 512  # rows of a matrix whose range is worth a trial
_SHARE = 0.6  # of the rows: with a larger rank the range saves nothing
_MORE = 16  # columns of a sketch beyond the rank


def eigenvectors(matrices: Tensor) -> Tensor:
    """Return orthonormal eigenvectors as columns (k, f, f), in any order.

    `matrices` (k, f, f) are positive semidefinite, in float64 or complex128.
    """
    if matrices.shape[-1] < _LARGE:
        return _decomposed(matrices)
    return torch.stack([_by_range(one) for one in matrices])


def _by_range(matrix: Tensor) -> Tensor:
    """Return the eigenvectors; with a low rank, those of the range and any basis of the rest.

    A Cholesky decomposition stops at about the rank. A product with so many random columns has the
    same range (Halko et al. 2011, arXiv:0909.4061). The trace shows whether anything is lost.
    """
    rank = int(torch.linalg.cholesky_ex(matrix)[1])  # 0: full rank
    if 0 < rank < _SHARE * len(matrix):
        draw = torch.Generator().manual_seed(0)
        sketch = torch.randn(len(matrix), rank + _MORE, generator=draw, dtype=torch.float64)
        found: Tensor = torch.linalg.qr(matrix @ sketch.to(matrix), mode="complete")[0]
        inside = found[:, : sketch.shape[1]]
        part = inside.mH @ matrix @ inside
        whole, kept = (float(each.diagonal().real.sum()) for each in (matrix, part))
        if whole - kept <= len(matrix) * torch.finfo(matrix.dtype).eps * whole:
            inside.copy_(inside @ _decomposed(part))
            return found
    return _decomposed(matrix)


def _decomposed(matrices: Tensor) -> Tensor:
    found: Tensor = torch.linalg.eigh(matrices)[1]
    return found
