"""Cosines of the samples with the mean gradient, and the spectrum of the gradients."""

from collections.abc import Iterator, Sequence

import numpy as np

from gradscope.core.texts import count
from gradscope.stats.builtin.norms import MeanAndRange, moments, percentiles
from gradscope.stats.records import Histogram, Record, cosines_of, number, spread
from gradscope.stats.sections import (
    CurvePicture,
    Fact,
    HistogramPicture,
    MatrixPicture,
    Picture,
    Section,
    Sparkline,
    percent,
    short,
)
from gradscope.stats.summary import Data, Summary, statistic

_BINS = 20
_SHOWN = 100  # the most eigenvalues in a result
_DRAWN = 64  # the most samples in the picture of cosines


class Directions(Record):
    """Cosines of the samples with the mean gradient; samples with a zero gradient are left out."""

    source: str
    samples: int
    cosine: MeanAndRange
    percentiles: dict[str, float]
    histogram: Histogram
    opposing: float


def _sections(found: Directions, summary: Summary) -> Iterator[Section]:
    low, high = found.percentiles["5"], found.percentiles["95"]
    yield Section(
        "Cosine with the mean gradient",
        [
            ("opposed", f"{percent(found.opposing)} of {count(found.samples, summary.noun)}"),
            ("mean", short(found.cosine.mean)),
            ("5% to 95%", f"{short(low)} to {short(high)}"),
            ("cosines from -1 to 1", Sparkline(found.histogram.counts)),
        ],
        formulas=[
            "cosine = ⟨gᵢ, G⟩ / (‖gᵢ‖ ‖G‖)",
            f"opposed: the share of {summary.noun}s with ⟨gᵢ, G⟩ < 0",
        ],
    )


def _picture(found: Directions, summary: Summary) -> Iterator[Picture]:
    yield HistogramPicture(
        label="Histogram of the cosines with the mean gradient",
        title=f"Cosine with the mean ({found.opposing:.0%} opposed)",
        across="cosine",
        up=f"{summary.noun}s",
        histogram=found.histogram,
        split=True,
        place=50,
    )


@statistic("directions", place=40, sections=_sections, pictures=_picture)
def directions(data: Data) -> Directions | None:
    """Summarise the cosines, or return None if they are unknown."""
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
        histogram=Histogram(scale="linear", edges=edges.tolist(), counts=counts.tolist(), zeros=0),
        opposing=float(np.mean(known < 0)),
    )


class Spectrum(Record):
    """Eigenvalues of the uncentred second moment of m samples' gradients, (1/m) Σ gᵢ gᵢᵀ."""

    source: str
    samples: int
    of: int
    eigenvalues: tuple[float, ...]
    effective_rank: float | None
    participation: float | None
    directions_for_90: int | None


def _spectrum_section(found: Spectrum, summary: Summary) -> Iterator[Section]:
    if found.effective_rank is None:
        return
    rows: list[Fact] = [
        ("effective rank", short(found.effective_rank)),
        ("directions for 90%", f"{found.directions_for_90}"),
        (f"{summary.noun}s", f"{found.samples:,} of {found.of:,}, from {found.source}"),
    ]
    formulas = [
        "eigenvalues λₖ of (1/m) Σ gᵢ gᵢᵀ, from the Gram matrix",
        "effective rank = exp(−Σ pₖ ln pₖ), pₖ = λₖ / Σλ (Roy & Vetterli 2007)",
    ]
    yield Section("Spectrum of the gradients", rows, formulas=formulas)


def _spectrum_picture(found: Spectrum, summary: Summary) -> Iterator[Picture]:
    values = [v for v in found.eigenvalues if v > 1e-12 * found.eigenvalues[0]]
    yield CurvePicture(
        label="Eigenvalues of the second moment of the gradients",
        title=f"Spectrum (effective rank {short(found.effective_rank)})",
        across="direction, largest first",
        up="eigenvalue",
        empty="" if values else "every gradient is zero",
        curves={"": list(enumerate(values, 1))},
        place=60,
    )


@statistic("spectrum", place=70, sections=_spectrum_section, pictures=_spectrum_picture)
def spectrum(data: Data) -> Spectrum | None:
    """Summarise the Gram matrix (m, m), or return None if it is unknown."""
    gram = data.products.gram
    if gram is None or not len(gram) or not np.isfinite(gram).all():
        return None
    values = np.clip(np.linalg.eigvalsh(gram)[::-1], 0.0, None) / len(gram)
    total = float(values.sum())
    shares = values[values > 0] / total if total > 0 else np.empty(0)
    some = bool(shares.size)
    return Spectrum(
        source=data.products.pairs,
        samples=len(gram),
        of=data.samples.n,
        eigenvalues=tuple(values[:_SHOWN].tolist()),
        effective_rank=number(np.exp(-(shares * np.log(shares)).sum())) if some else None,
        participation=number(1 / np.square(shares).sum()) if some else None,
        directions_for_90=int(np.searchsorted(shares.cumsum(), 0.9 - 1e-12) + 1) if some else None,
    )


def _matrix(found: Sequence[Sequence[float]], summary: Summary) -> Iterator[Picture]:
    by, noun = ", by target" if summary.classes else "", summary.noun
    yield MatrixPicture(
        label=f"Cosines of {noun}s with each other",
        title=f"Cosines of {len(found)} {noun}s",
        across=f"{noun}s, evenly spread{by}",
        up="cosine",
        values=found,
        height=4.2,
        place=70,
    )


@statistic("cosines", pictures=_matrix, in_json=False)
def cosines(data: Data) -> tuple[tuple[float, ...], ...] | None:
    """Return the cosines of at most 64 samples with each other, ordered by class."""
    gram, among = data.products.gram, data.products.among
    if gram is None or among is None:
        return None
    few = spread(len(gram), _DRAWN)
    if data.groups is not None:
        few = few[np.argsort(data.groups.of[among][few], kind="stable")]
    part = gram[np.ix_(few, few)]
    lengths = np.sqrt(np.clip(np.diag(part), 0, None))
    found = np.nan_to_num(cosines_of(part, np.outer(lengths, lengths)))
    return tuple(map(tuple, found.tolist()))
