"""Histograms against numpy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscope.stats.builtin.norms import histogram


def test_narrow_range_is_linear():
    values = np.random.default_rng(0).uniform(1.0, 90.0, 500)
    found = histogram(values)
    assert found.scale == "linear"
    counts, edges = np.histogram(values, bins=len(found.counts))
    assert found.counts == tuple(counts)
    assert found.edges == pytest.approx(edges)


def test_wide_range_is_logarithmic():
    values = np.exp(np.random.default_rng(0).normal(0, 3, 800))
    found = histogram(values)
    assert found.scale == "log"
    steps = np.diff(np.log(found.edges))
    assert steps == pytest.approx(np.full(steps.size, steps.mean()))
    assert found.counts == tuple(np.histogram(np.log(values), bins=len(found.counts))[0])


def test_zeros_are_counted_apart():
    found = histogram(np.array([0.0, 0.0, 1.0, 2.0]))
    assert found.zeros == 2
    assert sum(found.counts) == 2
    assert histogram(np.zeros(3)).counts == ()
    assert histogram(np.zeros(3)).zeros == 3


def test_equal_values_fill_one_bin():
    found = histogram(np.full(7, 2.5))
    assert (found.counts, found.edges) == ((7,), (2.5, 2.5))


@given(st.lists(st.floats(0.0, 1e150, allow_subnormal=True, width=64), min_size=1, max_size=60))
def test_every_value_is_counted_once(values):
    found = histogram(np.array(values))
    assert sum(found.counts) + found.zeros == len(values)
    if found.counts:
        positive = [v for v in values if v > 0]
        assert len(found.edges) == len(found.counts) + 1
        assert (found.edges[0], found.edges[-1]) == (min(positive), max(positive))
        assert list(found.edges) == sorted(found.edges)
