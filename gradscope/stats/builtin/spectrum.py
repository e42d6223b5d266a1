"""How many directions the gradients take: eigenvalues of their Gram matrix."""

from collections.abc import Iterator, Sequence

import numpy as np

from gradscope.stats.records import Record, number
from gradscope.stats.sections import (
    CurvePicture,
    Fact,
    MatrixPicture,
    Picture,
    Section,
    count,
    short,
)
from gradscope.stats.summary import Data, Summary, statistic

_SHOWN = 100  # eigenvalues
_DRAWN = 64  # samples in the picture of cosines


class Spectrum(Record):
    """Eigenvalues of the uncentred second moment of m samples' gradients, (1/m) Σ gᵢ gᵢᵀ."""

    source: str
    samples: int
    of: int
    eigenvalues: tuple[float, ...]
    effective_rank: float | None
    participation: float | None
    directions_for_90: int | None


def _sections(found: Spectrum, summary: Summary) -> Iterator[Section]:
    if found.effective_rank is None:
        return
    rows: list[Fact] = [
        ("effective rank", short(found.effective_rank)),
        ("directions for 90%", f"{found.directions_for_90}"),
        ("from", f"{found.source}, {found.samples:,} of {count(found.of, 'sample')}"),
    ]
    formulas = [
        "eigenvalues λₖ of (1/m) Σ gᵢ gᵢᵀ, from the Gram matrix",
        "effective rank = exp(−Σ pₖ ln pₖ), pₖ = λₖ / Σλ (Roy & Vetterli 2007)",
    ]
    yield Section("Spectrum of the gradients", rows, formulas=formulas)


def _picture(found: Spectrum, summary: Summary) -> Iterator[Picture]:
    values = [v for v in found.eigenvalues if v > 1e-12 * found.eigenvalues[0]]
    yield CurvePicture(
        label="Eigenvalues of the second moment of the gradients",
        title=f"Spectrum (effective rank {short(found.effective_rank)})",
        across="direction",
        up="eigenvalue",
        empty="" if values else "every gradient is zero",
        curves={"": list(enumerate(values, 1))},
        place=60,
    )


@statistic("spectrum", place=70, sections=_sections, pictures=_picture)
def spectrum(data: Data) -> Spectrum | None:
    """Summarise the Gram matrix (m, m); None where it is unknown."""
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
        eigenvalues=tuple(map(float, values[:_SHOWN])),
        effective_rank=number(np.exp(-(shares * np.log(shares)).sum())) if some else None,
        participation=number(1 / np.square(shares).sum()) if some else None,
        directions_for_90=int(np.searchsorted(shares.cumsum(), 0.9 - 1e-12) + 1) if some else None,
    )


def _matrix(found: Sequence[Sequence[float]], summary: Summary) -> Iterator[Picture]:
    by = ", by target" if summary.classes else ""
    yield MatrixPicture(
        label="Cosines of samples with each other",
        title=f"Cosines of {len(found)} samples",
        across=f"samples, evenly spread{by}",
        values=found,
        height=4.2,
        place=70,
    )


@statistic("cosines", pictures=_matrix, in_json=False)
def cosines(data: Data) -> tuple[tuple[float, ...], ...] | None:
    """Return the cosines of at most 64 samples with each other, those of a class together."""
    gram, among = data.products.gram, data.products.among
    if gram is None or among is None:
        return None
    m = len(gram)
    few = np.linspace(0, m - 1, min(m, _DRAWN)).round().astype(np.int64)
    if data.groups is not None:
        few = few[np.argsort(data.groups.of[among][few], kind="stable")]
    part = gram[np.ix_(few, few)]
    lengths = np.sqrt(np.clip(np.diag(part), 0, None))
    sizes = np.outer(lengths, lengths)
    found = np.divide(part, sizes, out=np.zeros_like(part), where=sizes > 0)
    return tuple(tuple(map(float, row)) for row in np.clip(found, -1.0, 1.0))
