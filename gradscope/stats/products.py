"""Products of gradients with each other and with their mean, from the chains of a file.

From stored rows, a chain `gram`, or a chain `cosine:to=mean`, in this order; projections serve the
neighbours of a sample and the spectrum, approximately.
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

_CLASSES = 100  # more distinct targets than these are not taken for classes
_PAIRED = 2000  # samples compared pairwise
_WORK = 4e10  # multiplications for it: m² P
_HELD = 2**25  # numbers of a parameter that are held for it: m p
_GROUP_BYTES = 2**28  # for the sums of all classes in one parameter
_COMPARED = 2**21  # numbers of an array whose rows are compared, in work at a time


@dataclass(frozen=True)
class Groups:
    """Which class each sample is of: the k classes, sorted, and positions in them (n,)."""

    targets: NDArray[Any]
    of: Positions


def groups(samples: Samples) -> Groups | None:
    """Return the classes if the targets are some: whole numbers or text, few, each more than once.

    At most 100 distinct ones, and on average at least two samples of each.
    """
    target = samples.target
    if target is None or target.ndim != 1 or target.dtype.kind not in "biuSUO" or not samples.n:
        return None
    found, of = np.unique(target, return_inverse=True)
    few = 2 <= len(found) <= min(_CLASSES, samples.n // 2)
    return Groups(found, of) if few else None


@dataclass(frozen=True)
class Products:
    """What a file's chains give; None where they do not."""

    source: str = ""  # where `dots` are from: rows, gram or cosine:to=mean
    dots: Floats | None = None  # ⟨gᵢ, G⟩ (n,)
    pairs: str = ""  # where `gram` and `probed` are from: rows, gram or a chain `project`
    gram: Floats | None = None  # ⟨gᵢ, gⱼ⟩ of some samples, evenly spread (m, m)
    among: Mask | None = None  # which samples these are (n,)
    whole: Floats | None = None  # ⟨gᵢ, gⱼ⟩ of all samples (n, n), from a chain `gram`
    probed: Floats | None = None  # ⟨gᵢ, g⟩ with the sample asked for (n,)
    group_squares: Floats | None = None  # ‖G_c‖² of each class's mean gradient (k,)
    squares: Floats = field(default_factory=lambda: np.empty(0))  # ‖gᵢ‖² (n,), from rows
    # a random projection of each gradient (n, SKETCH), from rows, to find duplicates
    sketch: Floats = field(default_factory=lambda: np.empty((0, SKETCH)))
    # what rows gave of each parameter; empty without them
    totals: dict[str, Totals] = field(default_factory=dict)
    # whether they are more exact than the recorded norms, as all but half precision is
    exact: bool = False
    unusable: str | None = None  # why stored rows gave nothing

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
    """Take products from the best that `file` has; without `limits` rows are left alone.

    `big` is ‖G‖², `members` are the samples' classes, `place` is that of the sample whose products
    with all others are wanted.
    """
    if not samples.n:
        return Products()
    arrays = rows_of(file)
    unusable = rows_unusable(file) if limits else None
    if limits and arrays is not None and unusable is None:
        found = _from_rows(file, arrays, samples, members, place, limits)
        if np.isfinite(found.squares).all():
            return found  # in half precision they may overflow where their norms do not
        unusable = (
            "stored rows are not finite where their norms are; use gradscope compute --dtype "
            "float32"
        )
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
    """Choose the samples to compare pairwise (n,): all, or as many as is affordable, evenly spread.

    At most 2,000, and so that m² P is at most 4·10¹⁰ for P entries, and m p at most 2²⁵ for the
    p entries of the largest parameter.
    """
    affordable = min(int(np.sqrt(_WORK / max(1, entries))), _HELD // max(1, widest))
    m = max(min(samples.n, _PAIRED, affordable), min(samples.n, 2))
    chosen: Mask = np.zeros(samples.n, dtype=bool)
    chosen[spread(samples.n, m)] = True
    return chosen


def distances(pairs: Iterable[tuple[Any, Any]], first: Positions, second: Positions) -> Floats:
    """Return ‖aᵢ − bᵢ‖ (m,) over all pairs of arrays (N, *shape), a few rows at a time.

    aᵢ and bᵢ are the rows `first` (m,) of one array and `second` (m,) of the other.
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
    """Walk through {name: (N, *shape)}, all rows of a parameter after those of another."""
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
