"""The linear datamodeling score: do scores predict the losses of retrained models?"""

import math
from dataclasses import dataclass

import numpy as np

_LEVEL = 0.95
_REPEATS = 1000  # resamplings; the error of the interval's ends is about a tenth of its width


@dataclass(frozen=True)
class Lds:
    """A linear datamodeling score with its confidence interval."""

    by_query: np.ndarray  # rank correlation of each query (M,), in -1..1
    mean: float  # the mean of `by_query`
    low: float  # the lower end of the mean's 95% interval, by bootstrap over the subsets
    high: float  # the upper end
    subsets: int  # the number of subsets S

    def subsets_for(self, half_width: float) -> int:
        """Return about how many subsets give an interval of `mean ± half_width`."""
        # the width is proportional to 1 / √subsets
        return math.ceil(self.subsets * ((self.high - self.low) / 2.0 / half_width) ** 2)


def lds(scores: np.ndarray, subsets: np.ndarray, losses: np.ndarray, *, seed: int = 0) -> Lds:
    """Compare predicted with true losses of models that were trained on subsets.

    For each query q, the loss after training on a subset S is predicted as -Σ_{i in S} s(q, i).
    The score is Spearman's rank correlation over the subsets. Ties share their mean rank. The
    correlation is 0 if all losses or all predictions of a query are equal. The interval is the
    pivotal bootstrap interval (Davison & Hinkley 1997, equation 2.10) over the subsets, drawn for
    all queries together. Rank correlations of few subsets are biased towards 0, and resampling
    adds the same bias again. The pivotal interval corrects for it.

    Args:
        scores: s(q, i), (M, N); positive where the loss of q would be higher without sample i.
        subsets: (S, N), true where subset S holds sample i.
        losses: (S, M), the loss of each query after training on each subset, averaged over other
            randomness of the training.
        seed: The seed of the resampling.

    Raises:
        ValueError: The shapes do not fit, a number is not finite, or there are fewer than three
            subsets.

    Park et al. 2023, "TRAK: Attributing Model Behavior at Scale", section 2, arXiv:2303.14186.
    """
    scores, held = np.asarray(scores, np.float64), np.asarray(subsets, bool)
    if scores.ndim != 2 or held.shape[1:] != scores.shape[1:]:
        raise ValueError(
            f"scores have the shape {scores.shape} and subsets {held.shape}, not (M, N) and (S, N)"
        )
    return agreement(-(scores @ held.T.astype(np.float64)), losses, seed=seed)


def agreement(predicted: np.ndarray, losses: np.ndarray, *, seed: int = 0) -> Lds:
    """Return `lds` of losses (S, M) and predictions (M, S), which are sums of scores."""
    predicted, losses = np.asarray(predicted, np.float64), np.asarray(losses, np.float64)
    if predicted.ndim != 2 or losses.shape != predicted.shape[::-1]:
        raise ValueError(
            f"losses have the shape {losses.shape} and predictions {predicted.shape}, "
            "not (S, M) and (M, S)"
        )
    if len(losses) < 3:
        raise ValueError(f"{len(losses)} subsets have no rank correlation: give at least 3")
    if not (np.isfinite(predicted).all() and np.isfinite(losses).all()):
        raise ValueError("a score or a loss is not finite: leave its query or sample out")
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
    """Return Spearman's correlation (M, B) of two (M, S) by row, subset s counts[b, s] times."""
    found = np.zeros((len(first), len(counts)))
    for row, (one, other) in enumerate(zip(first, second, strict=True)):
        a, b = _ranks(one, counts), _ranks(other, counts)  # (B, S), mean 0
        spread = np.sqrt((counts * a * a).sum(1) * (counts * b * b).sum(1))
        np.divide((counts * a * b).sum(1), spread, out=found[row], where=spread > 0.0)
    return found


def _ranks(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the ranks (B, S), less their mean, of values (S,) that occur counts (B, S) times.

    Equal values share the mean of their ranks.
    """
    order = np.argsort(values, kind="stable")
    _, first, group = np.unique(values[order], return_index=True, return_inverse=True)
    size = np.add.reduceat(counts[:, order], first, axis=1)
    middle = size.cumsum(1) - size / 2.0
    ranks: np.ndarray = middle[:, group[np.argsort(order)]] - counts.sum(1, keepdims=True) / 2.0
    return ranks
