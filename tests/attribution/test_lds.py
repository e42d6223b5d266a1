"""The linear datamodeling score against scipy's rank correlation and against closed forms."""

import numpy as np
import pytest
from scipy import stats

from gradscope.attribution.lds import Lds, lds


def drawn(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores (5, 30), subsets (40, 30) and losses (40, 5) that go together, but for noise."""
    random = np.random.default_rng(seed)
    scores = random.normal(size=(5, 30))
    subsets = random.random((40, 30)) < 0.5
    losses = -(subsets @ scores.T) + 3.0 * random.normal(size=(40, 5))
    return scores, subsets, losses


def test_it_is_scipys_rank_correlation_query_by_query() -> None:
    scores, subsets, losses = drawn()
    losses = losses.round()  # with ties
    found = lds(scores, subsets, losses)
    expected = [stats.spearmanr(-(subsets @ scores[q]), losses[:, q]).statistic for q in range(5)]
    np.testing.assert_allclose(found.by_query, expected, rtol=1e-12)
    assert found.mean == pytest.approx(np.mean(expected), rel=1e-12)
    assert found.low < found.mean < found.high


def test_the_interval_is_a_bootstrap_over_subsets() -> None:
    scores, subsets, losses = drawn()
    random = np.random.default_rng(1)
    means = []
    for _ in range(600):
        rows = random.integers(0, 40, 40)
        means.append(
            np.mean(
                [
                    stats.spearmanr(-(subsets[rows] @ scores[q]), losses[rows, q]).statistic
                    for q in range(5)
                ]
            )
        )
    found = lds(scores, subsets, losses)
    least, most = np.quantile(means, [0.025, 0.975])
    assert found.low == pytest.approx(2 * found.mean - most, abs=0.2 * (most - least))
    assert found.high == pytest.approx(2 * found.mean - least, abs=0.2 * (most - least))


def test_the_interval_holds_what_many_subsets_give() -> None:
    random = np.random.default_rng(3)
    scores = random.normal(size=(10, 30))

    def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
        subsets = random.random((count, 30)) < 0.5
        return subsets, -(subsets @ scores.T) + 3.0 * random.normal(size=(count, 10))

    subsets, losses = drawn(20_000)
    right = np.mean(
        [stats.spearmanr(-(subsets @ scores[q]), losses[:, q]).statistic for q in range(10)]
    )
    found = [lds(scores, *drawn(40), seed=k) for k in range(40)]
    assert sum(one.low <= right <= one.high for one in found) >= 34  # 38 expected, of 40
    assert all(one.high - one.low < 0.3 for one in found)


def test_a_helpful_sample_has_a_positive_score() -> None:
    subsets = np.array([[1, 0], [0, 1], [1, 1], [0, 0]], bool)
    losses = np.array([[1.0], [5.0], [0.5], [5.5]])  # the first sample takes off 4.5, the other .5
    assert lds(np.array([[4.5, 0.5]]), subsets, losses).mean == 1.0
    assert lds(np.array([[-4.5, -0.5]]), subsets, losses).mean == -1.0


def test_the_interval_has_no_correlations_beyond_one() -> None:
    found = [lds(sign * np.eye(2), *of_few()) for sign in (1, -1)]
    assert all(-1 <= one.low <= one.mean <= one.high <= 1 for one in found)
    assert (found[0].high, found[1].low) == (1.0, -1.0)


def of_few() -> tuple[np.ndarray, np.ndarray]:
    subsets = np.array([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0]], bool)
    return subsets, -(subsets @ np.eye(2)) + np.array([[0.1], [0.0], [0.2], [-0.9], [0.3]])


def test_a_query_that_never_changes_counts_as_nothing_known() -> None:
    scores, subsets, losses = drawn()
    losses[:, 2] = 1.0
    assert lds(scores, subsets, losses).by_query[2] == 0.0


def test_four_times_the_subsets_for_half_the_width() -> None:
    assert Lds(np.zeros(1), 0.5, 0.4, 0.6, 100).subsets_for(0.05) == 400


@pytest.mark.parametrize("part", [0, 2])
def test_numbers_that_are_not_finite_are_refused(part: int) -> None:
    arrays = drawn()
    arrays[part][0, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        lds(*arrays)


def test_arrays_that_do_not_fit_are_refused() -> None:
    scores, subsets, losses = drawn()
    with pytest.raises(ValueError, match=r"\(M, N\) and \(S, N\)"):
        lds(scores[:, :-1], subsets, losses)
    with pytest.raises(ValueError, match=r"not \(S, M\) and \(M, S\)"):
        lds(scores, subsets, losses.T)
    with pytest.raises(ValueError, match="at least 3"):
        lds(scores, subsets[:2], losses[:2])
