"""Variance against exact rational arithmetic, where the mean is far larger than the spread."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscope.blocks import DenseBlock, Gradients, OuterBlock, ScatterBlock
from gradscope.stages.chain import bind
from gradscope.stages.reducers import reducers
from tests.stages.reducers.examples import example, split, whole


def exact_variance(values: np.ndarray) -> np.ndarray:
    """The variance (ddof 1) of columns (n, p) of float64, without any rounding until the end."""
    found = []
    for column in values.T:
        numbers = [Fraction(float(x)) for x in column]
        mean = sum(numbers) / len(numbers)
        found.append(float(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)))
    return np.array(found)


@pytest.mark.parametrize("ratio", [1e3, 1e6, 1e8])
def test_a_mean_far_larger_than_the_spread(ratio: float) -> None:
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(60, 4, generator=generator, dtype=torch.float64) + ratio
    grads = Gradients({"w": DenseBlock(values)})
    right = exact_variance(values.numpy())
    reducer = reducers.get("var")()
    np.testing.assert_allclose(whole(reducer, grads)["w"], right, rtol=1e-12)
    for seed in range(10):
        np.testing.assert_allclose(split(reducer, grads, seed)["w"], right, rtol=1e-12)


@pytest.mark.parametrize("ratio", [1.0, 1e6])
def test_blocks_with_a_structure_do_not_cancel_either(ratio: float) -> None:
    """The products of the factors are themselves exact here, so that rows are known exactly."""
    generator = torch.Generator().manual_seed(7)
    n = 40
    left = torch.randint(-9, 10, (n, 1, 1, 3), generator=generator) + int(ratio)
    ones = torch.ones(n, 1, 1, 2)
    index = torch.arange(4).expand(n, 4)
    rows = torch.randint(-9, 10, (n, 4, 2), generator=generator) + int(ratio)
    blocks = {
        "outer": OuterBlock(left.double(), ones.double(), (3, 2)),
        "scatter": ScatterBlock(index, rows.double(), 5),
    }
    grads = Gradients(blocks)
    reducer = reducers.get("var")()
    for name, block in blocks.items():
        dense = block.dense().flatten(1).numpy()
        right = exact_variance(dense).reshape(block.shape)
        for found in (whole(reducer, grads), *(split(reducer, grads, k) for k in range(4))):
            np.testing.assert_allclose(found[name], right, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=30),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 1e9]),
)
def test_any_numbers_in_any_split(numbers: list[float], seed: int, shift: float) -> None:
    values = np.array(numbers)[:, None] + shift
    found = split(reducers.get("var")(), Gradients({"w": DenseBlock(torch.tensor(values))}), seed)
    right = exact_variance(values)
    rounding = (1e-15 * np.abs(values).max()) ** 2  # of the mean, squared
    np.testing.assert_allclose(found["w"], right, rtol=1e-12, atol=rounding)


def test_the_mean_of_the_spread_is_the_mean() -> None:
    grads, rows = example(torch.float64)
    found = split(reducers.get("mean")(standard_error=True), grads, 1)
    for name, g in rows.items():
        np.testing.assert_allclose(found[name], g.mean(0), rtol=1e-12, atol=1e-14)


def test_xi_of_cabs_is_the_sum_of_the_variances() -> None:
    """ξ = Σⱼ (E[gⱼ²] − E[gⱼ]²) (Balles et al. 2017)."""
    grads, rows = example(torch.float64)
    chain = bind("var:ddof=0 | norm:p=1")
    found = chain.result(chain.update(None, grads))
    flat = np.concatenate([g.reshape(len(g), -1) for g in rows.values()], 1)
    xi = ((flat**2).mean(0) - flat.mean(0) ** 2).sum()
    np.testing.assert_allclose(found["norm"], xi, rtol=1e-11)
