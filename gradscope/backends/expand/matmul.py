"""Matrix products: against a shared matrix the samples are rows of one product.

Shapes: n sample, b batch, p row, k contracted, q column.
"""

import torch
from torch import Tensor

from gradscope.backends.expand.facts import rules
from gradscope.backends.expand.tensor import Samples, fold, is_shared, unfold

Scalar = int | float | complex


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply physical matrices (n, p, k) and (n, k, q) sample by sample: (n, p, q).

    A shared factor is never repeated in memory.
    """
    n, p, k = a.shape
    q = b.shape[2]
    if is_shared(b):
        return (a.reshape(n * p, k) @ b[0]).reshape(n, p, q)
    if is_shared(a):
        return (b.mT.reshape(n * q, k) @ a[0].mT).reshape(n, q, p).mT
    return torch.bmm(a, b)


def batched(a: Tensor, b: Tensor) -> Tensor:
    """Multiply physical (n, b, p, k) and (n, b, k, q): (n, b, p, q)."""
    n, size, p, k = a.shape
    q = b.shape[3]
    if size == 1:
        return product(a[:, 0], b[:, 0]).unsqueeze(1)
    if is_shared(b):
        rows = a.transpose(0, 1).reshape(size, n * p, k)
        return torch.bmm(rows, b[0]).reshape(size, n, p, q).transpose(0, 1)
    if is_shared(a):
        return batched(b.mT, a.mT).mT
    return unfold(torch.bmm(fold(a), fold(b)), n)


@rules.register("mm.default")
@rules.register("mv.default")
def mm(s: Samples, a: Tensor, b: Tensor) -> Tensor:
    """(p, k) by (k, q), or by (k,)."""
    if b.dim() == 1:
        return product(s.of(a), s.of(b).unsqueeze(2)).squeeze(2)
    return product(s.of(a), s.of(b))


@rules.register("bmm.default")
def bmm(s: Samples, a: Tensor, b: Tensor) -> Tensor:
    """(b, p, k) by (b, k, q)."""
    return batched(s.of(a), s.of(b))


@rules.register("addmm.default")
@rules.register("addmv.default")
@rules.register("baddbmm.default")
def addmm(
    s: Samples, c: Tensor, a: Tensor, b: Tensor, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Tensor:
    """beta·c + alpha·a b; c broadcasts from the right, past the sample axis."""
    pc, pa, pb = s.of(c), s.of(a), s.of(b)
    if is_shared(pb) and is_shared(pc) and (c.dim(), b.dim()) == (1, 2):
        n, p, k = pa.shape
        rows = torch.addmm(pc[0], pa.reshape(n * p, k), pb[0], beta=beta, alpha=alpha)
        return rows.reshape(n, p, pb.shape[2])
    found: Tensor = bmm(s, a, b) if a.dim() == 3 else mm(s, a, b)
    if alpha != 1:
        found = found * alpha
    if beta == 0:  # torch ignores NaN in `c` then
        return found
    return torch.add(found, pc[(slice(None), *[None] * (found.dim() - pc.dim()))], alpha=beta)


@rules.register("dot.default")
def dot(s: Samples, a: Tensor, b: Tensor) -> Tensor:
    """Sum of products, (k,) by (k,)."""
    return product(s.of(a).unsqueeze(1), s.of(b).unsqueeze(2)).flatten()


@rules.register("vdot.default")
def vdot(s: Samples, a: Tensor, b: Tensor) -> Tensor:
    """Sum of products, the first factor conjugated."""
    return product(s.of(a).conj_physical().unsqueeze(1), s.of(b).unsqueeze(2)).flatten()
