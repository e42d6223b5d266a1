"""Samples whose gradients are alike: neighbours of one sample, and duplicates."""

from collections.abc import Iterator

import numpy as np

from gradscope.stats.base import Floats, Record, Source
from gradscope.stats.samples import SampleRow, sample_rows
from gradscope.stats.stored import Arrays
from gradscope.stats.table import Positions, Table

SAME = 1e-4  # relative distance of what differs by rounding alone
NEAR = 0.02
_MOST = 200  # pairs that are held against their rows
_COMPARED = 5e7  # pairs of neighbours in the order of one number


class Nearest(Record):
    """The samples most and least aligned with one.

    Attributes:
        index: The one.
        source: What the products were taken from.
        exact: Not so from projections.
        aligned: Largest cosines first.
        opposed: Smallest cosines first.
    """

    index: int
    source: str
    exact: bool
    aligned: tuple[SampleRow, ...]
    opposed: tuple[SampleRow, ...]


def nearest(table: Table, source: str, exact: bool, place: int, dots: Floats, top: int) -> Nearest:
    """Rank all other samples by their cosine with the one at `place`.

    Args:
        table: The samples.
        source: What `dots` was taken from.
        exact: Whether it is exact.
        place: Of the one, in the table.
        dots: Its products with all (n,), its own squared norm among them.
        top: How many to list at either end.
    """
    squares = np.square(table.norm)
    lengths = np.sqrt(squares * squares[place])
    known = lengths > 0
    found = np.full(table.n, np.nan)
    found[known] = np.clip(dots[known] / lengths[known], -1.0, 1.0)
    found[place] = np.nan
    order = np.argsort(-found, kind="stable")
    order = order[np.isfinite(found[order])]
    return Nearest(
        index=int(table.index[place]),
        source=source,
        exact=exact,
        aligned=sample_rows(table, order[:top], found),
        opposed=sample_rows(table, order[::-1][:top], found),
    )


class Pair(Record):
    """Two samples.

    Attributes:
        first: The position in the data set of one.
        second: Of the other.
        first_id: The own name of one; None where none is stored. Likewise second_id.
        distance: ‖gᵢ − gⱼ‖ / max(‖gᵢ‖, ‖gⱼ‖); None where only norms are known.
        same_target: Whether their targets are equal; None where none are stored.
    """

    first: int
    second: int
    first_id: int | str | None = None
    second_id: int | str | None = None
    distance: float | None
    same_target: bool | None


class Duplicates(Record):
    """Pairs of samples whose gradients are equal or nearly so; zero gradients are left out.

    Attributes:
        source: "rows", "gram", or "norms": then equal norms in every parameter and equal losses,
            which duplicates have and others may have too.
        same: Distance at most 10⁻⁴, closest first; or the pairs found by norms.
        near: Distance at most 0.02.
        complete: Whether all pairs were looked at; at most 200 are held against their rows.
    """

    source: str
    same: tuple[Pair, ...]
    near: tuple[Pair, ...]
    complete: bool


def by_rows(rows: Arrays, table: Table, sketch: Floats) -> Duplicates:
    """Find candidates by their sketches (n, k), and hold them against their rows."""
    pairs, complete = _close(sketch, table.norm, 2 * NEAR)  # χ² with 16 degrees: 4 × its mean
    kept = pairs[:_MOST]
    distances = np.sqrt(_squared_distances(rows, table, kept)) if len(kept) else np.empty(0)
    lengths = table.norm[kept].max(1, initial=0.0) if len(kept) else np.empty(0)
    return _result("rows", table, kept, distances / lengths, complete and len(pairs) <= _MOST)


def by_gram(gram: Floats, table: Table) -> Duplicates:
    """Take the distances from all inner products (n, n)."""
    squares = np.diag(gram)
    distances = np.sqrt(np.clip(squares[:, None] + squares - 2 * gram, 0, None))
    larger = np.sqrt(np.maximum(squares[:, None], squares))
    first, second = np.nonzero(np.triu((distances <= NEAR * larger) & (larger > 0), 1))
    found = distances[first, second] / larger[first, second]
    return _result("gram", table, np.stack([first, second], 1), found, True)


def by_norms(file: Source, table: Table) -> Duplicates:
    """Find equal norms in every parameter, and equal losses, when nothing else is stored."""
    columns = [np.asarray(file.norms[name], np.float64)[table.rows] for name in file.parameters]
    own = np.stack([*columns, table.loss], 1)
    pairs, complete = _close(own, np.maximum(table.norm, np.abs(table.loss)), SAME / 10)
    pairs = pairs[table.norm[pairs].min(1, initial=np.inf) > 0] if len(pairs) else pairs
    result = _result("norms", table, pairs[:_MOST], np.zeros(len(pairs[:_MOST])), complete)
    unknown = tuple(pair.model_copy(update={"distance": None}) for pair in result.same)
    return result.model_copy(update={"same": unknown})


def _close(points: Floats, sizes: Floats, limit: float) -> tuple[Positions, bool]:
    """Return pairs (k, 2) of points (n, d) nearer than limit · their larger size, closest first.

    Neighbours in the order of one coordinate are compared, the nearest of them first.

    Returns:
        The pairs, and whether none can have been missed.
    """
    places = np.flatnonzero(sizes > 0)
    along = points[places, np.argmax(points[places].std(0), axis=0)] if len(places) else np.empty(0)
    places = places[np.argsort(along, kind="stable")]
    axis = np.sort(along, kind="stable")
    found: list[tuple[Positions, Floats]] = []
    complete = True
    for offset in range(1, len(places)):
        a, b = places[:-offset], places[offset:]
        reach = limit * np.maximum(sizes[a], sizes[b])
        inside = axis[offset:] - axis[:-offset] <= reach
        if not inside.any():
            break
        if offset * len(places) > _COMPARED:
            complete = False
            break
        a, b, reach = a[inside], b[inside], reach[inside]
        distance = np.linalg.norm(points[a] - points[b], axis=1) / reach
        near = distance <= 1
        found.append((np.stack([a[near], b[near]], 1), distance[near]))
    if not found:
        return np.empty((0, 2), np.int64), complete
    pairs, distances = (np.concatenate(part) for part in zip(*found, strict=True))
    return pairs[np.argsort(distances, kind="stable")], complete


def _squared_distances(rows: Arrays, table: Table, pairs: Positions) -> Floats:
    """Return ‖gᵢ − gⱼ‖² (k,), a parameter and a few pairs at a time."""
    found = np.zeros(len(pairs))
    for array in rows.values():
        for part in _few(len(pairs), array):
            wanted = table.rows[pairs[part]]
            each = np.asarray(array[wanted.ravel()], dtype=np.result_type(array.dtype, np.float64))
            both = each.reshape(len(wanted), 2, -1)
            found[part] += np.square(np.abs(both[:, 0] - both[:, 1])).sum(1)
    return found


def _few(n: int, array: object) -> Iterator[slice]:
    width = max(1, int(np.prod(array.shape[1:])))  # type: ignore[attr-defined]
    step = max(1, 2**21 // width)
    for start in range(0, n, step):
        yield slice(start, start + step)


def _result(
    source: str, table: Table, pairs: Positions, distances: Floats, complete: bool
) -> Duplicates:
    order = np.argsort(distances, kind="stable")
    every = [_pair(table, pairs[k], float(distances[k])) for k in order]
    return Duplicates(
        source=source,
        same=tuple(p for p in every if p.distance is not None and p.distance <= SAME),
        near=tuple(p for p in every if p.distance is not None and SAME < p.distance <= NEAR),
        complete=complete,
    )


def _pair(table: Table, places: Positions, distance: float) -> Pair:
    first, second = sorted((int(k) for k in places), key=lambda k: int(table.index[k]))
    same = (
        None if table.target is None else bool(np.all(table.target[first] == table.target[second]))
    )
    return Pair(
        first=int(table.index[first]),
        second=int(table.index[second]),
        first_id=table.name(first),
        second_id=table.name(second),
        distance=distance,
        same_target=same,
    )
