"""Sums of consecutive rows: the gradients of groups, from the gradients of their samples.

The gradient of a group is the sum of its samples' gradients. For outer products, convolutions and
scattered rows, this sum is a block of the same kind: the samples' positions follow each other. So
norms of groups are computed without forming gradients. Groups of similar sizes are padded with
zeros to one size.
"""

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradscope.blocks.base import Block, DenseBlock, precise
from gradscope.blocks.convolution import ConvolutionBlock
from gradscope.blocks.gradients import Evaluation, Gradients
from gradscope.blocks.joined import joined
from gradscope.blocks.outer import OuterBlock
from gradscope.blocks.scatter import ScatterBlock
from gradscope.blocks.segments import SegmentBlock, rounded
from gradscope.blocks.total import TotalBlock

# the axis of the positions in each tensor of a block
_POSITIONS: dict[type[Block], int] = {OuterBlock: 2, ConvolutionBlock: 1, ScatterBlock: 1}


def grouped(block: Block, sizes: Tensor) -> Block:
    """Return the sums of consecutive rows of a block.

    Args:
        block: The gradients of n samples; the samples of a group are adjacent.
        sizes: (g,) int64, the number of samples in each group, at least 1.
    """
    counts = sizes.tolist()
    if not counts or set(counts) == {1}:
        return block
    if not _has_positions(block):
        return _dense(block, sizes)
    if len(set(counts)) == 1:
        return _in_step(block, counts[0])
    first = (sizes.cumsum(0) - sizes).to(block.device)
    lengths = torch.tensor([rounded(count) for count in counts])
    parts, places = [], []
    for length in sorted(set(lengths.tolist())):
        which = (lengths == length).nonzero().flatten()
        at, count = torch.arange(length, device=block.device), sizes[which].to(block.device)
        inside = at < count.unsqueeze(1)  # (m, length)
        # the padding repeats the group's own first row, so that NaN stays in its group
        rows = first[which.to(block.device)].unsqueeze(1) + torch.where(inside, at, 0)
        factors = inside.flatten().to(block.dtype.to_real())
        parts.append(_in_step(block.select(rows.flatten()).scale(factors), length))
        places.append(which)
    return joined(parts, torch.cat(places).argsort().to(block.device))


def sums(values: Tensor, sizes: Tensor) -> Tensor:
    """Return the sums (g, ...) of consecutive rows of `values` (n, ...), in its dtype."""
    owner = torch.arange(len(sizes), device=values.device)
    owner = owner.repeat_interleave(sizes.to(values.device), output_size=len(values))
    wide = precise(values)
    return wide.new_zeros(len(sizes), *values.shape[1:]).index_add_(0, owner, wide).to(values.dtype)


def in_groups(
    found: Evaluation, sizes: Tensor, index: Tensor, shares: Tensor | None = None
) -> Evaluation:
    """Return the losses (g,) and gradients of groups.

    Args:
        found: Losses (n,) and gradients of the samples; the samples of a group are adjacent.
        sizes: (g,) int64, the number of samples in each group.
        index: (g,) int64, the number of each group.
        shares: (g,), factors of the sums, or None.
    """
    losses = sums(found.losses, sizes)
    gradients = Gradients({k: grouped(b, sizes) for k, b in found.gradients.items()}, index)
    if shares is not None:
        shares = shares.to(losses)
        losses, gradients = losses * shares, gradients.scale(shares)
    return Evaluation(losses, gradients, note=found.note)


def _has_positions(block: Block) -> bool:
    """Whether sums of rows keep the block's structure."""
    return isinstance(block, SegmentBlock) or (
        all(map(_has_positions, block.parts))
        if isinstance(block, TotalBlock)
        else type(block) in _POSITIONS
    )


def _in_step(block: Block, size: int) -> Block:
    """Return the sums of each `size` consecutive rows of a block that keeps its structure."""
    if isinstance(block, TotalBlock):
        return TotalBlock(tuple(_in_step(part, size) for part in block.parts))
    if isinstance(block, SegmentBlock):
        n, k = block.sizes
        return replace(block, sample=block.sample // size, sizes=(n // size, k))
    axis = _POSITIONS[type(block)]

    def in_a_row(t: Tensor) -> Tensor:
        """Return (g, ..., size · positions, ...) of a tensor (g · size, ..., positions, ...)."""
        return t.unflatten(0, (-1, size)).movedim(1, axis).flatten(axis, axis + 1)  # type: ignore[no-untyped-call,no-any-return]

    assert isinstance(block, OuterBlock | ConvolutionBlock | ScatterBlock)
    changed: dict[str, Any] = {
        name: in_a_row(getattr(block, name)) for name in (*block.numbers, *block.places)
    }
    found = replace(block, **changed)
    if isinstance(found, OuterBlock) and isinstance(found.right_is_gradient, Tensor):
        return replace(found, right_is_gradient=found.right_is_gradient.repeat(size))
    return found


def _dense(block: Block, sizes: Tensor) -> DenseBlock:
    """Return the sums of rows in dense form, from tiles of dense rows."""
    if block.dense_if_formed is not None:
        return DenseBlock(sums(block.dense_if_formed, sizes))
    owner = torch.arange(len(sizes)).repeat_interleave(sizes).to(block.device)
    found = precise(torch.zeros((), dtype=block.dtype, device=block.device))
    found = found.new_zeros(len(sizes), prod(block.shape))
    for rows, tile in block.tiles():
        found.index_add_(0, owner[rows], precise(tile).flatten(1))
    return DenseBlock(found.view(-1, *block.shape).to(block.dtype))
