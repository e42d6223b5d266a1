"""The nearest and most opposed samples of any, from whatever a file has."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscope.stats.records import Floats, cosines_of
from gradscope.stats.source import gram_of, projections_of, rows_of, rows_unusable
from gradscope.stats.summary import Data

_BESIDE = 6  # neighbours of a sample
_ROWS = 2**30  # bytes of rows that are held
_TILE = 2**25  # products that are held


class Ranked(NamedTuple):
    """Neighbours (k, b) of k samples, the first the nearest, or the most opposed."""

    places: NDArray[np.int64]
    cosines: Floats


@dataclass(frozen=True)
class Neighbours:
    """Vectors (n, d), or their products (n, n), of the finite samples, with the lengths (n,)."""

    vectors: Floats
    lengths: Floats
    is_gram: bool

    def of(self, places: NDArray[np.int64]) -> tuple[Ranked, Ranked]:
        """Return the nearest and the most opposed of the samples at `places` (k,)."""
        n = len(self.lengths)
        beside = min(_BESIDE, max(n - 1, 0))
        found: list[list[NDArray[np.float64]]] = [[], [], [], []]
        step = max(1, _TILE // max(n, 1))
        for start in range(0, len(places), step):
            some = places[start : start + step]
            dots = self.vectors[some] if self.is_gram else self.vectors[some] @ self.vectors.T
            cosines = cosines_of(dots, np.outer(self.lengths[some], self.lengths))
            cosines[np.arange(len(some)), some] = np.nan  # not oneself
            for k, sign in ((0, -1.0), (2, 1.0)):
                keys = np.where(np.isnan(cosines), np.inf, sign * cosines)
                order = np.argsort(keys, axis=1, kind="stable")[:, :beside]
                known = np.take_along_axis(cosines, order, 1)
                found[k].append(np.where(np.isnan(known), -1, order))
                found[k + 1].append(known)
        every = [np.concatenate(one) if one else np.empty((0, beside)) for one in found]
        return (
            Ranked(every[0].astype(np.int64), every[1]),
            Ranked(every[2].astype(np.int64), every[3]),
        )


def neighbours(data: Data) -> Neighbours | str:
    """Return the samples' products, as exact as the file has them, or what it lacks."""
    samples, file = data.samples, data.file
    gram = gram_of(file, samples.n)
    if gram is not None:
        return Neighbours(gram, samples.norm, is_gram=True)
    rows = None if rows_unusable(file) else rows_of(file)
    if rows and sum(8 * prod(array.shape) for array in rows.values()) <= _ROWS:
        parts = [np.empty((samples.n, 0))]
        for array in rows.values():
            values = np.asarray(array[...])[samples.rows].reshape(samples.n, -1)
            parts += [values.real, values.imag] if np.iscomplexobj(values) else [values]
        vectors = np.concatenate(parts, 1, dtype=np.float64)
        return Neighbours(vectors, samples.norm, is_gram=False)
    found = projections_of(file)
    if found is not None:
        return Neighbours(found[1][samples.rows], samples.norm, is_gram=False)
    return "compute with -t identity, -t gram or -t project:dim=256"
