"""Does each sample agree with the mean gradient?"""

from collections.abc import Iterator

import numpy as np

from gradscope.stats.builtin.norms import Moments, moments, percentiles
from gradscope.stats.records import Histogram, Record
from gradscope.stats.sections import (
    HistogramPicture,
    Picture,
    Section,
    Spark,
    count,
    percent,
    short,
)
from gradscope.stats.summary import Data, Summary, statistic

_BINS = 20


class Directions(Record):
    """Cosines of the samples with the mean gradient; samples without a gradient have none."""

    source: str
    samples: int
    cosine: Moments
    percentiles: dict[str, float]
    histogram: Histogram
    opposing: float


def _sections(found: Directions, summary: Summary) -> Iterator[Section]:
    low, high = found.percentiles["5"], found.percentiles["95"]
    yield Section(
        "Cosine with the mean gradient",
        [
            ("opposed", f"{percent(found.opposing)} of {count(found.samples, 'sample')}"),
            ("mean", short(found.cosine.mean)),
            ("5% to 95%", f"{short(low)} to {short(high)}"),
            ("from -1 to 1", Spark(found.histogram.counts)),
        ],
        formulas=[
            "cosine = ⟨gᵢ, G⟩ / (‖gᵢ‖ ‖G‖)",
            "opposed: the share of samples with ⟨gᵢ, G⟩ < 0",
        ],
    )


def _picture(found: Directions, summary: Summary) -> Iterator[Picture]:
    yield HistogramPicture(
        label="Histogram of the cosines with the mean gradient",
        title=f"Cosine with the mean ({found.opposing:.0%} opposed)",
        across="cosine",
        up="samples",
        histogram=found.histogram,
        split=True,
        place=50,
    )


@statistic("directions", place=40, sections=_sections, pictures=_picture)
def directions(data: Data) -> Directions | None:
    """Summarise the cosines; None when no sample has one."""
    cosines = data.cosines
    if cosines is None:
        return None
    known = cosines[np.isfinite(cosines)]
    basic = moments(known)
    if basic is None:
        return None
    counts, edges = np.histogram(known, _BINS, (-1.0, 1.0))
    return Directions(
        source=data.products.source,
        samples=int(known.size),
        cosine=basic,
        percentiles=percentiles(known),
        histogram=Histogram(
            scale="linear",
            edges=tuple(map(float, edges)),
            counts=tuple(map(int, counts)),
            zeros=0,
        ),
        opposing=float(np.mean(known < 0)),
    )
