"""Distributions of losses and gradient norms, and the share that a clipping norm clips."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gradscope.core.texts import count
from gradscope.stats.records import Floats, Histogram, Record, number
from gradscope.stats.sections import (
    Column,
    Fact,
    HistogramPicture,
    Picture,
    Section,
    Table,
    numbers,
    percent,
    short,
)
from gradscope.stats.summary import Data, Summary, statistic

PERCENTS = (1, 5, 25, 50, 75, 90, 95, 99)
_MOST_BINS = 20
_DECADES_FOR_LOG = 2
_SHARES = (0.01, 0.05, 0.1, 0.5)  # shares of clipped samples


class MeanAndRange(Record):
    """Mean, spread and range of a number, over samples."""

    mean: float | None
    std: float | None
    min: float
    max: float


class Distribution(MeanAndRange):
    """Mean, spread, range, percentiles and histogram of a number, over samples."""

    percentiles: dict[str, float]
    histogram: Histogram

    @property
    def median(self) -> float:
        """The 50th percentile."""
        return self.percentiles["50"]


def moments(values: Floats) -> MeanAndRange | None:
    """Summarise the finite `values` (n,). Returns None if no value is finite."""
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    return MeanAndRange(
        mean=number(values.mean()),
        std=number(values.std(ddof=1)) if values.size > 1 else None,
        min=float(values.min()),
        max=float(values.max()),
    )


def percentiles(values: Floats) -> dict[str, float]:
    """Return the percentiles of `values` (n,), with linear interpolation."""
    found = np.percentile(values, PERCENTS)
    return {str(p): float(v) for p, v in zip(PERCENTS, found, strict=True)}


def histogram(values: Floats) -> Histogram:
    """Count `values` (n,) in bins, spaced logarithmically if they span over two decades.

    The number of bins follows Rice's rule, 2 N^(1/3), up to 20.
    """
    positive = values[values > 0]
    zeros = int(values.size - positive.size)
    if not positive.size:
        return Histogram(scale="linear", edges=(), counts=(), zeros=zeros)
    low, high = float(positive.min()), float(positive.max())
    log = high / 10**_DECADES_FOR_LOG > low
    bins = min(_MOST_BINS, math.ceil(2 * positive.size ** (1 / 3)))
    if high - low <= 1e-9 * high:  # equal up to rounding
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
def loss(data: Data) -> MeanAndRange | None:
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
    ranks = {"50": 0, "90": 1, "99": 2}
    percents = [numbers(f"{p}%", [v], ranks.get(p, 3)) for p, v in norm.percentiles.items()]
    return [
        Section("Loss and gradient norm", table=Table(columns), formulas=formulas),
        Section("Percentiles of the norm", table=Table(percents)),
        Section("Histogram of the norm", histogram=norm.histogram),
    ]


def _picture(norm: Distribution, summary: Summary) -> Iterator[Picture]:
    found = norm.histogram
    zeros = f" ({count(found.zeros, 'zero')} not shown)" if found.zeros and found.counts else ""
    yield HistogramPicture(
        label="Histogram of the gradient norms",
        title=f"Gradient norms{zeros}",
        across=f"norm of a {summary.noun}'s gradient",
        up=f"{summary.noun}s",
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


class Clip(Record):
    """A clipping norm c, as in g · min(1, c / ‖g‖), and the share of samples with ‖gᵢ‖ > c."""

    norm: float
    clipped: float


class Clipping(Record):
    """The clipping norms of `--clip`, and norms that clip 1, 5, 10 and 50% of the samples."""

    asked: tuple[Clip, ...]
    by_share: dict[str, Clip]


def _clipping_section(found: Clipping, summary: Summary) -> Iterator[Section]:
    noun = summary.noun
    rows: list[Fact] = [
        (f"norm {short(c.norm)}", f"clips {s}% of the {noun}s") for s, c in found.by_share.items()
    ]
    rows += [
        (f"norm {short(c.norm)}", f"clips {percent(c.clipped)} of the {noun}s (--clip)")
        for c in found.asked
    ]
    formulas = [f"clipped: the share of {noun}s with ‖gᵢ‖ > c"]
    yield Section("Which clipping norm", rows, formulas=formulas)


def _answer_clipping(found: Clipping, summary: Summary) -> Iterator[tuple[str, str]]:
    parts = [f"{short(found.by_share[s].norm)} clips {s}%" for s in ("1", "10")]
    parts[0] += f" of the {summary.noun}s"
    some = summary.norm is not None and summary.norm.max > 0
    yield "clipping norm", ", ".join(parts) if some else "every gradient is zero"


@statistic("clipping", place=20, sections=_clipping_section, answers=_answer_clipping)
def clipping(data: Data) -> Clipping | None:
    """Return clipping norms and the shares they clip, or None without samples."""
    norms = data.samples.norm
    if not norms.size:
        return None

    def clip(c: float) -> Clip:
        return Clip(norm=float(c), clipped=float(np.mean(norms > c)))

    cuts = np.quantile(norms, [1 - share for share in _SHARES])
    return Clipping(
        asked=tuple(map(clip, data.options.clip)),
        by_share={f"{100 * s:g}": clip(c) for s, c in zip(_SHARES, cuts, strict=True)},
    )
