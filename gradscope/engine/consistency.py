"""Gradients that contradict themselves: what blocks say of a few samples, held against itself.

Autograd proves sums over samples. Norms, rows, sums of squares, inner products and scaled sums are
found by shortcuts of their own; whatever these are, they have to be those of the same gradients.
"""

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients
from gradscope.blocks.base import PIECE_BYTES, as_rows, precise, squares
from gradscope.errors import CertificateError

# A slip shows in the first digits. Precision is proved elsewhere, and kernels differ in theirs.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}
_COARSE = 0.1  # in half precision
_FEW = 3  # samples that are looked at
_ROUNDINGS = 64.0  # of terms that cancel


def require_consistent(backend: str, gradients: Gradients, chosen: Tensor) -> None:
    """Hold what blocks say of some samples against the sums of each sample by itself.

    Args:
        backend: Where the gradients come from.
        gradients: Of n samples.
        chosen: Positions (k,) of finite samples; a few of them are looked at.

    Raises:
        CertificateError: Two answers contradict each other.
    """
    for name, block in gradients.items():
        row = max(1, prod(block.shape) * block.dtype.itemsize)
        few = chosen[: max(1, min(_FEW, PIECE_BYTES // row))].to(block.device)
        if not len(few):
            return
        for what in _contradictions(block.select(few), gradients.squared_norms[name][few]):
            raise _contradiction(backend, f"the {what} of its gradients are those of others", name)


def require_norms(backend: str, rows: Mapping[str, Tensor], gradients: Gradients) -> None:
    """Hold rows (n, *shape), as they are handed out, against the norms of the gradients.

    Raises:
        CertificateError: They are not the rows of these.
    """
    for name, values in rows.items():
        found = torch.linalg.vector_norm(as_rows(precise(values)), dim=1).square()
        told = gradients.squared_norms[name].to(found)
        lost = _lost(values, _bound(gradients[name], torch.zeros_like(found[0])) ** 2)
        most = 2 * _tolerance(values) * torch.maximum(found, told) + lost
        if bool(((found - told).abs() > most).any()):
            raise _contradiction(backend, "rows have other norms than it has told", name)


def _contradictions(few: Block, squared_norms: Tensor) -> Iterator[str]:
    """Yield what is not that of the sums of single samples, in words.

    Args:
        few: The gradients of k samples.
        squared_norms: What was told of them (k,).
    """
    alone = [few.select(slice(k, k + 1)).weighted_sum() for k in range(few.n)]
    right = as_rows(torch.stack(alone))  # (k, p)
    weights = torch.arange(1, few.n + 1, device=right.device).to(right.real.dtype) - 0.5
    claims = {
        "norms": (squared_norms, squares(right).sum(1)),
        "squares": (few.squared_sum().flatten(), squares(right).sum(0)),
        "inner products": (few.dot(alone[0]), right @ right[0].conj()),
        "rows": (as_rows(precise(few.dense())), right),
        "scaled sums": (few.scale(weights).weighted_sum().flatten(), weights.to(right) @ right),
    }
    size = torch.linalg.vector_norm(right)
    bound = _bound(few, size)
    for what, (found, wanted) in claims.items():
        gap = torch.linalg.vector_norm(found.to(wanted) - wanted)
        if what in ("rows", "scaled sums"):
            most = few.n * (_tolerance(few) * size + _ROUNDINGS * _eps(few) * bound)
        else:
            most = few.n * (2 * _tolerance(few) * size**2 + _lost(right, bound**2, _eps(few)))
        if not bool(gap <= most):
            yield what


def _contradiction(backend: str, what: str, name: str) -> CertificateError:
    return CertificateError(
        f"the {backend} backend contradicts itself: {what}",
        where=f"parameter {name!r}",
        remedy="Use another backend (auto tries all); loop is the reference.",
    )


def _bound(block: Block, otherwise: Tensor) -> Tensor:
    """Return the bound on a block's norms (0-d), and `otherwise` where it knows none."""
    found = block.bound().to(otherwise)
    return torch.where(found.isfinite(), found, otherwise)


def _tolerance(of: Tensor | Block) -> float:
    return _TOLERANCES.get(of.dtype.to_real(), _COARSE)


def _eps(of: Tensor | Block) -> float:
    return torch.finfo(of.dtype).eps


def _lost(rows: Tensor, squared: Tensor, eps: float | None = None) -> Tensor:
    """Return what sums of squares of rows (n, ...) lose by rounding, where terms are as large."""
    few = _ROUNDINGS * (_eps(rows) if eps is None else eps) * squared
    return few + torch.finfo(rows.dtype).tiny * rows[0].numel()
