"""The gradient noise scale, from norms alone (McCandlish et al. 2018, appendix A)."""

import numpy as np

from gradscope.stats.base import Floats, Record, number, ratio


class NoiseScale(Record):
    """How large a batch is worth: B_simple = trΣ / |G|².

    Attributes:
        trace_covariance: trΣ, the variance of a sample's gradient summed over all entries.
        gradient_norm_squared: |G|², unbiased, so it may be negative.
        simple: Their ratio, in samples; None where `flag` says why.
        flag: Why the ratio does not exist, or None.
    """

    trace_covariance: float | None
    gradient_norm_squared: float | None
    simple: float | None
    flag: str | None


def noise_scale(norms: Floats, mean_gradient_squared: float | None) -> NoiseScale:
    """Estimate the noise scale; the ratio of averages, never the average of ratios.

    Args:
        norms: ‖gᵢ‖ (N,), finite.
        mean_gradient_squared: ‖G‖² of the mean gradient of the same samples.
    """
    n = norms.size
    if n < 2:
        return _undefined("it needs at least two finite samples")
    if mean_gradient_squared is None:
        return _undefined("the file has no finite mean gradient")
    big = mean_gradient_squared
    with np.errstate(over="ignore"):  # squares of huge norms: reported as undefined
        small = float(np.mean(np.square(norms)))
    trace = number(max(small - big, 0.0) * n / (n - 1))  # below 0 only by rounding
    signal = number((n * big - small) / (n - 1))
    if trace is None or signal is None:
        return _undefined("the squared norms overflow float64")
    simple = ratio(trace, signal)
    flag = None
    if simple is None:
        flag = f"|G|² is not positive: {n} samples do not tell the mean gradient from noise"
    return NoiseScale(
        trace_covariance=trace, gradient_norm_squared=signal, simple=simple, flag=flag
    )


def _undefined(flag: str) -> NoiseScale:
    return NoiseScale(trace_covariance=None, gradient_norm_squared=None, simple=None, flag=flag)
