"""Gradients that are sums of outer products: linear layers, convolutions, recurrent layers.

With groups k and positions t, sample i's gradient is

    gᵢ[k, r, c] = Σₜ left[i, k, t, r] · right[i, k, t, c],

read in this order as the parameter's shape. In a linear layer, left is the output gradient (r = o)
and right is the input (c = i). In a convolution, positions are output pixels and right has patches
(Goodfellow 2015, arXiv:1510.01799; Rochette et al. 2019, arXiv:1912.06015). If a weight is stored
inputs first, left is the input and right is the output gradient (`right_is_gradient`).

The code uses the kernel that is faster on this machine. oneDNN's linear kernel uses the widest
vector instructions of every processor. torch's matrix kernels do not on some processors (half as
fast on AMD with AVX-512), and are faster on others. The oneDNN kernel has no derivative, and
supports only float32 on the CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.backends import mkldnn

from gradscope.blocks.base import (
    TILE_BYTES,
    Block,
    DenseBlock,
    Factors,
    TensorBlock,
    p_norms,
    precise,
    size,
    squared_sizes,
    squares,
    summed,
    times,
)
from gradscope.blocks.variants import Variant, fastest, seconds
from gradscope.process.memory import slices

_READ_AGAIN = 2**19  # bytes computed and read twice, next to two sums: 1.5 MiB, one core's cache
KEPT = 2**24  # bytes of dense gradients that are kept between norms and sum


@dataclass(frozen=True, eq=False)
class OuterBlock(TensorBlock):
    """A sum of outer products over positions."""

    left: Tensor  # (n, k groups, t, r rows)
    right: Tensor  # (n, k, t, c columns)
    parameter_shape: tuple[int, ...]  # any shape with k·r·c entries
    # whether right is the output gradient, instead of left: one bool, or (t,) bool by position
    right_is_gradient: bool | Tensor = False
    numbers = ("left", "right")
    kind = "outer"
    has_shortcuts = True

    @classmethod
    def matrix(cls, left: Tensor, right: Tensor) -> "OuterBlock":
        """Make the block of a matrix (r, c) from left (n, t, r) and right (n, t, c)."""
        return cls(left.unsqueeze(1), right.unsqueeze(1), (left.shape[-1], right.shape[-1]))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes (k, t, r, c)."""
        _, k, t, r = self.left.shape
        return k, t, r, int(self.right.shape[-1])

    @property
    def sums_squares(self) -> bool:
        return self.left.shape[2] == 1

    @property
    def factored_size(self) -> int:
        return prod(self.left.shape[1:]) + prod(self.right.shape[1:])

    def factors(self) -> Factors:
        return Factors("outer", {"left": self.left, "right": self.right}, self.shape)

    def dense(self, out: Tensor | None = None) -> Tensor:
        """Return the gradients (n, *shape), one matrix product per sample and group."""
        k, t, r, c = self.sizes
        left = self.left.to(self.dtype).flatten(0, 1)  # (n·k, t, r)
        right = self.right.to(self.dtype).flatten(0, 1)  # (n·k, t, c)
        direct = out is not None and out.is_contiguous() and out.dtype == self.dtype
        target = out.view(self.n * k, r, c) if direct and out is not None else None
        if t == 1:  # a broadcast product is faster than a matrix kernel
            product = torch.mul(left.mT, right, out=target)
        else:
            product = separate(left, right, target)
        dense = product.view(self.n, *self.shape)
        return dense if out is None or direct else out.copy_(dense)

    def scale(self, factors: Tensor) -> "OuterBlock":
        """Multiply sample i by `factors[i]`; only the smaller factor changes."""
        left, right = self.left, self.right
        if left.shape[-1] <= right.shape[-1]:
            return replace(self, left=times(left, factors))
        return replace(self, right=times(right, factors))

    def reshape(self, shape: tuple[int, ...]) -> "OuterBlock":
        return replace(self, parameter_shape=shape)

    def transpose(self, axis0: int, axis1: int) -> Block:
        """Swap two axes; for a matrix, swap the factors."""
        k, _, r, c = self.sizes
        if k == 1 and self.shape == (r, c) and {axis0 % 2, axis1 % 2} == {0, 1}:
            return OuterBlock(self.right, self.left, (c, r), opposite(self.right_is_gradient))
        return super().transpose(axis0, axis1)

    def nonzero_positions(self) -> Tensor:
        """Return (n, k, t) bool: whether a position's output gradient has a nonzero entry."""
        return nonzero_gradients(self.left, self.right, self.right_is_gradient)

    def squared_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,), from Gram matrices over positions if these are smaller."""
        k, t, r, c = self.sizes
        left, right = precise(self.left), precise(self.right)
        if t == 1:
            sizes = [squared_sizes(f.reshape(self.n * k, -1)) for f in (left, right)]
            product = sizes[0] * sizes[1]
            return product if k == 1 else product.view(self.n, k).sum(1)
        work = 2.0 * self.n * k * t
        variants = {
            "gram": Variant(seconds(0.6 * work * t * (r + c), 0, 6), self.ghost_norms),
            "dense": Variant(
                seconds(work * r * c, 8.0 * self.n * k * r * c), super().squared_norms
            ),
        }
        return fastest(f"norms {k}x{r}x{c}", {"t": t, "n": self.n}, left, variants)

    def ghost_norms(self) -> Tensor:
        """Return ‖gᵢ‖² (n,), from the Gram matrices over positions."""
        left, right = (precise(f).flatten(0, 1) for f in (self.left, self.right))
        return ghost(left, right).view(self.n, -1).sum(1).clamp_min(0.0)

    def densify(self, always: bool = False) -> Block:
        """Return the dense block if it fits near the caches and is cheaper than two shortcuts.

        The cost model decides between Gram matrices plus one long sum, and the dense gradients.
        """
        k, t, r, c = self.sizes
        entries, work = self.n * k * r * c, 2.0 * self.n * k * t
        if t == 1 or entries * self.dtype.itemsize > KEPT or precise(self.left) is not self.left:
            return self
        twice = seconds(0.6 * work * t * (r + c), 0, 6) + seconds(work * r * c)
        once = seconds(work * r * c, 8.0 * entries)
        return DenseBlock(self.dense()) if always or once < twice else self

    def norms(self, p: float = 2.0) -> Tensor:
        """Return ‖gᵢ‖ₚ (n,); for one outer product it is the product of the factors' p-norms."""
        k, t, _, _ = self.sizes
        if p == 2 or t > 1:
            return super().norms(p)
        left, right = (p_norms(precise(f).flatten(0, 2), p) for f in (self.left, self.right))
        return p_norms((left * right).view(self.n, k), p)

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ gᵢ (*shape), as one long sum over samples and positions."""
        block = self if weights is None else self.scale(weights)
        return contracted(precise(block.left), precise(block.right)).reshape(self.shape)

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        """Return Σᵢ wᵢ |gᵢ|² (*shape); with one position it is Σᵢ wᵢ b²⊗a².

        With several positions, their sum must be squared, so dense tiles or bands are used.
        """
        if self._is_long:
            return self._sums_by_bands(None, weights, linear=False)[1]
        if not self.sums_squares:
            return super().squared_sum(weights)
        left, right = squares(precise(self.left)), squares(precise(self.right))
        if not bool((left.sum() + right.sum()).isfinite()):  # the products may still be finite
            return super().squared_sum(weights)
        return contracted(times(left, weights), right).reshape(self.shape)

    def sums(
        self, weights: Tensor | None = None, for_squares: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return Σᵢ wᵢ gᵢ and Σᵢ uᵢ |gᵢ|² (*shape), from tiles that stay in the cache."""
        real = self.dtype in (torch.float32, torch.float64) and self.device.type == "cpu"
        if self.sums_squares or not real:
            return super().sums(weights, for_squares)
        if self._is_long:
            return self._sums_by_bands(weights, for_squares)
        first, second = torch.zeros(2, *self.shape, dtype=self.dtype)
        buffer = torch.empty(0, dtype=self.dtype)
        for part in self._parts(2 * _READ_AGAIN):
            some = self.select(part)
            if len(buffer) < some.n:
                buffer = torch.empty(some.n, *self.shape, dtype=self.dtype)
            tile = some.dense(buffer[: some.n])
            first += summed(tile, part, weights)
            second += summed(tile.mul_(tile), part, for_squares)
        return first, second

    @property
    def _is_long(self) -> bool:
        """Whether sums over positions of one sample do not stay in the cache."""
        k, t, r, c = self.sizes
        real = self.dtype in (torch.float32, torch.float64) and self.device.type == "cpu"
        tracked = torch.is_grad_enabled() and (self.left.requires_grad or self.right.requires_grad)
        long = 4 * r * c * self.dtype.itemsize >= _READ_AGAIN
        return real and not tracked and t > 1 and k == 1 and long

    def _sums_by_bands(
        self, weights: Tensor | None, for_squares: Tensor | None, *, linear: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Compute some rows of a matrix (r, c) at a time, sample after sample.

        Without `linear`, the first of both sums stays zero.
        """
        _, _, r, c = self.sizes
        left, right = (f[:, 0].to(self.dtype) for f in (self.left, self.right))
        first, second = torch.zeros(2, r, c, dtype=self.dtype)
        ones = [1.0] * self.n
        w, u = (ones if f is None else f.tolist() for f in (weights, for_squares))
        for rows in slices(r, c * self.dtype.itemsize, _READ_AGAIN):
            band, squared = first[rows], second[rows]
            tile = torch.empty_like(band)
            for i in range(self.n):
                torch.mm(left[i, :, rows].mT, right[i], out=tile)
                if linear:
                    band.add_(tile, alpha=w[i])
                squared.addcmul_(tile, tile, value=u[i])
        return first.view(self.shape), second.view(self.shape)

    def norm_bound(self) -> Tensor:
        """Return the product of the factors' norms (Cauchy–Schwarz)."""
        return size(self.left) * size(self.right)

    def dot(self, vector: Tensor) -> Tensor:
        k, _, r, c = self.sizes
        matrix = precise(vector.conj()).reshape(k, r, c)
        return (torch.matmul(precise(self.left), matrix) * precise(self.right)).sum((1, 2, 3))

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield some rows of the parameter at a time, for all samples."""
        k, t, r, c = self.sizes
        row = self.n * c * self.dtype.itemsize
        for group in range(k):
            left, right = self.left[:, group], self.right[:, group]
            start = group * r * c
            if t == 1:
                step = max(1, TILE_BYTES // max(1, 4 * row))
                yield from _single(left[:, 0], right[:, 0], start, step)
                continue
            for rows in slices(r, row, TILE_BYTES):
                entries = slice(start + rows.start * c, start + rows.stop * c)
                values = OuterBlock.matrix(left[..., rows], right).dense()
                yield slice(0, self.n), entries, values.flatten(1)

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · Gᵢ · rightᵀ = Σₜ (left bₜ) ⊗ (right aₜ) (n, a, b), without any Gᵢ."""
        k, _, r, c = self.sizes
        if left.shape[1] != k * r or right.shape[1] != c:
            return super().two_sided(left, right)
        dtype = torch.promote_types(self.dtype, left.dtype)
        return replace(self, right=self.right.to(dtype) @ right.to(dtype).mT).left_sided(left)

    def left_sided(self, left: Tensor) -> Tensor:
        """Return Σₜ (left bₜ) ⊗ aₜ (n, a, c), summed over groups, for `left` (a, k·r)."""
        k, _, r, _ = self.sizes
        dtype = torch.promote_types(self.dtype, left.dtype)
        by_group = left.to(dtype).view(-1, k, r).permute(1, 2, 0)  # (k, r, a)
        rows = self.left.to(dtype) @ (by_group[0] if k == 1 else by_group)  # (n, k, t, a)
        rows, columns = rows.flatten(1, 2).mT, self.right.flatten(1, 2)
        return rows * columns if columns.shape[1] == 1 else rows @ columns

    def gram(self) -> Tensor:
        """Return ⟨gᵢ, gⱼ⟩ (n, n); with one position, the product of the factors' Gram matrices."""
        if self.sizes[1] > 1:
            return super().gram()
        left, right = (precise(f)[:, :, 0].transpose(0, 1) for f in (self.left, self.right))
        found = ((left @ left.mH) * (right @ right.mH)).sum(0)
        return found if bool(found.isfinite().all()) else super().gram()


def opposite(right_is_gradient: bool | Tensor) -> bool | Tensor:
    """Return `right_is_gradient` for the transposed block."""
    return ~right_is_gradient if isinstance(right_is_gradient, Tensor) else not right_is_gradient


def nonzero_gradients(left: Tensor, right: Tensor, right_is_gradient: bool | Tensor) -> Tensor:
    """Return (..., t) bool: whether the output gradient at a position has a nonzero entry.

    NaN counts as nonzero. The factors are (..., t, r) and (..., t, c). `right_is_gradient` is the
    attribute of the block.
    """
    if isinstance(right_is_gradient, Tensor):
        return torch.where(right_is_gradient, (right != 0).any(-1), (left != 0).any(-1))
    return ((right if right_is_gradient else left) != 0).any(-1)


def _single(
    left: Tensor, right: Tensor, start: int, step: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield pieces of one outer product per sample: left (n, r), right (n, c), first entry `start`.

    Samples are adjacent in a buffer that fits into the caches. A product has little overhead, and
    nothing is copied.
    """
    columns = right.T.contiguous()
    (c, n), r = columns.shape, left.shape[1]
    dtype = torch.promote_types(left.dtype, right.dtype)
    buffer = torch.empty(min(step, r), c, n, dtype=dtype, device=left.device)
    whole = buffer.flatten(0, 1).T
    for rows in torch.split(left.T.contiguous().unsqueeze(1), step):
        count = len(rows) * c
        torch.mul(rows, columns, out=buffer[: len(rows)])
        yield slice(0, n), slice(start, start + count), whole[:, :count]
        start += count


WORTH_A_CALL = 2**23  # multiplications: four times the overhead of a call in `seconds`
_LEAF = 64  # positions below which a Gram matrix is not split


def contracted(left: Tensor, right: Tensor) -> Tensor:
    """Return Σᵢₜ left[i, k, t, r] right[i, k, t, c] as (k, r, c)."""
    positions_first = all(f.stride(2) > f.stride(0) for f in (left, right))
    # the order in memory, so that nothing is copied
    order = (1, 2, 0, 3) if positions_first else (1, 0, 2, 3)
    rows, columns = (f.permute(order).flatten(1, 2) for f in (left, right))  # (k, n·t, ·)
    columns = columns.to(rows.dtype)
    k, t, r = rows.shape
    c = columns.shape[2]
    flops = 2.0 * k * t * r * c

    def one_by_one() -> Tensor:
        if r > c:  # the kernel copies its first factor, so pass the smaller one
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

    The Gram matrices over positions are symmetric, so half of their blocks are skipped (Li et al.
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
    """Return leftᵢᵀ rightᵢ (m, r, c) by oneDNN, written into `out` if given."""
    if out is None and len(left) == 1:
        # not copied: a copy takes a third of the time
        return _product(left[0].mT, right[0].mT)[None]
    found = left.new_empty(len(left), left.shape[2], right.shape[2]) if out is None else out
    for place, a, b in zip(found, left, right, strict=True):
        place.copy_(_product(a.mT, b.mT))
    return found


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left rightᵀ (..., o) by oneDNN."""
    if not (right.is_contiguous() or right.mT.is_contiguous()):
        right = right.contiguous()  # other strides are a hundred times slower
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return found


def _by_onednn(*given: Tensor) -> bool:
    """Whether oneDNN supports these tensors: float32 on the CPU, without derivatives."""
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    if peek is None or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if not (mkldnn.is_available() and mkldnn.enabled):  # type: ignore[no-untyped-call]
        return False
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    inside = peek() is not None  # inside a transform of torch.func
    return not (tracked or inside) and all(
        t.device.type == "cpu"
        and t.dtype == torch.float32
        and t.layout == torch.strided
        and t.numel() > 0
        for t in given
    )
