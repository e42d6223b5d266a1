"""The linear datamodeling score: do attributions predict what training on part of the data does?"""

import math
from dataclasses import dataclass

import numpy as np

_LEVEL = 0.95
_REPEATS = 1000  # resamplings: the interval's ends then stand to about a tenth of its width


@dataclass(frozen=True)
class Lds:
    """A linear datamodeling score and how surely it is known."""

    by_query: np.ndarray  # rank correlation of each query (M,), in -1..1
    mean: float  # of these
    low: float  # the lower end of the mean's 95% interval, by bootstrap over the subsets
    high: float  # the upper end
    subsets: int  # their number S

    def subsets_for(self, half_width: float) -> int:
        """Return about how many subsets give an interval of `mean ± half_width`."""
        # the width falls as one over the root of the number of subsets
        return math.ceil(self.subsets * ((self.high - self.low) / 2.0 / half_width) ** 2)


def lds(scores: np.ndarray, subsets: np.ndarray, losses: np.ndarray, *, seed: int = 0) -> Lds:
    """Compare predicted with true losses of models that were trained on subsets.

    For each query q, the Spearman rank correlation over the subsets S between the prediction
    -Σ_{i in S} s(q, i) and the loss of q after training on S. Ties share their mean rank; where
    the losses or the predictions of a query are all the same, its correlation counts as 0. The
    interval draws the subsets anew, with replacement, for all queries together, and is the pivotal
    one (Davison & Hinkley 1997, equation 2.10): rank correlations of few subsets are too small, of
    the drawn ones once more, and it takes that back.

    Args:
        scores: s(q, i), (M, N); positive where the loss of q would be higher without sample i.
        subsets: (S, N), true where subset S holds sample i.
        losses: (S, M), of each query after training on each subset, averaged over what else is
            random in the training.
        seed: Of the resampling.

    Raises:
        ValueError: The shapes do not fit, a number is not finite, or there are fewer than three
            subsets.

    Park et al. 2023, "TRAK: Attributing Model Behavior at Scale", section 2, arXiv:2303.14186.
    """
    scores, held = np.asarray(scores, np.float64), np.asarray(subsets, bool)
    if scores.ndim != 2 or held.shape[1:] != scores.shape[1:]:
        raise ValueError(f"scores {scores.shape} and subsets {held.shape} are to be (M, N), (S, N)")
    return agreement(-(scores @ held.T.astype(np.float64)), losses, seed=seed)


def agreement(predicted: np.ndarray, losses: np.ndarray, *, seed: int = 0) -> Lds:
    """Compare losses (S, M) with what they go up with (M, S), scores summed already; see `lds`."""
    predicted, losses = np.asarray(predicted, np.float64), np.asarray(losses, np.float64)
    if predicted.ndim != 2 or losses.shape != predicted.shape[::-1]:
        raise ValueError(
            f"losses {losses.shape} are to be (S, M), predictions {predicted.shape} (M, S)"
        )
    if len(losses) < 3:
        raise ValueError(f"{len(losses)} subsets have no rank correlation: give at least 3")
    if not (np.isfinite(predicted).all() and np.isfinite(losses).all()):
        raise ValueError("a score or a loss is not finite: leave that query or sample out")
    subsets = len(losses)
    by_query = _correlations(predicted, losses.T, np.ones((1, subsets)))[:, 0]
    draws = np.random.default_rng(seed).multinomial(
        subsets, np.full(subsets, 1.0 / subsets), size=_REPEATS
    )
    means = _correlations(predicted, losses.T, draws.astype(np.float64)).mean(0)  # (B,)
    least, most = np.quantile(means, [(1.0 - _LEVEL) / 2.0, (1.0 + _LEVEL) / 2.0])
    mean = float(by_query.mean())
    low, high = max(-1.0, 2.0 * mean - float(most)), min(1.0, 2.0 * mean - float(least))
    return Lds(by_query, mean, low, high, subsets)


def _correlations(first: np.ndarray, second: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Spearman by row of two (M, S), where subset s is there counts[b, s] times: (M, B)."""
    found = np.zeros((len(first), len(counts)))
    for row, (one, other) in enumerate(zip(first, second, strict=True)):
        a, b = _ranks(one, counts), _ranks(other, counts)  # (B, S), mean 0
        spread = np.sqrt((counts * a * a).sum(1) * (counts * b * b).sum(1))
        np.divide((counts * a * b).sum(1), spread, out=found[row], where=spread > 0.0)
    return found


def _ranks(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Ranks (B, S) of values (S,) that are there counts (B, S) times, less their mean.

    Equal values share the mean of the ranks that they take up.
    """
    order = np.argsort(values, kind="stable")
    _, first, group = np.unique(values[order], return_index=True, return_inverse=True)
    size = np.add.reduceat(counts[:, order], first, axis=1)
    middle = size.cumsum(1) - size / 2.0
    ranks: np.ndarray = middle[:, group[np.argsort(order)]] - counts.sum(1, keepdims=True) / 2.0
    return ranks
