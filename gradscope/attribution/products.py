"""Inner products of two sets of gradients, computed tile by tile."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients, OuterBlock, wide
from gradscope.process.memory import slices

Groups = Mapping[str, str]  # {parameter: group}; products are summed within a group

_SMALL = 1e-24  # smaller squared norms are computed again in float64
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
            found, dense = every[group], list[tuple[slice, Tensor | OuterBlock]]()
            for number, batch in enumerate(self.batches):
                own, rows = batch.gradients[name], slice(top, top + len(batch.places))
                if _by_factors(own, block, formed=self._keeps_rows):
                    _add_by_factors(found[rows], own, block, self._dtype)
                else:
                    dense.append((rows, self._dense(name, number)))
                top = rows.stop
            if dense:
                _add_dense(found, dense, block, self._dtype)
        return every

    def _dense(self, name: str, number: int) -> Tensor | OuterBlock:
        """Return the dense rows (m, entries), or the block that forms some of them at a time."""
        block = self.batches[number].gradients[name]
        if not self._keeps_rows and isinstance(block, OuterBlock) and block.sizes[0] == 1:
            return block
        if (name, number) not in self._rows:
            found = block.dense()
            self._rows[name, number] = real_rows(found, found.dtype.to_real())
        return self._rows[name, number]


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
    every: Sequence[tuple[slice, Tensor | OuterBlock]],
    block: Block,
    dtype: torch.dtype,
) -> None:
    """Add products to rows of `out` (m, n); each of `every` is a slice and its dense rows."""
    m = max(own.n if isinstance(own, OuterBlock) else len(own) for _, own in every)
    for samples, part, values in block.pieces():
        flat = real_rows(values, values.dtype.to_real())
        start = part.start * (2 if values.is_complex() else 1)
        for some in slices(flat.shape[1], dtype.itemsize * (m + len(flat)), _PAIRS_BYTES):
            other = flat[:, some].to(dtype).mT  # in parts: float64 may double the memory
            for rows, own in every:
                mine = _entries(own, slice(start + some.start, start + some.stop)).to(dtype)
                out[rows, samples] += mine @ other


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
