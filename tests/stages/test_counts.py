"""Histograms: all samples are counted once, where numpy counts them, in any split."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example as pinned
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stages.examples import MANY, example, flat, reducer, run, split, whole
from tests.stages.examples import one_parameter as one


@pytest.mark.parametrize("bins", [2, 10, 50])
@pytest.mark.parametrize("scale", ["linear", "symlog", "log"])
def test_a_range_that_is_found(scale: str, bins: int) -> None:
    grads, rows = example(torch.float64)
    text = f"histogram:bins={bins},scale={scale}"
    for found in (whole(reducer(text), grads), split(reducer(text), grads, 3)):
        for name, g in rows.items():
            counts, edges = found[name], found[f"{name}.edges"]
            assert counts.shape == (bins,) and edges.shape == (bins + 1,)
            below = (g <= 0).sum() if scale == "log" else 0
            assert found[f"{name}.outside"].tolist() == [below, 0, 0]
            assert counts.sum() + below == g.size
            place = np.searchsorted(edges, g[g > 0] if below else g.ravel(), side="right") - 1
            np.testing.assert_array_equal(counts, np.bincount(place, minlength=bins))


@pytest.mark.parametrize("bins", [2, 5, 64])
def test_cells_are_as_fine_as_fit(bins: int) -> None:
    """A width that is a power of two, and with half of it more than `bins` would be needed."""
    grads, rows = example(torch.float64)
    for name, g in rows.items():
        edges = whole(reducer(f"histogram:bins={bins}"), grads)[f"{name}.edges"]
        width = edges[1] - edges[0]
        assert np.log2(width) % 1 == 0 and (np.diff(edges) == width).all()
        assert edges[0] <= g.min() < edges[1] and g.max() < edges[-1]
        assert np.floor(g.max() * 2 / width) - np.floor(g.min() * 2 / width) >= bins


@settings(max_examples=80, deadline=None)
@pinned([9.671406556917033e24, -4.588374799771721e-299], 0, "linear", 2)  # underflows
@pinned([1e60, -2.3e-308, 3.0], 1, "linear", 3)
@pinned([3.402823669209368e38, 2.2250738585072014e-308], 0, "log", 9)  # two infinite edges
@given(
    st.lists(st.floats(-1e60, 1e60, allow_subnormal=False) | st.just(0.0), min_size=2, max_size=25),
    st.integers(0, 10**6),
    st.sampled_from(["linear", "log", "symlog"]),
    st.integers(2, 9),
)
def test_any_numbers_in_any_split(numbers, seed: int, scale: str, bins: int) -> None:
    grads, text = one(numbers), f"histogram:bins={bins},scale={scale}"
    right, found = whole(reducer(text), grads), split(reducer(text), grads, seed)
    for key, value in right.items():
        np.testing.assert_array_equal(found[key], value)
    assert right["w"].sum() + right["w.outside"].sum() == len(numbers)
    edges = right["w.edges"]  # beyond the largest float64 they are infinite
    assert all(a < b or a == b == np.inf for a, b in pairwise(edges))


@pytest.mark.parametrize(
    ("text", "edges"),
    [
        ("histogram:bins=6,low=-1,high=2", np.linspace(-1, 2, 7)),
        ("histogram:bins=6,low=0.01,high=5,scale=log", np.geomspace(0.01, 5, 7)),
    ],
)
def test_a_range_that_is_given(text: str, edges: np.ndarray) -> None:
    grads, rows = example(torch.float64)
    found = whole(reducer(text), grads)
    for name, g in rows.items():
        np.testing.assert_allclose(found[f"{name}.edges"], edges, rtol=1e-13, atol=1e-15)
        np.testing.assert_array_equal(found[name], np.histogram(g, edges)[0])
        outside = [(g < edges[0]).sum(), (g > edges[-1]).sum(), 0]
        assert found[f"{name}.outside"].tolist() == outside
        assert found[name].sum() + sum(outside) == g.size


def test_symlog_edges_are_even_on_both_sides() -> None:
    found = whole(reducer("histogram:bins=8,scale=symlog,low=-7,high=7,linear=0.5"), one([0.1]))
    edges = found["w.edges"]
    np.testing.assert_allclose(edges, -edges[::-1], atol=1e-15)
    np.testing.assert_allclose(
        np.log1p(edges[5:] / 0.5), np.log1p(14) * np.arange(1, 5) / 4, rtol=1e-13
    )


def test_values_on_edges() -> None:
    values = [0.0, 1.0, 1.0, 2.0, 3.0, 3.0, -1e-9, 3.1]
    found = whole(reducer("histogram:bins=3,low=0,high=3"), one(values))
    assert found["w"].tolist() == [1, 2, 3]  # the last bin holds its right edge
    assert found["w.outside"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("text", ["histogram:bins=4", "histogram:bins=4,low=0,high=8"])
def test_what_is_not_finite_is_counted_outside(text: str) -> None:
    values = one([1.0, torch.nan, torch.inf, 5.0, -torch.inf, torch.nan, torch.inf])
    for found in (whole(reducer(text), values), split(reducer(text), values, 2)):
        assert found["w.outside"].tolist() == [1, 2, 2]
        assert found["w"].sum() == 2 and np.isfinite(found["w.edges"]).all()


def test_a_parameter_that_is_zero_everywhere() -> None:
    for scale, below in (("linear", 0), ("symlog", 0), ("log", 5)):
        found = whole(reducer(f"histogram:bins=3,scale={scale}"), one([0.0] * 5))
        assert found["w"].sum() == 5 - below and found["w.outside"].tolist() == [below, 0, 0]


def test_of_norms_there_is_one_histogram() -> None:
    grads, rows = example(torch.float64)
    found = run("norm | histogram:bins=5,low=0,high=100", grads)
    right = np.histogram(np.linalg.norm(flat(rows), axis=1), 5, (0, 100))[0]
    np.testing.assert_array_equal(found["norm"], right)
    assert set(found) == {"norm", "norm.edges", "norm.outside"} and right.sum() <= MANY
