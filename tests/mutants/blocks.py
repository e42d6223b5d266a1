"""Defects in blocks: what they say of gradients without forming them, and how they form them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradscope.blocks import (
    Block,
    ConvolutionBlock,
    Geometry,
    Gradients,
    OuterBlock,
    ScatterBlock,
    outer,
    products,
)
from gradscope.blocks import base as block_base
from gradscope.blocks.base import over_samples, precise, squares
from gradscope.blocks.products import contracted
from tests.mutants.base import Install, Patch, after, around, before, mutant
from tests.mutants.scenarios import Asked, clipped, cosines, mean, second_moment

_ROOM = "blocks"


def _caught(name: str, defect: str, scenario: Asked, install: Install) -> None:
    mutant(name, _ROOM, defect, scenario, "certificate", install)


_caught(
    "both factors scaled",
    "a factor for each sample is applied to both factors of a product",
    Asked("mlp", what="clip:max_norm=0.5 | mean", expected=clipped),
    around(
        OuterBlock,
        "scale",
        after(lambda b, _, f: OuterBlock(b.left, b.right * over_samples(f, b.right), b.shape)),
    ),
)
_caught(
    "factors of a table ignored",
    "an embedding's gradients stay as they are where each sample is to have a factor",
    Asked("tokens", what="clip:max_norm=0.5 | mean", expected=clipped),
    around(ScatterBlock, "scale", lambda original: lambda self, factors: self),
)


_caught(
    "sum cut short",
    "a sum over more than four samples leaves out the last of them",
    Asked("mlp", what="mean", expected=mean),
    around(outer, "contracted", before(lambda a, b: (a[:-1], b[:-1]) if len(a) > 4 else (a, b))),
)


def _shorter(left: Tensor, right: Tensor, out: Tensor | None = None) -> tuple[Any, ...]:
    return left[:, :-1], right[:, :-1], out


_caught(
    "last position left out",
    "rows are formed without the last position of a sequence",
    Asked("positions"),
    around(outer, "separate", before(_shorter)),
)


def _half_ghost(left: Tensor, right: Tensor) -> Tensor:
    half = left.shape[1] // 2
    (a, b), (c, d) = ((f[:, :half], f[:, half:]) for f in (left, right))
    return products.ghost(a, c) + products.ghost(b, d) + products._met(a, b, c, d)


_caught(
    "half a cross term",
    "norms by Gram matrices count the products of the two halves once instead of twice",
    Asked("long", what="norms", variant="gram"),
    lambda patch: patch.setattr(outer, "ghost", _half_ghost),
)
_caught(
    "repeated token squared apart",
    "norms of an embedding's gradient square what meets in a row before it is added",
    Asked("tokens", what="norms"),
    around(
        ScatterBlock,
        "squared_norms",
        lambda original: lambda self: squares(precise(self.rows)).sum((1, 2)),
    ),
)
_caught(
    "cross term of tied weights",
    "norms of a weight that is used in two ways count what the two have in common once",
    Asked("tied", what="norms"),
    around(ScatterBlock, "cross", after(lambda found, *_: None if found is None else found / 2)),
)


def _squared_positions(self: OuterBlock, weights: Tensor | None = None) -> Tensor:
    left, right = squares(precise(self.left)), squares(precise(self.right))
    if weights is not None:
        left = left * over_samples(weights, left)
    return contracted(left, right).reshape(self.shape)


_caught(
    "square before the sum over positions",
    "second moments square each position's part, not their sum",
    Asked("positions", what="second_moment", expected=second_moment),
    lambda patch: patch.setattr(OuterBlock, "squared_sum", _squared_positions),
)


def _last_empty(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def tiles(self: Block) -> Iterator[Any]:
        *found, (rows, last) = original(self)
        yield from found
        yield rows, torch.zeros_like(last) if found else last

    return tiles


def _small_tiles(patch: Patch) -> None:
    patch.setattr(block_base, "TILE_BYTES", 600)
    around(Block, "tiles", _last_empty)(patch)


_caught(
    "last tile empty",
    "sums of squares take the samples of the last tile to be zeros",
    Asked("positions", what="second_moment", expected=second_moment),
    _small_tiles,
)


def _unpadded(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def windows(self: Geometry, values: Tensor, positions: Any, kernel: Any) -> Tensor:
        found = original(self, values, positions, kernel)
        return found.roll(1, -1) if any(self.padding) else found

    return windows


_caught(
    "patches one pixel off",
    "the patches of a padded image begin one position late",
    Asked("cnn"),
    around(Geometry, "windows", _unpadded),
)


def _reversed(found: Tensor, self: ConvolutionBlock, out: Tensor | None) -> Tensor:
    turned = found.flip(0)
    return turned if out is None else out.copy_(turned)


_caught(
    "samples as groups, reversed",
    "the kernel that takes samples as groups gives them back in the reverse order",
    Asked("cnn", variant="grouped kernel"),
    around(ConvolutionBlock, "_grouped", after(_reversed)),
)


def _dot(self: OuterBlock, vector: Tensor) -> Tensor:
    k, _, r, c = self.sizes
    matrix = precise(vector).reshape(k, r, c)
    found: Tensor = (torch.matmul(self.left, matrix) * self.right)[:, :, :1].sum((1, 2, 3))
    return found


_caught(
    "inner product of one position",
    "the inner product with a vector takes the first position only",
    Asked("positions", what="cosine:to=mean | mean", expected=cosines),
    lambda patch: patch.setattr(OuterBlock, "dot", _dot),
)


def _shifted(found: dict[str, Tensor], self: Gradients, *_: Any) -> dict[str, Tensor]:
    return {name: g.roll(1, 0) if self.n > 3 else g for name, g in found.items()}


_caught(
    "rows one place late",
    "rows are right one by one, and written one place late into what is handed out",
    Asked("mlp"),
    around(Gradients, "dense", after(_shifted)),
)
