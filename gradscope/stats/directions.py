"""Does each sample agree with the mean gradient?"""

import numpy as np

from gradscope.stats.base import Floats, Record
from gradscope.stats.distribution import PERCENTS, Histogram, Moments, moments

_BINS = 20


class Directions(Record):
    """Cosines of the samples with the mean gradient; samples without a gradient have none.

    Attributes:
        source: What it was taken from.
        samples: How many have a cosine.
        cosine: Mean, spread and range.
        percentiles: As of the norm.
        histogram: 20 bins from -1 to 1.
        opposing: The share of samples with ⟨gᵢ, G⟩ < 0.
    """

    source: str
    samples: int
    cosine: Moments
    percentiles: dict[str, float]
    histogram: Histogram
    opposing: float


def cosines(dots: Floats, norms: Floats, mean_gradient_squared: float | None) -> Floats:
    """Return ⟨gᵢ, G⟩ / (‖gᵢ‖ ‖G‖) (n,), NaN where one of them is zero."""
    lengths = norms * np.sqrt(np.nan if mean_gradient_squared is None else mean_gradient_squared)
    known = lengths > 0
    found = np.full(dots.shape, np.nan)
    found[known] = np.clip(dots[known] / lengths[known], -1.0, 1.0)
    return found


def directions(source: str, found: Floats) -> Directions | None:
    """Summarise cosines (n,); None when no sample has one."""
    known = found[np.isfinite(found)]
    basic = moments(known)
    if basic is None:
        return None
    counts, edges = np.histogram(known, _BINS, (-1.0, 1.0))
    percentiles = np.percentile(known, PERCENTS)
    return Directions(
        source=source,
        samples=int(known.size),
        cosine=basic,
        percentiles={str(p): float(v) for p, v in zip(PERCENTS, percentiles, strict=True)},
        histogram=Histogram(
            scale="linear",
            edges=tuple(map(float, edges)),
            counts=tuple(map(int, counts)),
            zeros=0,
        ),
        opposing=float(np.mean(known < 0)),
    )
