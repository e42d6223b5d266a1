"""How one number a sample is distributed: moments, percentiles, histogram."""

import math
from typing import Literal

import numpy as np

from gradscope.stats.base import Floats, Record, number

PERCENTS = (1, 5, 25, 50, 75, 90, 95, 99)
_MOST_BINS = 20
_DECADES_FOR_LOG = 2


class Histogram(Record):
    """Counts of the positive values between edges.

    Attributes:
        scale: How the edges are spaced.
        edges: One more than counts; a bin holds its lower edge, the last one both.
        counts: Values in each bin.
        zeros: Values equal to zero, which are in no bin.
    """

    scale: Literal["linear", "log"]
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    zeros: int


class Moments(Record):
    """Mean, spread and range of one number a sample.

    Attributes:
        mean: None only when it overflows.
        std: With ddof = 1; None for a single sample.
        min: The least.
        max: The largest.
    """

    mean: float | None
    std: float | None
    min: float
    max: float


class Distribution(Moments):
    """Moments, percentiles and histogram of one number a sample.

    Attributes:
        percentiles: {"50": the median, ...}, linear between the two nearest values.
        histogram: Of the positive values, with the zeros apart.
    """

    percentiles: dict[str, float]
    histogram: Histogram

    @property
    def median(self) -> float:
        """The 50th percentile."""
        return self.percentiles["50"]


def moments(values: Floats) -> Moments | None:
    """Summarise the finite ones of `values` (N,); None when there is none."""
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    with np.errstate(over="ignore"):
        return Moments(
            mean=number(values.mean()),
            std=number(values.std(ddof=1)) if values.size > 1 else None,
            min=float(values.min()),
            max=float(values.max()),
        )


def distribution(values: Floats) -> Distribution | None:
    """Summarise finite `values` (N,), none of them negative; None when there is none."""
    basic = moments(values)
    if basic is None:
        return None
    return Distribution(
        **basic.model_dump(),
        percentiles={
            str(p): float(v) for p, v in zip(PERCENTS, np.percentile(values, PERCENTS), strict=True)
        },
        histogram=histogram(values),
    )


def histogram(values: Floats) -> Histogram:
    """Count `values` (N,) in bins, spaced logarithmically when they span over two decades.

    The number of bins follows Rice's rule, 2 N^(1/3), up to a number that fits a screen.
    """
    positive = values[values > 0]
    zeros = int(values.size - positive.size)
    if not positive.size:
        return Histogram(scale="linear", edges=(), counts=(), zeros=zeros)
    low, high = float(positive.min()), float(positive.max())
    log = high / 10**_DECADES_FOR_LOG > low
    bins = min(_MOST_BINS, math.ceil(2 * positive.size ** (1 / 3)))
    if high - low <= 1e-9 * high:  # equal up to rounding: there is nothing to resolve
        edges = np.array([low, high])
    else:
        edges = (np.geomspace if log else np.linspace)(low, high, bins + 1)
        edges[0], edges[-1] = low, high
    inner = np.searchsorted(edges[1:-1], positive, side="right")
    counts = np.bincount(inner, minlength=edges.size - 1)
    return Histogram(
        scale="log" if log else "linear",
        edges=tuple(map(float, edges)),
        counts=tuple(map(int, counts)),
        zeros=zeros,
    )
