"""Inner products of two sets of gradients, computed tile by tile."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients, OuterBlock, wide
from gradscope.core.precision import products
from gradscope.process.memory import slices

Groups = Mapping[str, str]  # {parameter: group}; products are summed within a group
Range = tuple[float, float]  # of the largest magnitudes of rows that are not zero: least, largest

_SMALL = 1e-24  # smaller squared norms are computed again in float64
_SHORT = 512  # the most products that are summed in float32, if the sum is in float64
_HELD = (1e-25, 1e30)  # sums of products of two numbers in this range keep digits in float32
_PAIRS_BYTES = 2**26  # the most bytes for products at a time


class GradientBatch(NamedTuple):
    """A batch of samples of a `GradientSource`."""

    places: Tensor  # (b,) int64, the rows of the samples in the source
    gradients: Gradients  # their gradients, all finite
    # of queries: {group: qᵀ H⁻¹ q (b,)}, if the form of the scores needs it
    own: Mapping[str, Tensor] = {}

    def select(self, rows: slice) -> "GradientBatch":
        """Return the samples in `rows`."""
        own = {group: products[rows] for group, products in self.own.items()}
        return GradientBatch(self.places[rows], self.gradients.select(rows), own)


class Tile:
    """Gradients of m samples, for products with further gradients in float32 or float64.

    A block's dense rows are formed only if products of factors cost more. With `keeps_rows`, they
    are formed once and kept.
    """

    def __init__(
        self, batches: list[GradientBatch], dtype: torch.dtype, *, keeps_rows: bool = True
    ) -> None:
        none = torch.empty(0, dtype=torch.int64)
        self.places = torch.cat([none, *(batch.places for batch in batches)])  # (m,)
        self.batches, self._dtype, self._keeps_rows = batches, dtype, keeps_rows
        self._rows: dict[tuple[str, int], Tensor] = {}
        self._ranges: dict[tuple[str, int], Range] = {}

    @property
    def n(self) -> int:
        """The number of samples, m."""
        return len(self.places)

    @property
    def own(self) -> dict[str, Tensor]:
        """{group: qᵀ H⁻¹ q (m,)} of queries, if their batches have it."""
        names = dict.fromkeys(group for batch in self.batches for group in batch.own)
        return {k: torch.cat([batch.own[k].cpu() for batch in self.batches]) for k in names}

    def map(self, change: Callable[[Gradients], Gradients]) -> "Tile":
        """Return a tile of the same samples whose gradients `change` has replaced."""
        made = [GradientBatch(batch.places, change(batch.gradients)) for batch in self.batches]
        return Tile(made, self._dtype)

    def with_each(self, other: Gradients, groups: Groups | None = None) -> dict[str, Tensor]:
        """Return {group: Re⟨gᵢ, hⱼ⟩ (m, n)} with n gradients hⱼ; without groups {"": ...}."""
        every: dict[str, Tensor] = {}
        for name, block in other.items():
            group, top = "" if groups is None else groups[name], 0
            if group not in every:
                every[group] = torch.zeros(
                    self.n, other.n, dtype=torch.float64, device=block.device
                )
            found, dense = every[group], list[_Part]()
            for number, batch in enumerate(self.batches):
                own, rows = batch.gradients[name], slice(top, top + len(batch.places))
                if _by_factors(own, block, formed=self._keeps_rows):
                    _add_by_factors(found[rows], own, block, self._dtype)
                else:
                    dense.append(_Part(rows, *self._dense(name, number)))
                top = rows.stop
            if dense:
                _add_dense(found, dense, block, self._dtype)
        return every

    def _dense(self, name: str, number: int) -> tuple[Tensor | OuterBlock, Range | None]:
        """Return the dense rows (m, entries) and their range.

        If rows are not kept, it is the block that forms some of its entries at a time, and None.
        """
        block = self.batches[number].gradients[name]
        if not self._keeps_rows and isinstance(block, OuterBlock) and block.sizes[0] == 1:
            return block, None
        if (name, number) not in self._rows:
            found = block.dense()
            self._rows[name, number] = real_rows(found, found.dtype.to_real())
            self._ranges[name, number] = _range(self._rows[name, number])
        return self._rows[name, number], self._ranges[name, number]


class _Part(NamedTuple):
    """Some rows of a tile for one parameter."""

    rows: slice  # their places in the tile
    values: Tensor | OuterBlock  # the dense rows (m, entries), or the block that forms them
    range: Range | None  # None: not computed yet


def real_rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (n, ...) as real rows (n, entries); a complex number becomes two entries."""
    flat = values.reshape(len(values), prod(values.shape[1:]))
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).flatten(1)
    return flat.to(dtype)


def row_products(
    first: Gradients, second: Gradients, groups: Groups | None = None
) -> dict[str, Tensor]:
    """Return {group: Re⟨gᵢ, hᵢ⟩ (n,) in float64} of the rows gᵢ and hᵢ of two sets.

    Without groups the result is {"": ...}. If the two sets are the same object, these are squared
    norms, which are computed without dense rows.
    """
    found: dict[str, Tensor] = {}
    for name, block in first.items():
        if first is second:
            sums = first.squared_norms[name].double()
            if bool((few := sums < _SMALL).any()):  # squares in float32 may have been rounded to 0
                sums[few] = wide(block.select(few.nonzero()[:, 0])).squared_norms()
        else:
            other = real_rows(second[name].dense(), torch.float64)
            sums = other.new_zeros(first.n)
            for samples, part, values in block.pieces():
                k = 2 if values.is_complex() else 1
                own, width = real_rows(values, torch.float64), slice(k * part.start, k * part.stop)
                sums[samples] += torch.einsum("ij,ij->i", own, other[samples, width])
        group = "" if groups is None else groups[name]
        found[group] = found[group] + sums if group in found else sums
    return found


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of at least one tensor."""
    return reduce(torch.add, tensors)


def tiles(
    batches: Iterable[GradientBatch],
    n: int,
    most: int,
    dtype: torch.dtype,
    *,
    keeps_rows: bool = True,
) -> Iterator[Tile]:
    """Yield n samples of a source in tiles of `most` places; no tile has samples left out."""
    held: list[GradientBatch] = []
    end = most
    for batch in batches:
        rest = batch
        while len(rest.places):
            cut = int((rest.places < end).sum())
            if cut:
                held.append(rest if cut == len(rest.places) else rest.select(slice(0, cut)))
            if cut == len(rest.places):
                break
            rest = rest.select(slice(cut, len(rest.places)))
            yield Tile(held, dtype, keeps_rows=keeps_rows)
            held, end = [], end + most
    while end - most < n:
        yield Tile(held, dtype, keeps_rows=keeps_rows)
        held, end = [], end + most


def _by_factors(a: Block, b: Block, *, formed: bool) -> bool:
    """Whether products of factors need fewer multiplications than products of dense rows.

    Dense rows of `a` are `formed` already, or they have to be formed for these products.
    """
    if a.kind != "outer" or b.kind != "outer" or a.dtype.is_complex or b.dtype.is_complex:
        return False
    first, second = a.factors(), b.factors()
    if first is None or second is None:
        return False
    (_, k, t, r), (_, _, _, c) = (x.shape for x in first.tensors.values())
    s = second.tensors["left"].shape[2]
    return b.n * k * t * s * (r + c + 1) < prod(a.shape) * (b.n + (0 if formed else t))


def _add_dense(
    out: Tensor,
    every: Sequence[_Part],
    block: Block,
    dtype: torch.dtype,
) -> None:
    """Add products to rows of `out` (m, n)."""
    m = max(own.rows.stop - own.rows.start for own in every)
    for samples, entries, values in block.pieces():
        flat = real_rows(values, values.dtype.to_real())
        start = entries.start * (2 if values.is_complex() else 1)
        for some in slices(flat.shape[1], dtype.itemsize * (m + len(flat)), _PAIRS_BYTES):
            part, wide = flat[:, some], list[Tensor]()
            sizes = _range(part)
            for rows, own, known in every:
                mine = _entries(own, slice(start + some.start, start + some.stop))
                if dtype == torch.float64 and _held(mine, part, known or _range(mine), sizes):
                    out[rows, samples] += _by_parts(mine, part)
                    continue
                if not wide:  # in parts, and once: float64 may double the memory
                    wide.append(part.to(dtype).mT)
                (other,) = wide
                out[rows, samples] += mine.to(dtype) @ other


def _range(rows: Tensor) -> Range:
    """Return the least and the largest of the magnitudes max |x| of rows (m, w) that are not 0."""
    if rows.dtype != torch.float32 or not rows.numel():
        return 0.0, 0.0  # the range of other rows is not used
    sizes = torch.maximum(rows.amax(1), -rows.amin(1))  # a tenth of the time of a norm
    sizes = sizes[sizes != 0]
    return (float(sizes.amin()), float(sizes.amax())) if len(sizes) else (1.0, 1.0)


def _held(first: Tensor, second: Tensor, one: Range, other: Range) -> bool:
    """Whether short sums of products of float32 rows keep their digits in float32."""
    alike = first.dtype == second.dtype == torch.float32
    inside = _HELD[0] < one[0] * other[0] and one[1] * other[1] < _HELD[1]
    return alike and inside and products(first.device) == torch.float32


def _by_parts(first: Tensor, second: Tensor) -> Tensor:
    """Return the products (m, n) of rows (m, w) and (n, w) in float32, summed in float64.

    At most `_SHORT` products are summed in float32. This takes a fifth of the time of float64, and
    changes a product by about 1e-9 of ‖first‖ ‖second‖.
    """
    whole = first.shape[1] // _SHORT * _SHORT
    a, b = (rows[:, :whole].reshape(len(rows), -1, _SHORT) for rows in (first, second))
    found = torch.bmm(a.transpose(0, 1), b.permute(1, 2, 0)).sum(0, dtype=torch.float64)
    return found + first[:, whole:].double() @ second[:, whole:].double().mT


def _entries(own: Tensor | OuterBlock, part: slice) -> Tensor:
    """Return some entries (m, w) of real rows; of a block, only these rows of its matrix."""
    if isinstance(own, Tensor):
        return own[:, part]
    width = own.sizes[3] * (2 if own.dtype.is_complex else 1)
    first, last = part.start // width, -(-part.stop // width)
    matrices = OuterBlock.matrix(own.left[:, 0, :, first:last], own.right[:, 0])
    found = real_rows(matrices.dense(), own.dtype.to_real())
    return found[:, part.start - first * width : part.stop - first * width]


def _add_by_factors(out: Tensor, a: Block, b: Block, dtype: torch.dtype) -> None:
    """Add Σ over positions t, s of ⟨leftᵢₜ, leftⱼₛ⟩ ⟨rightᵢₜ, rightⱼₛ⟩ to `out` (m, n)."""
    first, second = a.factors(), b.factors()
    assert first is not None and second is not None  # `_by_factors` has checked them
    own = [x.to(dtype).transpose(0, 1) for x in first.tensors.values()]  # (k, m, t, ·)
    others = [x.to(dtype).transpose(0, 1).flatten(1, 2).mT for x in second.tensors.values()]
    (k, m, t, _), width = own[0].shape, others[0].shape[2]
    for rows in slices(m, 2 * dtype.itemsize * k * t * width, _PAIRS_BYTES):
        pairs = own[0][:, rows].flatten(1, 2) @ others[0]
        pairs *= own[1][:, rows].flatten(1, 2) @ others[1]
        out[rows] += pairs.reshape(k, -1, t, b.n, width // b.n).sum((0, 2, 4))
