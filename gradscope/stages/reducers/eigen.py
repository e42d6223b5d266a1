"""Eigenvectors of large positive semidefinite matrices."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gradscope.blocks.variants import Clock, active_tuner, power

_LARGE = 512  # rows of a matrix whose range is worth a trial
_SHARE = 0.6  # of the rows: with a larger rank the range saves nothing
_MEASURED = 1024  # rows of a matrix for which torch and NumPy are compared, once on a machine
_MORE = 16  # columns of a sketch beyond the rank


def eigenvectors(matrices: Tensor, *, measured: bool = True) -> Tensor:
    """Return orthonormal eigenvectors as columns (k, f, f), in any order.

    `matrices` (k, f, f) are positive semidefinite, in float64 or complex128. With `measured`, the
    library that is faster on this machine computes them. Without, it is always torch: processes
    whose results are merged need the same basis.
    """
    if matrices.shape[-1] < _LARGE:
        return _by_torch(matrices)
    decomposed = _decomposed if measured else _by_torch
    return torch.stack([_by_range(one, decomposed) for one in matrices])


def _by_range(matrix: Tensor, decomposed: Callable[[Tensor], Tensor]) -> Tensor:
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
            inside.copy_(inside @ decomposed(part))
            return found
    return decomposed(matrix)


def _decomposed(matrix: Tensor) -> Tensor:
    """Return all eigenvectors of a matrix by torch, or by NumPy where that is faster."""
    if len(matrix) < _MEASURED or matrix.device.type != "cpu":
        return _by_torch(matrix)
    known: dict[str, Tensor] = {}

    def measure(timed: Clock) -> dict[str, float]:
        spent = {}
        for name, run in _VARIANTS.items():
            spent[name], known[name] = timed(partial(run, matrix), matrix.device)
        return spent

    request = f"eigenvectors n≤{power(len(matrix))}"
    sizes = len(matrix), matrix.device
    best = active_tuner().rank(request, *sizes, [*_VARIANTS], measure)[0][0]
    return known[best] if best in known else _VARIANTS[best](matrix)


def _by_torch(matrices: Tensor) -> Tensor:
    found: Tensor = torch.linalg.eigh(matrices)[1]
    return found


def _by_numpy(matrix: Tensor) -> Tensor:
    return torch.from_numpy(np.linalg.eigh(matrix.numpy())[1])


_VARIANTS = {"torch": _by_torch, "numpy": _by_numpy}
