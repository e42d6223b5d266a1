"""Samples beside others: the nearest and most opposed of any, and the means of classes."""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscope.core.texts import visible
from gradscope.stats.records import Floats, cosines_of, wide
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


@dataclass(frozen=True)
class Heat:
    """Classes (c,), parameters (p,), and numbers (c, p); NaN where there is none."""

    classes: list[int]
    parameters: list[str]
    norm: Floats  # mean ‖gᵢ‖ of the class in the parameter
    snr: Floats | None  # ‖G_c‖² / tr Σ_c of the class in the parameter; None without rows

    def document(self) -> dict[str, Any]:
        """Return it as plain JSON values."""

        def table(values: Floats) -> list[list[float | None]]:
            return [[float(v) if np.isfinite(v) else None for v in row] for row in values]

        return {
            "classes": self.classes,
            "parameters": [visible(name) for name in self.parameters],
            "norm": table(self.norm),
            "snr": None if self.snr is None else table(self.snr),
        }


def heat(data: Data) -> Heat | None:
    """Return the means of each class; None where targets are no classes."""
    samples, file = data.samples, data.file
    if samples.target is None or not samples.n:
        return None
    classes, of = np.unique(samples.target, return_inverse=True)
    member = np.zeros((len(classes), samples.n))
    member[of, np.arange(samples.n)] = 1.0
    share = member / member.sum(1, keepdims=True)
    names = list(file.norms)
    norms = {name: wide(file.norms[name])[samples.rows] for name in names}
    mean = np.stack([share @ norms[name] for name in names], 1)
    sums: dict[str, Floats] = {}
    if rows_unusable(file) is None:
        for name, places, values in data.rows():
            part = share[:, places] @ values
            sums[name] = sums[name] + part if name in sums else part
    if set(sums) != set(names):
        return Heat(classes.tolist(), names, mean, None)
    with np.errstate(all="ignore"):
        signal = np.stack([np.square(sums[name]).sum(1) for name in names], 1)
        square = np.stack([share @ np.square(norms[name]) for name in names], 1)
        noise = square - signal
        snr = np.where(noise > 0, signal / noise, np.nan)
    return Heat(classes.tolist(), names, mean, snr)
