"""Blocks for the samples of one batch that were computed in several parts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from gradscope.blocks.base import Block, DenseBlock, TensorBlock
from gradscope.blocks.convolution import ConvolutionBlock
from gradscope.blocks.outer import OuterBlock
from gradscope.blocks.scatter import ScatterBlock
from gradscope.blocks.total import TotalBlock

_CONCATENATED = (ConvolutionBlock, DenseBlock, OuterBlock, ScatterBlock)


def joined(blocks: Sequence[Block], place: Tensor) -> Block:
    """Return one block for the samples of `blocks`, which belong to one parameter.

    Blocks of one kind and of the same sizes become a single block of this kind.

    Args:
        blocks: At least one.
        place: (n,) int64, the position of each sample in the concatenated blocks.
    """
    if len(blocks) == 1:
        return blocks[0].select(place)
    whole = _concatenated(blocks)
    return JoinedBlock(tuple(blocks), place) if whole is None else whole.select(place)


def _concatenated(blocks: Sequence[Block]) -> Block | None:
    """Return the samples of all blocks as one block of their kind, or None if sizes differ."""
    first = blocks[0]
    if any(type(block) is not type(first) for block in blocks):
        return None
    if isinstance(first, TotalBlock):
        every = [block.terms() for block in blocks]
        if len({len(terms) for terms in every}) > 1:
            return None
        parts = [_concatenated(alike) for alike in zip(*every, strict=True)]
        return TotalBlock(tuple(p for p in parts if p is not None)) if None not in parts else None
    if not isinstance(first, _CONCATENATED):
        return None
    own = (*first.numbers, *first.places)
    if any(_static(block, own) != _static(first, own) for block in blocks):
        return None
    whole: dict[str, Any] = {k: torch.cat([getattr(b, k) for b in blocks]) for k in own}
    return replace(first, **whole)


def _static(block: Block, own: Sequence[str]) -> Any:
    """Return the properties that must be equal before blocks can be concatenated."""
    assert isinstance(block, TensorBlock)
    values = [getattr(block, name) for name in own]
    rest = [getattr(block, field.name) for field in fields(block) if field.name not in own]
    return [(t.shape[1:], t.dtype) for t in values], rest


@dataclass(frozen=True, eq=False)
class JoinedBlock(Block):
    """The gradients of samples in several blocks."""

    parts: tuple[Block, ...]  # all of the same parameter
    place: Tensor  # (n,) int64, the position of each sample in the concatenated parts

    @property
    def n(self) -> int:
        return len(self.place)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return reduce(torch.promote_types, (part.dtype for part in self.parts))

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def dense(self, out: Tensor | None = None) -> Tensor:
        found = self._each(lambda part: part.dense().to(self.dtype))
        return found if out is None else out.copy_(found)

    def select(self, rows: slice | Tensor) -> Block:
        """Return the samples `rows`; samples of a single part keep the part's structure."""
        wanted = self.place[rows.to(self.device) if isinstance(rows, Tensor) else rows]
        found, order = [], []
        for part, (start, stop) in zip(self.parts, self._bounds, strict=True):
            own = (wanted >= start) & (wanted < stop)
            if bool(own.any()):
                found.append(part.select(wanted[own] - start))
                order.append(own.nonzero().flatten())
        if not found:
            return self.parts[0].select(slice(0, 0))
        return joined(found, torch.cat(order).argsort())

    def scale(self, factors: Tensor) -> "JoinedBlock":
        parts = zip(self.parts, self._by_part(factors), strict=True)
        return JoinedBlock(tuple(part.scale(own) for part, own in parts), self.place)

    def to(self, dtype: torch.dtype) -> "JoinedBlock":
        return JoinedBlock(tuple(part.to(dtype) for part in self.parts), self.place)

    def squared_norms(self) -> Tensor:
        return self._each(lambda part: part.squared_norms())

    def norms(self, p: float = 2.0) -> Tensor:
        return self._each(lambda part: part.norms(p))

    def weighted_sum(self, weights: Tensor | None = None) -> Tensor:
        first, *others = (part.weighted_sum(own) for part, own in self._with(weights))
        return sum(others, first)

    def squared_sum(self, weights: Tensor | None = None) -> Tensor:
        first, *others = (part.squared_sum(own) for part, own in self._with(weights))
        return sum(others, first)

    def sums(
        self, weights: Tensor | None = None, for_squares: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.weighted_sum(weights), self.squared_sum(for_squares)

    def dot(self, vector: Tensor) -> Tensor:
        return self._each(lambda part: part.dot(vector))

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        return self._each(lambda part: part.two_sided(left, right))

    def norm_bound(self) -> Tensor:
        return torch.stack([part.norm_bound() for part in self.parts]).amax()

    def _each(self, fn: Callable[[Block], Tensor]) -> Tensor:
        """Return the result of a function for each sample (n, ...), in order."""
        return torch.cat([fn(part) for part in self.parts])[self.place]

    def _with(self, weights: Tensor | None) -> Iterator[tuple[Block, Tensor | None]]:
        """Yield each part, and the weights of its samples."""
        own = [None] * len(self.parts) if weights is None else self._by_part(weights)
        yield from zip(self.parts, own, strict=True)

    def _by_part(self, values: Tensor) -> Sequence[Tensor]:
        """Split values (n,) of the samples by part."""
        return values[self.place.argsort()].split([part.n for part in self.parts])  # type: ignore[no-untyped-call,no-any-return]

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        """(start, stop) of each part in the concatenated samples."""
        return [*pairwise(accumulate((part.n for part in self.parts), initial=0))]
