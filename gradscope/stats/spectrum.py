"""How many directions the gradients take: eigenvalues of their Gram matrix."""

import numpy as np

from gradscope.stats.base import Floats, Mask, Record, number
from gradscope.stats.table import Positions, Table

MOST = 2000  # samples compared pairwise
_WORK = 4e10  # multiplications: m² P
_HELD = 2**25  # numbers of a parameter that are held for it: m p
_SHOWN = 100
_PICTURED = 64


class Spectrum(Record):
    """Eigenvalues of the uncentred second moment of m samples' gradients, (1/m) Σ gᵢ gᵢᵀ.

    Attributes:
        source: What it was taken from.
        samples: m.
        of: N.
        eigenvalues: The 100 largest, largest first.
        effective_rank: exp(−Σ pₖ ln pₖ), pₖ = λₖ / Σλ.
        participation: (Σλ)² / Σλ².
        directions_for_90: How many of the largest make up 90% of Σλ.
    """

    source: str
    samples: int
    of: int
    eigenvalues: tuple[float, ...]
    effective_rank: float | None
    participation: float | None
    directions_for_90: int | None


def picked(table: Table, entries: int, widest: int = 1) -> Mask:
    """Choose the samples to compare pairwise: all, or as many as is affordable, evenly spread.

    At most 2,000, and so that m² P is at most 4·10¹⁰ for P entries, and m p at most 2²⁵ for the
    p entries of the largest parameter.

    Returns:
        (n,).
    """
    affordable = min(int(np.sqrt(_WORK / max(1, entries))), _HELD // max(1, widest))
    m = max(min(table.n, MOST, affordable), min(table.n, 2))
    chosen: Mask = np.zeros(table.n, dtype=bool)
    chosen[np.linspace(0, table.n - 1, m).round().astype(np.int64)] = True
    return chosen


def spectrum(source: str, gram: Floats, of: int) -> Spectrum | None:
    """Summarise the Gram matrix (m, m) of some of `of` samples; None where it is empty."""
    m = len(gram)
    if not m or not np.isfinite(gram).all():
        return None
    values = np.clip(np.linalg.eigvalsh(gram)[::-1], 0.0, None) / m
    total = float(values.sum())
    shares = values[values > 0] / total if total > 0 else np.empty(0)
    return Spectrum(
        source=source,
        samples=m,
        of=of,
        eigenvalues=tuple(map(float, values[:_SHOWN])),
        effective_rank=number(np.exp(-(shares * np.log(shares)).sum())) if shares.size else None,
        participation=number(1 / np.square(shares).sum()) if shares.size else None,
        directions_for_90=int(np.searchsorted(shares.cumsum(), 0.9 - 1e-12) + 1)
        if shares.size
        else None,
    )


def cosine_matrix(gram: Floats, order: Positions | None = None) -> tuple[tuple[float, ...], ...]:
    """Return the cosines of at most 64 of the samples of a Gram matrix (m, m) with each other.

    Args:
        gram: Their inner products.
        order: A number a sample (m,), such as its class, by which they are sorted.
    """
    m = len(gram)
    few = np.linspace(0, m - 1, min(m, _PICTURED)).round().astype(np.int64)
    if order is not None:
        few = few[np.argsort(order[few], kind="stable")]
    part = gram[np.ix_(few, few)]
    lengths = np.sqrt(np.clip(np.diag(part), 0, None))
    sizes = np.outer(lengths, lengths)
    found = np.divide(part, sizes, out=np.zeros_like(part), where=sizes > 0)
    return tuple(tuple(map(float, row)) for row in np.clip(found, -1.0, 1.0))
