"""Matrix products, by whichever kernel is faster here.

oneDNN's kernel of linear layers uses the widest vector instructions of every processor; the matrix
kernels that torch is built with do not on some (half as fast on AMD processors with AVX-512), and
are faster on others. Its kernels have no derivative, and take float32 on the CPU alone.
"""

import torch
from torch import Tensor
from torch.backends import mkldnn

from gradscope.blocks.variants import Variant, fastest, seconds

WORTH_A_CALL = 2**23  # multiplications: a kernel that is started for fewer is no gain
_LEAF = 64  # positions below which a Gram matrix is taken whole


def contracted(left: Tensor, right: Tensor) -> Tensor:
    """Return Σᵢₜ left[i, k, t, r] right[i, k, t, c] as (k, r, c)."""
    positions_first = all(f.stride(2) > f.stride(0) for f in (left, right))
    order = (1, 2, 0, 3) if positions_first else (1, 0, 2, 3)  # as they lie: nothing is copied
    rows, columns = (f.permute(order).flatten(1, 2) for f in (left, right))  # (k, n·t, ·)
    columns = columns.to(rows.dtype)
    k, t, r = rows.shape
    c = columns.shape[2]
    flops = 2.0 * k * t * r * c

    def one_by_one() -> Tensor:
        if r > c:  # the kernel copies its first factor: better the smaller one
            return _one_by_one(columns, rows).mT
        return _one_by_one(rows, columns)

    variants = {"gemm": Variant(seconds(flops), lambda: torch.bmm(rows.mT, columns))}
    if _by_onednn(rows, columns):
        variants["oneDNN"] = Variant(seconds(flops, 0, k), one_by_one, optional=True)
    return fastest(f"sums of products {k}x{r}x{c}", {"n·t": t}, rows, variants)


def separate(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return Σₜ left[i, t, r] right[i, t, c] for each i (m, r, c), written into `out` if given."""
    m, t, r = left.shape
    c = right.shape[2]
    flops = 2.0 * m * t * r * c
    variants = {"together": Variant(seconds(flops), lambda: torch.bmm(left.mT, right, out=out))}
    if flops >= WORTH_A_CALL * m and _by_onednn(left, right):
        each = seconds(flops, 4.0 * m * r * c, m)
        run = lambda: _one_by_one(left, right, out)  # noqa: E731
        variants["one by one"] = Variant(each, run, optional=True)
    return fastest(f"products {r}x{c}", {"t": t, "n": m}, left, variants)


def ghost(left: Tensor, right: Tensor) -> Tensor:
    """Return ‖Σₜ leftₜ ⊗ rightₜ‖² (m,) = Σₜₛ (leftₜ·leftₛ)(rightₜ·rightₛ) of (m, t, r), (m, t, c).

    The Gram matrices over positions are symmetric: of many positions half are left out (Li et al.
    2021, arXiv:2110.05679, "ghost norms").
    """
    t = left.shape[1]
    if t < 2 * _LEAF:
        return _met(left, left, right, right)
    (a, b), (c, d) = ((f[:, : t // 2], f[:, t // 2 :]) for f in (left, right))
    return ghost(a, c) + ghost(b, d) + 2 * _met(a, b, c, d)


def _met(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return Re Σ (a bᴴ) ∘ (c dᴴ) (m,)."""
    return (torch.bmm(a, b.mH) * torch.bmm(c, d.mH)).sum((1, 2)).real


def _one_by_one(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return leftᵢᵀ rightᵢ (m, r, c) by oneDNN, in `out` if given."""
    if out is None and len(left) == 1:
        return _product(left[0].mT, right[0].mT)[None]  # as it is: a copy costs a third of it
    found = left.new_empty(len(left), left.shape[2], right.shape[2]) if out is None else out
    for place, a, b in zip(found, left, right, strict=True):
        place.copy_(_product(a.mT, b.mT))
    return found


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left rightᵀ (..., o) by oneDNN."""
    if not (right.is_contiguous() or right.mT.is_contiguous()):
        right = right.contiguous()  # other strides take a path a hundred times as slow
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return found


def _by_onednn(*given: Tensor) -> bool:
    """Whether oneDNN's kernels take these numbers: plain ones, of which no derivative is asked."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    known = known and hasattr(torch._C._functorch, "peek_interpreter_stack")
    if not (known and mkldnn.is_available() and mkldnn.enabled):  # type: ignore[no-untyped-call]
        return False
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    inside = torch._C._functorch.peek_interpreter_stack() is not None  # of torch.func's
    return not (tracked or inside) and all(
        t.device.type == "cpu"
        and t.dtype == torch.float32
        and t.layout == torch.strided
        and t.numel() > 0
        for t in given
    )
