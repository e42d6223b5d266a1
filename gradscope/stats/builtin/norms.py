"""How losses and gradient norms are distributed: moments, percentiles, histogram."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gradscope.stats.records import Floats, Histogram, Record, number
from gradscope.stats.sections import (
    Column,
    HistogramPicture,
    Picture,
    Section,
    Table,
    count,
    numbers,
    short,
)
from gradscope.stats.summary import Data, Summary, statistic

PERCENTS = (1, 5, 25, 50, 75, 90, 95, 99)
_MOST_BINS = 20
_DECADES_FOR_LOG = 2


class Moments(Record):
    """Mean, spread and range of one number a sample."""

    mean: float | None
    std: float | None
    min: float
    max: float


class Distribution(Moments):
    """Moments, percentiles and histogram of one number a sample."""

    percentiles: dict[str, float]
    histogram: Histogram

    @property
    def median(self) -> float:
        """The 50th percentile."""
        return self.percentiles["50"]


def moments(values: Floats) -> Moments | None:
    """Summarise the finite ones of `values` (n,); None when there is none."""
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    return Moments(
        mean=number(values.mean()),
        std=number(values.std(ddof=1)) if values.size > 1 else None,
        min=float(values.min()),
        max=float(values.max()),
    )


def percentiles(values: Floats) -> dict[str, float]:
    """Return the percentiles of `values` (n,), linear between the two nearest."""
    found = np.percentile(values, PERCENTS)
    return {str(p): float(v) for p, v in zip(PERCENTS, found, strict=True)}


def histogram(values: Floats) -> Histogram:
    """Count `values` (n,) in bins, spaced logarithmically when they span over two decades.

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


@statistic("loss", place=10)
def loss(data: Data) -> Moments | None:
    """Summarise Lᵢ."""
    return moments(data.samples.loss)


def _sections(norm: Distribution, summary: Summary) -> list[Section]:
    both: list[Any] = [summary.loss, norm]
    columns = [
        Column("", ["loss", "norm"], justify="left"),
        numbers("mean", [m and m.mean for m in both]),
        numbers("std", [m and m.std for m in both], rank=1),
        numbers("min", [m and m.min for m in both]),
        numbers("max", [m and m.max for m in both]),
    ]
    formulas = ["std = √(Σ(x − mean)² / (N − 1))", "percentiles: linear between the two nearest"]
    pairs = [(f"{key}%", short(value)) for key, value in norm.percentiles.items()]
    return [
        Section("Loss and gradient norm", table=Table(columns), formulas=formulas),
        Section("Percentiles of the norm", pairs=pairs),
        Section("Histogram of the norm", histogram=norm.histogram),
    ]


def _picture(norm: Distribution, summary: Summary) -> Iterator[Picture]:
    found = norm.histogram
    zeros = f" ({count(found.zeros, 'zero')} not shown)" if found.zeros and found.counts else ""
    yield HistogramPicture(
        label="Histogram of the gradient norms",
        title=f"Gradient norms{zeros}",
        across="norm of a sample's gradient",
        up="samples",
        empty="" if found.counts else "every norm is zero",
        histogram=found,
        mark=(norm.median, f"median {short(norm.median)}"),
        place=10,
    )


@statistic("norm", place=10, sections=_sections, pictures=_picture)
def norm(data: Data) -> Distribution | None:
    """Summarise ‖gᵢ‖ over all parameters."""
    values = data.samples.norm
    basic = moments(values)
    if basic is None:
        return None
    return Distribution(
        **basic.model_dump(), percentiles=percentiles(values), histogram=histogram(values)
    )
