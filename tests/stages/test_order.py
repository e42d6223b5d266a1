"""Quantiles: exact while values are few, within the stated relative error beyond."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscope.blocks import DenseBlock, Gradients
from gradscope.stages.reducers.order import EXACT, quantiles
from tests.stages.examples import MANY, example, reducer, split, whole
from tests.stages.examples import one_parameter as one

QS, ERRORS = [0.0, 0.1, 0.5, 0.9, 0.999, 1.0], [0.01, 0.001, 0.2]


def bounds(values: np.ndarray, q: float, error: float) -> np.ndarray:
    """The largest deviation from numpy's quantile that the statement allows (*shape)."""
    ends = [np.quantile(values, q, axis=0, method=m) for m in ("lower", "higher")]
    return error * np.maximum(*map(np.abs, ends)) + 1e-300


@pytest.mark.parametrize(("q", "error"), [*zip(QS, 2 * ERRORS, strict=True)])
def test_within_the_stated_error(q: float, error: float) -> None:
    grads, rows = example(torch.float64)
    reducer = quantiles(q, error, most=100)
    assert "keys:dense" in reducer.start(grads)
    found, again = whole(reducer, grads), split(reducer, grads, 5)
    for name, g in rows.items():
        gap = np.abs(found[name] - np.quantile(g, q, axis=0))
        assert (gap <= bounds(g, q, error) * (1 + 1e-9)).all()
        np.testing.assert_array_equal(found[name], again[name])


@pytest.mark.parametrize("seed", range(3))
def test_the_switch_depends_on_the_total_alone(seed: int) -> None:
    """Batches that are kept exactly, batches that are not, and their merges meet in one result."""
    grads, _ = example(torch.float64)
    size = sum(block[0].size for block in example(torch.float64)[1].values())
    for limit in (size * (MANY - 1), size * 4, size):
        reducer = quantiles(0.4, 0.01, most=limit)
        right, found = whole(reducer, grads), split(reducer, grads, seed)
        for name in right:
            np.testing.assert_array_equal(found[name], right[name])
    for name, value in split(quantiles(0.4, 0.01, most=size * MANY), grads, seed).items():
        np.testing.assert_allclose(value, np.quantile(example(torch.float64)[1][name], 0.4, axis=0))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=30),
    st.floats(0, 1),
    st.integers(0, 10**6),
)
def test_any_numbers(numbers: list[float], q: float, seed: int) -> None:
    values = np.array(numbers) / 4  # so that differences of buckets do not overflow
    found = split(quantiles(q, 0.01, most=0), one(values), seed)["w"]
    gap = abs(found - np.quantile(values, q))
    tiny = 5e-308  # numbers below the normal range have fewer digits than the error asks for
    assert gap <= bounds(values, q, 0.01) * (1 + 1e-9) + tiny


def test_norms_of_many_samples_stay_exact() -> None:
    values = torch.randn(64_000, dtype=torch.float64).exp()
    kept = reducer("quantile:q=0.9")
    states = [kept.start(Gradients({"norm": DenseBlock(v)})) for v in values.split(8_000)]
    state = states[0]
    for other in states[1:]:
        state = kept.merge(state, other)
    found = kept.result(state)["norm"]
    np.testing.assert_allclose(found, np.quantile(values.numpy(), 0.9), rtol=1e-14)


def test_memory_stops_growing() -> None:
    """Buckets are bounded by the range of the values, however many samples come."""
    median, sizes = reducer("quantile:q=0.5"), []
    state = None
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        values = torch.rand(4_000, 75, generator=generator, dtype=torch.float64) + 1
        start = median.start(Gradients({"w": DenseBlock(values)}))
        state = start if state is None else median.merge(state, start)
        sizes.append(sum(t.nbytes for t in state.values()))
    buckets = np.log(2) / np.log(1.01 / 0.99) + 2  # of values between 1 and 2
    assert max(sizes[:3]) <= 8 * EXACT + 8  # exact as yet
    assert max(sizes[3:]) <= 2 * 75 * buckets * 16


def test_zeros_infinities_and_nan() -> None:
    inf, nan = torch.inf, torch.nan
    values = torch.tensor([[0.0, -inf, nan, 1.0], [0.0, 2.0, 1.0, inf], [0.0, -inf, 3.0, inf]])
    grads = Gradients({"w": DenseBlock(values)})
    for limit in (EXACT, 0):
        found = split(quantiles(0.5, 0.01, most=limit), grads, 1)["w"]
        np.testing.assert_array_equal(found, [0.0, -inf, nan, inf])
