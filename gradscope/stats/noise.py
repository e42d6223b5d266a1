"""The gradient noise scale (McCandlish et al. 2018, appendix A), with jackknife intervals."""

from dataclasses import dataclass
from math import atan2, cos, pi, sin, sqrt

import numpy as np

from gradscope.stats.base import Floats, Interval, Record, number, ratio

_Z = 1.959963984540054  # the 97.5th percentile of the normal distribution
_ASYMPTOTIC = 200  # degrees of freedom from which on the expansion is exact to 10⁻⁹


class NoiseScale(Record):
    """How large a batch is worth: B_simple = trΣ / |G|².

    Attributes:
        trace_covariance: trΣ, the variance of a sample's gradient summed over all entries.
        gradient_norm_squared: |G|², unbiased, so it may be negative.
        simple: Their ratio, in samples; None where `flag` says why.
        trace_covariance_interval: 95%, from the jackknife; None without products with the mean.
        gradient_norm_squared_interval: Likewise.
        simple_interval: Fieller's, from the jackknife's covariance; without an upper end where
            the interval of |G|² reaches zero.
        flag: Why the ratio does not exist, or has no upper bound, or None.
    """

    trace_covariance: float | None
    gradient_norm_squared: float | None
    simple: float | None
    trace_covariance_interval: Interval | None = None
    gradient_norm_squared_interval: Interval | None = None
    simple_interval: Interval | None = None
    flag: str | None


def noise_scale(
    norms: Floats, mean_gradient_squared: float | None, dots: Floats | None = None
) -> NoiseScale:
    """Estimate the noise scale; the ratio of averages, never the average of ratios.

    Args:
        norms: ‖gᵢ‖ (n,), finite.
        mean_gradient_squared: ‖G‖² of the mean gradient of the same samples.
        dots: ⟨gᵢ, G⟩ (n,), for the intervals.
    """
    n = norms.size
    if n < 2:
        return _undefined("it needs at least two finite samples")
    if mean_gradient_squared is None:
        return _undefined("the file has no finite mean gradient")
    big = mean_gradient_squared
    with np.errstate(over="ignore"):  # squares of huge norms: reported as undefined
        small = float(np.mean(np.square(norms)))
    trace, signal = estimates(n, small, big)
    if trace is None or signal is None:
        return _undefined("the squared norms overflow float64")
    simple = ratio(trace, signal)
    spread = None if dots is None or n < 3 else _jackknife(np.square(norms), big, dots)
    between = None if spread is None else spread.ratio(trace, signal)
    flag = None
    if simple is None:
        flag = f"|G|² is not positive: {n} samples do not tell the mean gradient from noise"
    elif between is not None and between.high is None:
        flag = f"the interval of |G|² reaches zero: {n} samples do not bound the noise scale"
    return NoiseScale(
        trace_covariance=trace,
        gradient_norm_squared=signal,
        simple=simple,
        trace_covariance_interval=None if spread is None else spread.around(trace, spread.trace),
        gradient_norm_squared_interval=None
        if spread is None
        else spread.around(signal, spread.signal),
        simple_interval=between,
        flag=flag,
    )


def estimates(n: int, small: float, big: float) -> tuple[float | None, float | None]:
    """Return trΣ and |G|² of n > 1 samples with mean‖gᵢ‖² `small` and ‖G‖² `big`."""
    trace = max(small - big, 0.0) * n / (n - 1)  # below 0 only by rounding
    return number(trace), number((n * big - small) / (n - 1))


def signal_to_noise(n: int, small: float, big: float, rounding: float) -> float | None:
    """Return ‖G‖² / (mean‖gᵢ‖² − ‖G‖²), or None where the noise is no more than rounding."""
    return ratio(big, small - big) if n > 1 and small - big > rounding * small else None


@dataclass(frozen=True)
class _Spread:
    """The jackknife's variances of trΣ and |G|², and their covariance."""

    trace: float
    signal: float
    both: float
    t: float

    def around(self, value: float, variance: float) -> Interval:
        """Return value ± t · standard error."""
        half = self.t * sqrt(variance)
        return Interval(low=number(value - half), high=number(value + half))

    def ratio(self, above: float, below: float) -> Interval | None:
        """Return Fieller's interval: all B with |above − B·below| within t standard errors of 0."""
        t2 = self.t**2
        a = below**2 - t2 * self.signal
        b = above * below - t2 * self.both
        c = above**2 - t2 * self.trace
        root = sqrt(max(b * b - a * c, 0.0))
        if a > 0 and below <= 0:  # no positive B
            return None
        if a > 0:
            return Interval(low=number(max((b - root) / a, 0.0)), high=number((b + root) / a))
        # unbounded: all B from the positive root on, or all of them
        return Interval(low=number((b - root) / a) if a < 0 < c else 0.0, high=None)


def _jackknife(squares: Floats, big: float, dots: Floats) -> _Spread:
    """Take each sample out once: ‖G₋ᵢ‖² = (n²‖G‖² − 2n⟨gᵢ, G⟩ + ‖gᵢ‖²) / (n − 1)²."""
    n = squares.size
    small = (squares.sum() - squares) / (n - 1)
    left = (n * n * big - 2 * n * dots + squares) / (n - 1) ** 2
    trace = (small - left) * (n - 1) / (n - 2)
    signal = ((n - 1) * left - small) / (n - 2)
    trace, signal = trace - trace.mean(), signal - signal.mean()
    factor = (n - 1) / n
    return _Spread(
        trace=float(factor * (trace @ trace)),
        signal=float(factor * (signal @ signal)),
        both=float(factor * (trace @ signal)),
        t=student(n - 1),
    )


def student(freedom: int) -> float:
    """Return the 97.5th percentile of Student's t (Abramowitz & Stegun 26.7.3 to 26.7.5)."""
    z, v = _Z, freedom
    start = (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
    if freedom > _ASYMPTOTIC:
        return start
    low, high = z, 13.0  # t of one degree is 12.7
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, v) < 0.95 else (low, middle)
    return low


def _inside(t: float, freedom: int) -> float:
    """Return the probability that |t| is no larger."""
    angle = atan2(t, sqrt(freedom))
    cosine, odd = cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    if not odd:
        return sin(angle) * total
    return 2 / pi * (angle + sin(angle) * total)


def _undefined(flag: str) -> NoiseScale:
    return NoiseScale(trace_covariance=None, gradient_norm_squared=None, simple=None, flag=flag)
