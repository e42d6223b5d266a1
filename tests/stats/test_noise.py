"""The noise scale against covariances, pairs of samples and planted values."""

import numpy as np
import pytest

from gradscope.stats import noise_scale


def from_gradients(g):
    return noise_scale(np.linalg.norm(g, axis=1), float(np.sum(g.mean(0) ** 2)))


def test_is_the_trace_of_the_covariance_over_the_mean_dot_of_pairs():
    g = np.random.default_rng(0).normal(0.5, 1.0, (20, 6)) * np.arange(1, 7)
    found = from_gradients(g)
    assert found.trace_covariance == pytest.approx(np.trace(np.cov(g, rowvar=False)), rel=1e-12)
    pairs = [g[i] @ g[j] for i in range(20) for j in range(20) if i != j]
    assert found.gradient_norm_squared == pytest.approx(np.mean(pairs), rel=1e-10)
    assert found.simple == pytest.approx(
        found.trace_covariance / found.gradient_norm_squared, rel=1e-12
    )
    assert found.flag is None


def test_planted_noise_scale_of_gaussian_gradients():
    """E over repeats of trΣ and |G|² is what was planted, within four standard errors."""
    rng = np.random.default_rng(7)
    entries, sigma, mean, repeats = 50, 0.8, 0.3, 400
    draws = rng.normal(mean, sigma, (repeats, 12, entries))
    found = [from_gradients(g) for g in draws]
    for values, planted in (
        ([f.trace_covariance for f in found], entries * sigma**2),
        ([f.gradient_norm_squared for f in found], entries * mean**2),
    ):
        error = np.std(values, ddof=1) / np.sqrt(repeats)
        assert abs(np.mean(values) - planted) < 4 * error
    large = from_gradients(rng.normal(mean, sigma, (4000, entries)))
    assert large.simple == pytest.approx(sigma**2 / mean**2, rel=0.05)


def test_opposed_gradients_are_flagged():
    g = np.random.default_rng(0).normal(size=(8, 3))
    found = from_gradients(np.concatenate([g, -g]))
    assert found.simple is None
    assert found.gradient_norm_squared < 0
    assert "16 samples" in found.flag


def test_equal_gradients_have_no_noise():
    found = from_gradients(np.tile([[1.0, 2.0, 2.0]], (4, 1)))
    assert found.trace_covariance == pytest.approx(0.0, abs=1e-12)
    assert found.gradient_norm_squared == pytest.approx(9.0)


def test_overflow_is_flagged():
    found = noise_scale(np.array([1e200, 1e200]), 1.0)
    assert found.simple is None
    assert "overflow" in found.flag
