"""Duplicates: pairs of samples with equal or nearly equal gradients."""

from collections.abc import Iterator

import numpy as np

from gradscope.core.texts import count
from gradscope.stats.products import distances
from gradscope.stats.records import Floats, Positions, Record
from gradscope.stats.sections import Column, Line, Section, Styled, Table, index_and_name, numbers
from gradscope.stats.source import Arrays, Samples, rows_of
from gradscope.stats.summary import Data, Summary, statistic

_SAME = 1e-4  # the largest relative distance that may be rounding
_NEAR = 0.02  # the largest relative distance of nearly equal gradients
_MOST = 200  # the most pairs whose rows are compared
_COMPARED = 5e7  # the most pairs of neighbours in the order of one number
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
    yield "problems", pairs if found.same else "no duplicates"
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
    samples, norms = data.samples, data.file.norms
    columns = [np.asarray(norms[name], np.float64)[samples.rows] for name in data.file.parameters]
    own = np.stack([*columns, samples.loss], 1)
    sizes = np.maximum(samples.norm, np.abs(samples.loss))
    pairs, complete = _close(own, sizes, _SAME / 10)
    pairs = pairs[samples.norm[pairs].min(1, initial=np.inf) > 0][:_MOST]
    return _result("norms", samples, pairs, np.zeros(len(pairs)), complete)


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
