"""Which samples dominate, and which are broken."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscope.stats.base import Floats, Mask, Record, Source, number, ratio, wide


class SampleRow(Record):
    """One sample.

    Attributes:
        index: Its position in the data set.
        loss: Its loss.
        norm: ‖gᵢ‖ over all parameters.
        target: Its target, when that is one number or text a sample.
        times_median: norm over the median norm; None where that is zero.
    """

    index: int
    loss: float | None
    norm: float
    target: bool | int | float | str | None
    times_median: float | None


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


def largest(file: Source, finite: Mask, top: int) -> tuple[SampleRow, ...]:
    """Return the `top` finite samples with the largest norms, largest first."""
    rows = np.flatnonzero(finite)
    norms = wide(file.samples["norm"])[rows]
    median = float(np.median(norms)) if rows.size else 0.0
    chosen = rows[_order(norms)[:top]]
    targets = file.samples.get("target")
    return tuple(
        SampleRow(
            index=int(file.samples["index"][i]),
            loss=number(file.samples["loss"][i]),
            norm=float(file.samples["norm"][i]),
            target=None if targets is None else _scalar(targets[i]),
            times_median=ratio(file.samples["norm"][i], median),
        )
        for i in chosen
    )


def points(file: Source, finite: Mask, limit: int) -> Points:
    """Return at most `limit` finite samples: half the largest norms, half evenly spread."""
    loss, norm = wide(file.samples["loss"]), wide(file.samples["norm"])
    rows = np.flatnonzero(finite & np.isfinite(loss))
    if rows.size > limit:
        order = _order(norm[rows])
        even = np.linspace(limit // 2, rows.size - 1, limit - limit // 2).astype(np.int64)
        kept = rows[np.concatenate([order[: limit // 2], order[even]])]
    else:
        kept = rows
    return Points(loss=tuple(loss[kept]), norm=tuple(norm[kept]), of=int(rows.size))


def _order(norms: Floats) -> NDArray[np.int64]:
    """Return positions by falling norm; equal ones keep their order."""
    return np.argsort(-norms, kind="stable")


def _scalar(value: Any) -> bool | int | float | str | None:
    """Return a target as a plain value; None when it is an array or not finite."""
    if np.ndim(value):
        return None
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bytes):
        return plain.decode("utf-8", "replace")
    if isinstance(plain, float):
        return number(plain)
    return plain if isinstance(plain, bool | int | str) else None
