"""Matrix products and the hyperbolic tangent, by whichever kernel is faster here.

oneDNN's kernel of linear layers uses the widest vector instructions of every processor; the matrix
kernels that torch is built with do not on some (half as fast on AMD processors with AVX-512). Its
kernels have no derivative, and take float32 on the CPU alone.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.backends import mkldnn

from gradscope.blocks.variants import Variant, fastest, seconds

Activation = Literal["none", "sigmoid", "tanh"]
_AFTER: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}

WORTH_A_CALL = 2**23  # multiplications: a kernel that is started for fewer is no gain
_LEAF = 64  # positions below which a Gram matrix is taken whole
_LARGE = 2**15  # entries from which on oneDNN's tanh pays for two copies
_PART = 2**20  # entries taken at a time: their copies stay near the caches


def multiplied(
    left: Tensor, right: Tensor, bias: Tensor | None = None, after: Activation = "none"
) -> Tensor:
    """Return after(left rightᵀ + bias) (..., o): a linear layer and what squashes its output.

    Args:
        left: (..., k).
        right: (o, k).
        bias: (o,).
        after: The function of each number.
    """
    if _by_onednn(left, right):  # nowhere slower than torch's own but by its start
        return _linear(left, right, bias, after)
    return _AFTER[after](F.linear(left, right, bias))


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
        variants["oneDNN"] = Variant(seconds(flops / 2, 0, k), one_by_one)
    return fastest(f"sums of products {r}x{c}", k * t, rows, variants)


def separate(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return Σₜ left[i, t, r] right[i, t, c] for each i (m, r, c), written into `out` if given."""
    m, t, r = left.shape
    c = right.shape[2]
    flops = 2.0 * m * t * r * c
    variants = {"together": Variant(seconds(flops), lambda: torch.bmm(left.mT, right, out=out))}
    if flops >= WORTH_A_CALL * m and _by_onednn(left, right):
        written = 4.0 * m * r * c
        one_by_one = seconds(flops / 2, written, m)
        variants["one by one"] = Variant(one_by_one, lambda: _one_by_one(left, right, out))
    return fastest(f"products {r}x{c}, t={t}", m, left, variants)


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


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent (...), of many numbers by oneDNN: a fourth of torch's time.

    Both are off by less than the last digit of float32 (7e-8 against 6e-8 of the value).
    """
    if x.numel() < _LARGE or not x.is_contiguous() or not _by_onednn(x):
        return torch.tanh(x)
    if x.numel() <= _PART:
        return _tanh(x)
    out = torch.empty_like(x)
    numbers, places = x.view(-1), out.view(-1)
    for start in range(0, x.numel(), _PART):
        part = slice(start, start + _PART)
        places[part] = _tanh(numbers[part])
    return out


def plain(factors: Sequence[Tensor], *dtypes: torch.dtype) -> bool:
    """Whether these are numbers on the CPU, outside the transformations of `torch.func`."""
    return torch._C._functorch.peek_interpreter_stack() is None and all(
        t.device.type == "cpu" and t.dtype in dtypes and t.layout == torch.strided and t.numel() > 0
        for t in factors
    )


def _met(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return Re Σ (a bᴴ) ∘ (c dᴴ) (m,)."""
    return (torch.bmm(a, b.mH) * torch.bmm(c, d.mH)).sum((1, 2)).real


def _one_by_one(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return leftᵢᵀ rightᵢ (m, r, c), in `out` if given."""
    if out is None and len(left) == 1:
        return _linear(left[0].mT, right[0].mT)[None]  # as it is: a copy would cost a third of it
    found = left.new_empty(len(left), left.shape[2], right.shape[2]) if out is None else out
    for place, a, b in zip(found, left, right, strict=True):
        place.copy_(_linear(a.mT, b.mT))
    return found


def _linear(
    left: Tensor, right: Tensor, bias: Tensor | None = None, after: Activation = "none"
) -> Tensor:
    """Return after(left rightᵀ + bias) (..., o) by oneDNN."""
    if not (right.is_contiguous() or right.mT.is_contiguous()):
        right = right.contiguous()  # other strides take a path a hundred times as slow
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, after, [], "")
    return found


def _tanh(x: Tensor) -> Tensor:
    found: Tensor = torch.tanh_(x.to_mkldnn()).to_dense()
    return found


def _by_onednn(*given: Tensor) -> bool:
    """Whether oneDNN's kernels take these numbers; they have no derivative."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not (known and mkldnn.is_available() and mkldnn.enabled):  # type: ignore[no-untyped-call]
        return False
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return not tracked and plain(given, torch.float32)
