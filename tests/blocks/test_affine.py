"""Centred and preconditioned blocks where float arithmetic is at its worst."""

import pytest
import torch
from torch import Tensor

from gradscope.blocks import (
    Block,
    CenteredBlock,
    DenseBlock,
    OuterBlock,
    PreconditionedBlock,
    ScatterBlock,
)

N = 6
SPREADS = [1.0, 1e-2, 1e-4, 1e-6]


def near(kind: str, spread: float) -> tuple[Block, Tensor, Tensor]:
    """Rows (1 + spread · cᵢ) g, and their mean g as Σ cᵢ = 0; returns the deviations too."""
    torch.manual_seed(3)
    deviations = torch.tensor([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    if kind == "outer":
        left, right = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 3)
        one: Block = OuterBlock(left.double(), right.double(), (4, 3))
    else:
        one = ScatterBlock(torch.tensor([[1, 3, 1]]), torch.randn(1, 3, 2).double(), 5)
    block = one.select(torch.zeros(N, dtype=torch.long)).scale(1 + spread * deviations)
    return block, one.dense()[0], spread * deviations


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", ["outer", "scatter"])
def test_squares_do_not_cancel(kind: str, spread: float) -> None:
    """The error is that of the difference of two rounded numbers, not of their squares."""
    block, mean, deviations = near(kind, spread)
    centered = CenteredBlock(block, mean)
    tolerance = 1e-14 / spread
    norms = deviations.square() * mean.square().sum()
    torch.testing.assert_close(centered.squared_norms(), norms, rtol=tolerance, atol=0)
    sums = deviations.square().sum() * mean.square()
    torch.testing.assert_close(centered.squared_sum(), sums, rtol=tolerance, atol=0)


def test_float32_is_centred_in_float64() -> None:
    values = 1000 + torch.randn(N, 5, generator=torch.Generator().manual_seed(1))
    mean = values.double().mean(0)
    right = values.double() - mean
    found = CenteredBlock(DenseBlock(values), mean).dense()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), right, rtol=1e-7, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    block, mean, _ = near("outer", 1.0)
    assert isinstance(block, OuterBlock)
    left = block.left.clone()
    left[2, 0, 0, 1] = bad
    centered = CenteredBlock(OuterBlock(left, block.right, block.shape), mean)
    assert centered.squared_norms().isfinite().tolist() == [True] * 2 + [False] + [True] * 3
    assert not bool(centered.squared_sum()[1].isfinite().any())


def test_a_diagonal_beyond_float32() -> None:
    values = torch.tensor([[1e-42, 2.0]])
    diagonal = torch.tensor([1e42, 0.5], dtype=torch.float64)
    block = PreconditionedBlock(DenseBlock(values), diagonal)
    torch.testing.assert_close(block.dense(), torch.tensor([[1.0, 1.0]]), rtol=1e-3, atol=0)
