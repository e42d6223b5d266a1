"""Useful batch sizes: the gradient noise scale, tests of the batch size, CABS, signal.

McCandlish et al. 2018, appendix A (noise scale, with jackknife intervals); Byrd et al. 2012 (norm
test); Bollapragada et al. 2018 (inner-product and orthogonality test); Balles et al. 2017 (CABS);
Mahsereci et al. 2017 (evidence to stop).
"""

from collections.abc import Iterator
from math import atan2, cos, pi, sin, sqrt
from typing import Any

import numpy as np

from gradscope.stats.records import Floats, Interval, Record, number, ratio
from gradscope.stats.rows import Entries
from gradscope.stats.sections import Fact, Section, Styled, interval_text, short
from gradscope.stats.summary import Data, Summary, statistic

_TITLE = "Useful batch size"
_Z = 1.959963984540054  # the 97.5th percentile of the normal distribution
_ASYMPTOTIC = 200  # with more degrees of freedom the expansion is exact to 10⁻⁹
_SMALLEST, _LARGEST = 16, 2048  # batch sizes of CABS, as published


class NoiseScale(Record):
    """The noise scale B_simple = trΣ / |G|².

    Intervals are 95% intervals, or None if unknown. `simple_interval` may have no upper end
    (`high` = None), because |G|² may be zero. The end of an interval that overflows float64 becomes
    None.
    """

    trace_covariance: float | None = None
    gradient_norm_squared: float | None = None
    simple: float | None = None
    trace_covariance_interval: Interval | None = None
    gradient_norm_squared_interval: Interval | None = None
    simple_interval: Interval | None = None
    flag: str | None


def noise_scale(
    norms: Floats, big: float | None, dots: Floats | None = None, noun: str = "sample"
) -> NoiseScale:
    """Estimate the noise scale, a ratio of averages (not an average of ratios).

    Args:
        norms: ‖gᵢ‖ (n,), finite.
        big: ‖G‖² of the mean gradient.
        dots: ⟨gᵢ, G⟩ (n,), for the intervals.
        noun: The kind of row: sample or token.
    """
    n = norms.size
    if n < 2:
        return NoiseScale(flag=f"the noise scale needs at least two finite {noun}s")
    if big is None:
        return NoiseScale(flag="the file has no finite mean gradient")
    with np.errstate(over="ignore"):  # squares of huge norms: reported as undefined
        small = float(np.mean(np.square(norms)))
    trace, signal = estimates(n, small, big)
    if trace is None or signal is None:
        return NoiseScale(flag="the squared norms overflow float64")
    simple, flag = ratio(trace, signal), None
    known = dots is not None and n > 2
    intervals = _intervals(np.square(norms), big, dots, trace, signal) if known else {}
    around = intervals.get("simple_interval")
    if simple is None:
        flag = f"the mean gradient of {n:,} {noun}s is no larger than noise"
    elif around is not None and around.high is None:
        flag = f"{n:,} {noun}s are too few for an upper bound"
    elif around is None and simple > n:
        flag = f"uncertain: larger than the {n:,} {noun}s of the file, without an interval"
    return NoiseScale(
        trace_covariance=trace, gradient_norm_squared=signal, simple=simple, flag=flag, **intervals
    )


def estimates(n: int, small: float, big: float) -> tuple[float | None, float | None]:
    """Return trΣ and |G|² of n > 1 samples with mean‖gᵢ‖² `small` and ‖G‖² `big`."""
    trace = max(small - big, 0.0) * n / (n - 1)  # below 0 only by rounding
    return number(trace), number((n * big - small) / (n - 1))


def signal_to_noise(n: int, small: float, big: float, rounding: float) -> float | None:
    """Return ‖G‖² / (mean‖gᵢ‖² − ‖G‖²), or None if the noise is at most rounding."""
    return ratio(big, small - big) if n > 1 and small - big > rounding * small else None


def _intervals(
    squares: Floats, big: float, dots: Any, above: float, below: float
) -> dict[str, Interval | None]:
    """Return the intervals of trΣ (`above`), of |G|² (`below`), and of their ratio.

    The jackknife leaves out each sample once:
    ‖G₋ᵢ‖² = (n²‖G‖² − 2n⟨gᵢ, G⟩ + ‖gᵢ‖²) / (n − 1)². The interval of the ratio is Fieller's: all B
    with |above − B·below| within t standard errors of 0.
    """
    n = squares.size
    small = (squares.sum() - squares) / (n - 1)
    left = (n * n * big - 2 * n * dots + squares) / (n - 1) ** 2
    each = np.stack([(small - left) * (n - 1) / (n - 2), ((n - 1) * left - small) / (n - 2)])
    each -= each.mean(1, keepdims=True)
    t, factor = student(n - 1), (n - 1) / n
    trace, signal = (float(factor * (one @ one)) for one in each)  # variances
    both = float(factor * (each[0] @ each[1]))

    def around(value: float, variance: float) -> Interval:
        half = t * sqrt(variance)
        return Interval(low=number(value - half), high=number(value + half))

    a = below**2 - t**2 * signal
    b = above * below - t**2 * both
    c = above**2 - t**2 * trace
    root = sqrt(max(b * b - a * c, 0.0))
    simple = None  # if the interval has no positive B
    if a <= 0:  # unbounded: all B above the positive root, or all B
        simple = Interval(low=number((b - root) / a) if a < 0 < c else 0.0, high=None)
    elif below > 0:
        simple = Interval(low=number(max((b - root) / a, 0.0)), high=number((b + root) / a))
    return {
        "trace_covariance_interval": around(above, trace),
        "gradient_norm_squared_interval": around(below, signal),
        "simple_interval": simple,
    }


def student(freedom: int) -> float:
    """Return the 97.5th percentile of Student's t (Abramowitz & Stegun 26.7.3 to 26.7.5)."""
    z, v = _Z, freedom
    if v > _ASYMPTOTIC:
        return (
            z
            + (z**3 + z) / (4 * v)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        )

    def inside(t: float) -> float:  # the probability of a smaller |t|
        angle, odd = atan2(t, sqrt(v)), v % 2
        term, total = cos(angle) if odd else 1.0, 0.0
        for k in range(2 + odd, v + 1, 2):
            total += term
            term *= cos(angle) ** 2 * (k - 1) / k
        return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total

    low, high = z, 13.0  # t of one degree is 12.7
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 0.95 else (low, middle)
    return low


def _within(interval: Interval | None) -> str:
    return "" if interval is None else f" (95%: {interval_text(interval)})"


def _noise_section(noise: NoiseScale, summary: Summary) -> Iterator[Section]:
    noun = summary.noun
    simple = "undefined" if noise.simple is None else f"{short(noise.simple)} {noun}s"
    trace, signal = short(noise.trace_covariance), short(noise.gradient_norm_squared)
    rows: list[Fact] = [
        ("noise scale", simple + _within(noise.simple_interval)),
        ("trace of covariance", trace + _within(noise.trace_covariance_interval)),
        ("gradient norm squared", signal + _within(noise.gradient_norm_squared_interval)),
    ]
    if noise.flag is not None:
        rows.append(("", Styled(noise.flag, "yellow")))
    formulas = [
        "trΣ = (mean‖gᵢ‖² − ‖G‖²) · N/(N − 1)",
        "|G|² = (N‖G‖² − mean‖gᵢ‖²)/(N − 1)",
        "B_simple = trΣ / |G|² (McCandlish et al. 2018); 95%: jackknife, Fieller for the ratio",
    ]
    yield Section(_TITLE, rows, formulas=formulas)


def _noise_answer(noise: NoiseScale, summary: Summary) -> Iterator[tuple[str, str]]:
    within = _within(noise.simple_interval)
    known = f"about {short(noise.simple)} {summary.noun}s{within}"
    if noise.flag is not None and noise.simple_interval is None:
        known += f" ({noise.flag})"
    yield "batch size", f"unknown: {noise.flag}" if noise.simple is None else known


@statistic("noise_scale", place=30, sections=_noise_section, answers=_noise_answer)
def _noise_scale(data: Data) -> NoiseScale:
    """Estimate the noise scale."""
    return noise_scale(data.samples.norm, data.mean_squared, data.products.dots, data.noun)


class BatchTests(Record):
    """Variance of the mean gradient relative to its length; a batch passes a test if it is ≤ θ²."""

    norm: float | None = None
    inner_product: float | None = None
    orthogonality: float | None = None
    plug_in_noise_scale: float | None = None


def _tests_section(tests: BatchTests, summary: Summary) -> Iterator[Section]:
    rows = [("norm test", short(tests.norm))]
    if tests.inner_product is not None:
        rows.append(("inner-product test", short(tests.inner_product)))
        rows.append(("orthogonality test", short(tests.orthogonality)))
    formulas = [
        "norm test θ² = (Σ‖gᵢ‖² − N‖G‖²) / (N(N − 1)‖G‖²)",
        "inner-product test θ² = (Σ⟨gᵢ, G⟩² − N‖G‖⁴) / (N(N − 1)‖G‖⁴)",
        "orthogonality test ν² = (Σ‖gᵢ‖² − Σ⟨gᵢ, G⟩²/‖G‖²) / (N(N − 1)‖G‖²)",
    ]
    yield Section(_TITLE, rows, formulas=formulas)


@statistic("batch_tests", place=31, sections=_tests_section)
def batch_tests(data: Data) -> BatchTests:
    """Test whether n samples are a batch that is large enough."""
    n, big, dots = data.samples.n, data.mean_squared, data.products.dots
    if n < 2 or big is None:
        return BatchTests()
    squares = float(np.square(data.samples.norm).sum())
    norm = ratio(squares - n * big, n * (n - 1) * big)
    found = {"norm": norm, "plug_in_noise_scale": None if norm is None else number(n * norm)}
    if dots is not None and big > 0:
        along = float(np.square(dots / big).sum())  # Σ⟨gᵢ, G⟩² / ‖G‖⁴
        found["inner_product"] = number((along - n) / (n * (n - 1)))
        found["orthogonality"] = number((squares / big - along) / (n * (n - 1)))
    return BatchTests(**found)


class Cabs(Record):
    """The batch size that balances variance and descent for plain SGD."""

    variance: float | None
    loss: float | None
    per_learning_rate: float | None
    learning_rate: float | None
    unclipped: float | None
    batch_size: int | None
    flag: str | None


def _cabs_section(found: Cabs, summary: Summary) -> Iterator[Section]:
    text: str | Styled
    if found.per_learning_rate is None:
        text = Styled(f"undefined: {found.flag}", "yellow")
    elif found.batch_size is None:
        text = f"{short(found.per_learning_rate)} × learning rate (give --lr)"
    else:
        asked = f"{short(found.unclipped)} at a learning rate of {short(found.learning_rate)}"
        text = f"{found.batch_size:,} ({asked})"
    formula = "CABS = learning rate · ξ / L, ξ = mean‖gᵢ‖² − ‖G‖² (Balles et al. 2017)"
    yield Section(_TITLE, [("CABS batch size", text)], formulas=[formula])


@statistic("cabs", place=32, sections=_cabs_section)
def cabs(data: Data) -> Cabs:
    """Couple the batch size to the learning rate."""
    big, rate = data.mean_squared, data.options.learning_rate
    variance = loss = None
    if data.samples.n and big is not None:
        variance = number(max(np.mean(np.square(data.samples.norm)) - big, 0.0))
        loss = number(data.samples.loss.mean())
    each = ratio(variance, loss)
    unclipped = None if each is None or rate is None else number(rate * each)
    flag = None
    if each is None:
        flag = (
            "the mean loss is not positive" if variance is not None else f"no finite {data.noun}s"
        )
    size = None if unclipped is None else min(max(round(unclipped), _SMALLEST), _LARGEST)
    return Cabs(
        variance=variance,
        loss=loss,
        per_learning_rate=each,
        learning_rate=rate,
        unclipped=unclipped,
        batch_size=size,
        flag=flag,
    )


class Signal(Record):
    """The share of signal in the gradient, and whether any signal is left."""

    signal_to_noise: float | None
    mean_entry: float | None
    entries: int | None
    noiseless: int | None
    evidence: float | None
    stop: bool | None


def _signal_section(found: Signal, summary: Summary) -> Iterator[Section]:
    rows: list[Fact] = [("signal to noise", short(found.signal_to_noise))]
    if found.mean_entry is not None:
        rows.append(("mean over entries", short(found.mean_entry)))
    if found.evidence is not None:
        left = Styled(f"{short(found.evidence)}: only noise is left", "yellow")
        signal = f"{short(found.evidence)}: there is signal left"
        rows.append(("evidence to stop", left if found.stop else signal))
    formula = "evidence = 1 − N · meanⱼ Gⱼ² / Varⱼ (Mahsereci et al. 2017)"
    yield Section(_TITLE, rows, formulas=[formula])


@statistic("signal", place=33, sections=_signal_section)
def signal(data: Data) -> Signal:
    """Summarise all parameters together."""
    n, parts, plug_in = data.samples.n, data.entries, None
    every = list((parts or {}).values())
    total = Entries(
        sum(e.noisy for e in every), sum(e.noiseless for e in every), sum(e.signal for e in every)
    )
    mean = total.mean_ratio
    evidence = None if mean is None or n < 2 else number(1 - (n - 1) * mean)
    if data.mean_squared is not None and n:
        small = float(np.square(data.samples.norm).mean())
        plug_in = signal_to_noise(n, small, data.mean_squared, data.rounding)
    return Signal(
        signal_to_noise=plug_in,
        mean_entry=mean,
        entries=None if parts is None else total.noisy,
        noiseless=None if parts is None else total.noiseless,
        evidence=evidence,
        stop=None if evidence is None else evidence > 0,
    )
