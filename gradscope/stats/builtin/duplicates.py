"""Duplicates: pairs of samples with equal or nearly equal gradients."""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from gradscope.core.texts import count
from gradscope.stats.products import distances
from gradscope.stats.records import Floats, Positions, Record, spread, wide
from gradscope.stats.sections import Column, Line, Section, Styled, Table, index_and_name, numbers
from gradscope.stats.source import Arrays, Samples, rows_of
from gradscope.stats.summary import Data, Summary, statistic

_SAME = 1e-4  # the largest relative distance that may be rounding
_NEAR = 0.02  # the largest relative distance of nearly equal gradients
_MOST = 200  # the most pairs whose rows are compared
_COMPARED = 5e7  # the most pairs of neighbours in the order of one number
_CANDIDATES = 2**22  # the most pairs of samples in the same cell
_CELL = 100  # the width of a cell, in distances of equal samples
_BORDER = 1 / 48  # the share of a cell that its neighbours also have: above two distances
_DIVIDED = 6  # the most parameters that divide cells: each copies the samples at borders
_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)  # odd, to number cells
_SHOWN = 10


class Pair(Record):
    """Two samples."""

    first: int
    second: int
    first_id: int | str | None = None
    second_id: int | str | None = None
    distance: float | None
    same_target: bool | None


class Duplicates(Record):
    """Pairs of samples with equal or nearly equal gradients; zero gradients are left out."""

    source: str
    same: tuple[Pair, ...]
    near: tuple[Pair, ...]
    complete: bool


def _sections(found: Duplicates, summary: Summary) -> Iterator[Section]:
    if not (found.same or found.near):
        return
    pairs = (*found.same, *found.near)
    shown, equal = pairs[:_SHOWN], len(found.same)
    columns = [
        Column(which, [index_and_name(*_end(pair, which)) for pair in shown], justify="left")
        for which in ("first", "second")
    ]
    if found.source == "norms":
        counted = f"{count(equal, 'pair')} with equal norms and losses"
    else:
        columns.append(numbers("distance", [pair.distance for pair in shown]))
        counted = f"{count(equal, 'pair')} with equal gradients, {len(found.near):,} nearly equal"
    if any(pair.same_target is False for pair in shown):
        words = [
            Styled("different", "bold yellow") if pair.same_target is False else ""
            for pair in shown
        ]
        columns.append(Column("targets", words, justify="left"))
    notes: list[Line] = [counted]
    if len(pairs) > len(shown):
        notes.append(f"{count(len(pairs) - len(shown), 'pair')} not shown; --json lists all.")
    if not found.complete:
        notes.append("There may be more: not all pairs were compared.")
    formulas = ["distance = ‖gᵢ − gⱼ‖ / max(‖gᵢ‖, ‖gⱼ‖)"]
    yield Section("Duplicates", table=Table(columns), notes=notes, formulas=formulas)


def _end(pair: Pair, which: str) -> tuple[int, int | str | None]:
    return getattr(pair, which), getattr(pair, f"{which}_id")


def _answer(found: Duplicates, summary: Summary) -> Iterator[tuple[str, str]]:
    pairs = f"{count(len(found.same), 'pair')} of duplicates"
    none = "no duplicates" + ("" if found.complete else " among the pairs that were compared")
    yield "problems", pairs if found.same else none
    other = sum(pair.same_target is False for pair in found.same)
    if other:
        yield "problems", f"{other} of them with different targets"


@statistic("duplicates", place=110, sections=_sections, answers=_answer)
def duplicates(data: Data) -> Duplicates | None:
    """Find pairs by their rows, by all inner products, or by equal norms and losses."""
    rows, samples = rows_of(data.file), data.samples
    if samples.n < 2:
        return None
    if data.products.totals and rows is not None:
        return _by_rows(rows, samples, data.products.sketch)
    if data.products.whole is not None:
        return _by_gram(data.products.whole, samples)
    return _by_norms(data)


def _by_rows(rows: Arrays, samples: Samples, sketch: Floats) -> Duplicates:
    """Find candidates by their sketches (n, k), and compare their rows."""
    pairs, complete = _close(sketch, samples.norm, 2 * _NEAR)  # χ² with 16 degrees: 4 × its mean
    kept, complete = pairs[:_MOST], complete and len(pairs) <= _MOST
    apart = distances(((a, a) for a in rows.values()), *samples.rows[kept].T)
    lengths = samples.norm[kept].max(1, initial=0.0)
    return _result("rows", samples, kept, apart / lengths, complete)


def _by_gram(gram: Floats, samples: Samples) -> Duplicates:
    """Compute the distances from all inner products (n, n)."""
    squares = np.diag(gram)
    distances = np.sqrt(np.clip(squares[:, None] + squares - 2 * gram, 0, None))
    larger = np.sqrt(np.maximum(squares[:, None], squares))
    first, second = np.nonzero(np.triu((distances <= _NEAR * larger) & (larger > 0), 1))
    found = distances[first, second] / larger[first, second]
    return _result("gram", samples, np.stack([first, second], 1), found, True)


def _by_norms(data: Data) -> Duplicates:
    """Find samples with equal losses and equal norms in every parameter."""
    samples, norms, limit = data.samples, data.file.norms, _SAME / 10
    sizes = np.maximum(samples.norm, np.abs(samples.loss))

    def columns(names: Iterable[str]) -> Iterator[Floats]:
        yield samples.loss
        for name in names:
            yield wide(np.asarray(norms[name])[samples.rows])

    places, names = np.flatnonzero(samples.norm > 0), [*data.file.parameters]
    some = columns(names[k] for k in spread(len(names), _DIVIDED))
    pairs, complete = _in_cells(some, sizes, places, limit)
    first, second = pairs.T
    reach = limit * sizes[pairs].max(1, initial=0.0)
    every = chain([samples.norm], columns(names))
    squares = sum(np.square((values[first] - values[second]) / reach) for values in every)
    near = np.flatnonzero(squares <= 1)
    near = near[np.argsort(np.asarray(squares)[near], kind="stable")]
    kept, complete = pairs[near[:_MOST]], complete and len(near) <= _MOST
    return _result("norms", samples, kept, np.zeros(len(kept)), complete)


def _in_cells(
    columns: Iterable[Floats], sizes: Floats, places: Positions, limit: float
) -> tuple[Positions, bool]:
    """Return pairs (k, 2) of `places` (m,) that may be nearer than limit · their larger size.

    No column (n,) exceeds the sizes (n,), and near samples have near sizes. A sample is in one cell
    of a grid, and also in neighbouring cells if it is close to their border. So near samples share
    a cell. Each column divides the cells further, and samples alone in their cells are left out.
    The second result is True if no pair can have been missed.
    """
    cells = np.zeros(len(places), np.uint64)
    for k, values in enumerate(chain([np.log(sizes)], columns)):
        at = (values[places] if k == 0 else values[places] / sizes[places]) / (_CELL * limit)
        at += 0.5  # common numbers, such as zeros, are not at a border
        cell = np.floor(at)
        at -= cell
        low, high = at < _BORDER, at > 1 - _BORDER
        number = np.concatenate([cell, cell[low] - 1, cell[high] + 1]).astype(np.int64)
        cells, places = (np.concatenate([v, v[low], v[high]]) for v in (cells, places))
        cells = (cells + number.view(np.uint64)) * _MIX[0]
        cells = (cells ^ cells >> np.uint64(32)) * _MIX[1]
        del at, cell, low, high, number
        if k and len(cells):  # sizes alone leave few samples out
            order = np.argsort(cells)
            cells, places = cells[order], places[order]
            same = np.r_[False, cells[1:] == cells[:-1], False]
            several = same[1:] | same[:-1]
            cells, places = cells[several], places[several]
    found, first, complete = [np.empty(0, np.int64)], np.arange(len(places)), True
    for offset in range(1, len(places)):
        first = first[: np.searchsorted(first, len(places) - offset)]
        first = first[cells[first] == cells[first + offset]]
        left = _CANDIDATES - sum(map(len, found))
        complete = complete and len(first) <= left
        if not len(first) or not left:
            break
        one, other = places[first[:left]], places[first[:left] + offset]
        found.append(np.minimum(one, other) * len(sizes) + np.maximum(one, other))
    numbers = np.sort(np.concatenate(found))  # np.unique hashes, which is slow here
    numbers = numbers[np.r_[True, numbers[1:] != numbers[:-1]][: len(numbers)]]
    pairs = np.stack(np.divmod(numbers, len(sizes)), 1)
    return pairs[pairs[:, 0] != pairs[:, 1]], complete


def _close(points: Floats, sizes: Floats, limit: float) -> tuple[Positions, bool]:
    """Return pairs (k, 2) of points (n, d) nearer than limit · their larger size, closest first.

    Points are sorted by one coordinate, and nearest neighbours are compared first. The second
    result is True if no pair can have been missed.
    """
    places = np.flatnonzero(sizes > 0)
    along = points[places, np.argmax(points[places].std(0), axis=0)] if len(places) else np.empty(0)
    places = places[np.argsort(along, kind="stable")]
    axis = np.sort(along, kind="stable")
    found = [(np.empty((0, 2), np.int64), np.empty(0))]
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
    pairs, distances = (np.concatenate(part) for part in zip(*found, strict=True))
    return pairs[np.argsort(distances, kind="stable")], complete


def _result(
    source: str, samples: Samples, pairs: Positions, distances: Floats, complete: bool
) -> Duplicates:
    """Sort pairs (k, 2) by distance (k,) into equal and near; norms give no distance."""
    same: list[Pair] = []
    near: list[Pair] = []
    for k in np.argsort(distances, kind="stable"):
        ends = sorted(map(int, pairs[k]), key=lambda end: int(samples.index[end]))
        first, second = map(samples.described, ends)
        targets = None if samples.target is None else samples.target[ends]
        pair = Pair(
            first=first["index"],
            second=second["index"],
            first_id=first["id"],
            second_id=second["id"],
            distance=None if source == "norms" else float(distances[k]),
            same_target=None if targets is None else bool(np.all(targets[0] == targets[1])),
        )
        if distances[k] <= _NEAR:
            (same if distances[k] <= _SAME else near).append(pair)
    return Duplicates(source=source, same=tuple(same), near=tuple(near), complete=complete)
