"""Products of gradients with each other and with their mean, from the chains of a file.

The first that the file has is used: stored rows, a chain `gram`, a chain `cosine:to=mean`.
Projections give the neighbours of a sample and the spectrum, approximately.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.process.memory import slices
from gradscope.stats.records import Floats, Mask, Positions, spread, wide
from gradscope.stats.rows import SKETCH, Limits, RowSums, Totals
from gradscope.stats.source import (
    Arrays,
    Samples,
    Source,
    chain_of,
    gram_of,
    in_half,
    mean_of,
    projections_of,
    rows_of,
    rows_unusable,
)

_CLASSES = 100  # targets with more distinct values are not classes
_PAIRED = 2000  # the most samples compared pairwise
_WORK = 4e10  # the most multiplications for pairs, m² P
_HELD = 2**25  # the most numbers of one parameter in memory for pairs, m p
_GROUP_BYTES = 2**28  # the most bytes for the sums of all classes in one parameter
_COMPARED = 2**21  # numbers of rows compared at a time


@dataclass(frozen=True)
class Groups:
    """The classes of the samples."""

    targets: NDArray[Any]  # the k classes, sorted
    of: Positions  # the class of each sample, as a position in `targets` (n,)


def groups(samples: Samples) -> Groups | None:
    """Return the classes, or None if the targets are not classes.

    Classes are whole numbers or texts: 2 to 100 values, with two samples each on average.
    """
    target = samples.target
    if target is None or target.ndim != 1 or target.dtype.kind not in "biuSUO" or not samples.n:
        return None
    found, of = np.unique(target, return_inverse=True)
    few = 2 <= len(found) <= min(_CLASSES, samples.n // 2)
    return Groups(found, of) if few else None


@dataclass(frozen=True)
class Products:
    """Products of gradients, each None if the file's chains do not give it."""

    source: str = ""  # the source of `dots`: rows, gram or cosine:to=mean
    dots: Floats | None = None  # ⟨gᵢ, G⟩ (n,)
    pairs: str = ""  # the source of `gram` and `probed`: rows, gram or a chain `project`
    gram: Floats | None = None  # ⟨gᵢ, gⱼ⟩ of some samples, evenly spread (m, m)
    among: Mask | None = None  # which samples `gram` has (n,)
    whole: Floats | None = None  # ⟨gᵢ, gⱼ⟩ of all samples (n, n), from a chain `gram`
    probed: Floats | None = None  # ⟨gᵢ, g⟩ with the sample of `--nearest` (n,)
    group_squares: Floats | None = None  # ‖G_c‖² of each class's mean gradient (k,)
    squares: Floats = field(default_factory=lambda: np.empty(0))  # ‖gᵢ‖² (n,), from rows
    # a random projection of each gradient (n, SKETCH), from rows, to find duplicates
    sketch: Floats = field(default_factory=lambda: np.empty((0, SKETCH)))
    # totals of each parameter from rows; empty without rows
    totals: dict[str, Totals] = field(default_factory=dict)
    # whether rows are more exact than the recorded norms: unless they are in half precision
    exact: bool = False
    unusable: str | None = None  # why stored rows cannot be used

    @property
    def mean_squared(self) -> float:
        """‖G‖² over all parameters, from rows."""
        return sum(one.mean_squared for one in self.totals.values())


def products(
    file: Source,
    samples: Samples,
    big: float | None,
    members: Groups | None,
    place: int | None,
    limits: Limits | None,
) -> Products:
    """Return products from the best source in `file`; without `limits` rows are not read.

    `big` is ‖G‖². `members` are the samples' classes. `place` selects the sample of `probed`.
    """
    if not samples.n:
        return Products()
    arrays = rows_of(file)
    unusable = rows_unusable(file) if limits else None
    if limits and arrays is not None and unusable is None:
        found = _from_rows(file, arrays, samples, members, place, limits)
        if np.isfinite(found.squares).all():
            return found  # rows in half precision may overflow although their norms are finite
        unusable = "stored rows overflowed in half precision; use gradscope compute --dtype float32"
    gram = gram_of(file, samples.n)
    if gram is not None:
        squares, among = None, picked(samples, 1)
        if members is not None:
            one = (members.of == np.arange(len(members.targets))[:, None]) * 1.0  # (k, n)
            squares = np.einsum("kn,kn->k", one @ gram, one) / np.square(one.sum(1))
        return Products(
            source="gram",
            dots=gram.mean(1),
            pairs="gram",
            gram=gram[np.ix_(among, among)],
            among=among,
            whole=gram,
            probed=None if place is None else gram[place],
            group_squares=squares,
            unusable=unusable,
        )
    found = Products(unusable=unusable)
    cosines = chain_of(file, "cosine:to=mean")
    if cosines is not None and big is not None:
        dots = wide(cosines["cosine"][...])[samples.rows] * samples.norm * np.sqrt(big)
        found = replace(found, source="cosine:to=mean", dots=dots)
    projected = projections_of(file)
    if projected is None:
        return found
    values = projected[1][samples.rows]
    among = picked(samples, values.shape[1])
    probed = None if place is None else values @ values[place]
    gram = values[among] @ values[among].T
    return replace(found, pairs=projected[0], gram=gram, among=among, probed=probed)


def picked(samples: Samples, entries: int, widest: int = 1) -> Mask:
    """Return which samples to compare pairwise (n,): all, or m evenly spread ones.

    m is at most 2,000. With P entries in all and p in the largest parameter, m² P is at most
    4·10¹⁰ and m p at most 2²⁵.
    """
    affordable = min(int(np.sqrt(_WORK / max(1, entries))), _HELD // max(1, widest))
    m = max(min(samples.n, _PAIRED, affordable), min(samples.n, 2))
    chosen: Mask = np.zeros(samples.n, dtype=bool)
    chosen[spread(samples.n, m)] = True
    return chosen


def distances(pairs: Iterable[tuple[Any, Any]], first: Positions, second: Positions) -> Floats:
    """Return ‖aᵢ − bᵢ‖ (m,) over all pairs of arrays (N, *shape), a few rows at a time.

    aᵢ is row first[i] of the first array of a pair, bᵢ is row second[i] of the second array.
    """
    squares = np.zeros(len(first))
    for pair in pairs:
        for part in slices(len(squares), prod(pair[0].shape[1:]), _COMPARED):
            a, b = (
                np.asarray(array[rows[part]], np.result_type(array.dtype, np.float64))
                for array, rows in zip(pair, (first, second), strict=True)
            )
            squares[part] += np.square(np.abs(b - a)).reshape(len(a), -1).sum(1)
    return wide(np.sqrt(squares))


def _from_rows(
    file: Source,
    arrays: Arrays,
    samples: Samples,
    members: Groups | None,
    place: int | None,
    limits: Limits,
) -> Products:
    """Return the products from rows {name: (N, *shape)}, read parameter by parameter."""
    sizes = [prod(shape) for shape in file.parameters.values()]
    width = max(sizes, default=0)
    if members is not None and len(members.targets) * width * 8 > _GROUP_BYTES:
        members = None
    among, mean = picked(samples, sum(sizes), width), mean_of(file) or {}
    classes = None if members is None else members.of
    sums = RowSums(samples.rows, among, classes, place, limits)
    return Products(
        source="rows",
        pairs="rows",
        among=among,
        totals={name: sums.add(name, array, mean.get(name)) for name, array in arrays.items()},
        dots=sums.dots.numpy(),
        gram=sums.gram.numpy(),
        probed=None if place is None else sums.probed.numpy(),
        group_squares=None if members is None else sums.group_squares.numpy(),
        squares=sums.squares.numpy(),
        sketch=sums.sketch.numpy(),
        exact=not in_half(file),
    )
