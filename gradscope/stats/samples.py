"""Which samples dominate, and which are broken."""

from typing import Any

import numpy as np

from gradscope.stats.base import Floats, Record, number, ratio
from gradscope.stats.table import Positions, Table


class SampleRow(Record):
    """One sample.

    Attributes:
        index: Its position in the data set.
        id: Its own name; None where none is stored.
        loss: Its loss.
        norm: ‖gᵢ‖ over all parameters.
        target: Its target, when that is one number or text a sample.
        times_median: norm over the median norm; None where that is zero.
        cosine: With the mean gradient, or in a list of neighbours with theirs; None if unknown.
    """

    index: int
    id: int | str | None = None
    loss: float | None
    norm: float
    target: bool | int | float | str | None
    times_median: float | None
    cosine: float | None = None


class Points(Record):
    """Loss and norm of samples, for pictures; thinned evenly, the largest always among them.

    Attributes:
        loss: (k,).
        norm: (k,).
        of: How many samples they were taken from.
    """

    loss: tuple[float, ...]
    norm: tuple[float, ...]
    of: int


def largest(
    table: Table, values: Floats, top: int, cosines: Floats | None
) -> tuple[SampleRow, ...]:
    """Return the `top` samples with the largest `values` (n,), largest first."""
    order = _order(np.where(np.isnan(values), -np.inf, values))
    return sample_rows(table, order[:top], cosines)


def opposed(table: Table, dots: Floats, top: int, cosines: Floats | None) -> tuple[SampleRow, ...]:
    """Return the `top` samples with the most negative ⟨gᵢ, G⟩: a step along G costs them most."""
    order = _order(-dots)
    return sample_rows(table, order[dots[order] < 0][:top], cosines)


def sample_rows(table: Table, places: Positions, cosines: Floats | None) -> tuple[SampleRow, ...]:
    """Return a row for each of `places` in the table."""
    median = float(np.median(table.norm)) if table.n else 0.0
    return tuple(
        SampleRow(
            index=int(table.index[k]),
            id=table.name(int(k)),
            loss=number(table.loss[k]),
            norm=float(table.norm[k]),
            target=None if table.target is None else scalar(table.target[k]),
            times_median=ratio(table.norm[k], median),
            cosine=None if cosines is None else number(cosines[k]),
        )
        for k in places
    )


def points(table: Table, limit: int) -> Points:
    """Return at most `limit` samples: half the largest norms, half evenly spread."""
    rows = np.flatnonzero(np.isfinite(table.loss))
    if rows.size > limit:
        order = _order(table.norm[rows])
        even = np.linspace(limit // 2, rows.size - 1, limit - limit // 2).astype(np.int64)
        rows = rows[np.concatenate([order[: limit // 2], order[even]])]
    return Points(
        loss=tuple(map(float, table.loss[rows])),
        norm=tuple(map(float, table.norm[rows])),
        of=int(np.isfinite(table.loss).sum()),
    )


def _order(values: Floats) -> Positions:
    """Return places by falling value; equal ones keep their order."""
    return np.argsort(-values, kind="stable")


def scalar(value: Any) -> bool | int | float | str | None:
    """Return a target as a plain value; None when it is an array or not finite."""
    if np.ndim(value):
        return None
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bytes):
        return plain.decode("utf-8", "replace")
    if isinstance(plain, float):
        return number(plain)
    return plain if isinstance(plain, bool | int | str) else None
