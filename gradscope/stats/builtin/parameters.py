"""Signal and noise of each parameter."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gradscope.core.texts import count
from gradscope.stats.builtin.batch import estimates, signal_to_noise
from gradscope.stats.products import Products
from gradscope.stats.records import Mask, Record, number, ratio, rounding, wide
from gradscope.stats.rows import Entries
from gradscope.stats.sections import (
    BarPicture,
    Column,
    Picture,
    Section,
    Table,
    count_column,
    numbers,
    percent,
    shape_text,
    short,
)
from gradscope.stats.source import Source, finite_samples, mean_gradient_norm
from gradscope.stats.summary import Data, Summary, statistic

_DRAWN = 40  # the most parameters in a picture, or in the output of a run


class ParameterRow(Record):
    """The gradients of one parameter over the finite samples."""

    name: str
    shape: tuple[int, ...]
    entries: int
    mean_norm: float | None
    max_norm: float | None
    share: float | None
    mean_gradient_norm: float | None
    signal_to_noise: float | None
    noise_scale: float | None = None
    entry_signal_to_noise: float | None = None
    opposing: float | None = None


def parameter_rows(
    file: Source,
    finite: Mask,
    products: Products | None = None,
    entries: Mapping[str, Entries] | None = None,
) -> tuple[ParameterRow, ...]:
    """Summarise every parameter over the samples `finite` (N,), in the file's order.

    `products` (from the file's rows) and `entries` (signal and noise) are used if given.
    """
    totals = {} if products is None else products.totals
    exact = products is not None and products.exact
    used: Any = slice(None) if finite.all() else finite  # a mask copies
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow becomes None
        total = float(np.square(wide(np.asarray(file.samples["norm"])[used])).sum())
        if exact:
            total = float(finite.sum()) * sum(one.mean_square for one in totals.values())
        rows = []
        for name, shape in file.parameters.items():
            known, norms = totals.get(name), wide(np.asarray(file.norms[name])[used])
            n, length = norms.size, mean_gradient_norm(file, name)
            small, big = float(np.square(norms).mean()) if n else math.nan, length**2
            if known is not None and exact:
                small, big = known.mean_square, known.mean_squared
            resolved = 1e-12 if exact else rounding(file.norms[name])
            row = ParameterRow(
                name=name,
                shape=tuple(int(d) for d in shape),
                entries=math.prod(int(d) for d in shape),
                mean_norm=number(norms.mean()) if n else None,
                max_norm=number(norms.max()) if n else None,
                share=ratio(n * small, total) if n else None,
                mean_gradient_norm=number(length),
                signal_to_noise=signal_to_noise(n, small, big, resolved),
                noise_scale=ratio(*estimates(n, small, big)) if n > 1 else None,
                entry_signal_to_noise=entries[name].mean_ratio if entries else None,
                opposing=None if known is None else known.opposing,
            )
            rows.append(row)
        return tuple(rows)


def parameter_table(rows: Sequence[ParameterRow]) -> Table:
    """Return a table with one row for each parameter."""
    columns = [
        Column("shape", [shape_text(r.shape) for r in rows], rank=2),
        count_column("entries", [r.entries for r in rows], rank=6),
        numbers("mean norm", [r.mean_norm for r in rows]),
        numbers("largest norm", [r.max_norm for r in rows], rank=1),
        numbers("norm of mean", [r.mean_gradient_norm for r in rows], rank=5),
        numbers("share", [r.share for r in rows], rank=3, show=percent),
        numbers("SNR", [r.signal_to_noise for r in rows]),
        numbers("noise scale", [r.noise_scale for r in rows], rank=4),
    ]
    if any(r.opposing is not None for r in rows):
        columns.append(numbers("opposed", [r.opposing for r in rows], rank=7, show=percent))
    return Table(columns, "parameter", [r.name for r in rows])


def largest_shares(rows: Sequence[ParameterRow]) -> list[ParameterRow]:
    """Return the 40 parameters with the largest share, in the model's order."""
    order = sorted(range(len(rows)), key=lambda k: -(rows[k].share or 0.0))
    return [rows[k] for k in sorted(order[:_DRAWN])]


def _sections(rows: Sequence[ParameterRow], summary: Summary) -> Iterator[Section]:
    n = summary.finite
    formulas = [
        "share = Σᵢ‖gᵢ,ₚ‖² / Σᵢ‖gᵢ‖²",
        "SNR = ‖Gₚ‖² / (mean‖gᵢ,ₚ‖² − ‖Gₚ‖²)",
        "noise scale: B_simple of the parameter alone",
    ]
    notes = [f"Noise alone gives an SNR of about 1/N = {short(1 / n)}."] if n > 1 else []
    if n > 1 and any(row.noise_scale is None for row in rows):
        notes.append("A parameter without a noise scale has no more signal than noise alone gives.")
    yield Section("Parameters", table=parameter_table(rows), notes=notes, formulas=formulas)


def _answer(rows: Sequence[ParameterRow], summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield how many parameters have a mean gradient larger than noise alone gives."""
    known = [row for row in rows if row.noise_scale is not None]
    text = f"{len(known)} of {count(len(rows), 'parameter')} above the noise"
    if known:
        text += f", most {min(known, key=lambda row: row.noise_scale or 0.0).name}"
    few = summary.finite < 2
    unknown = f"unknown: it needs at least two finite {summary.noun}s"
    yield "what learns", unknown if few else text


def _pictures(rows: Sequence[ParameterRow], summary: Summary) -> Iterator[Picture]:
    """Draw the parameters with the largest share, in the model's order."""
    some, n = largest_shares(rows), summary.finite
    which = f" ({len(some)} of {len(rows)}, largest share)" if len(some) < len(rows) else ""
    names = [row.name for row in some]
    yield BarPicture(
        label="Mean gradient norm of each parameter",
        title=f"Mean norm{which}",
        across="mean norm of the gradients",
        names=names,
        values=[row.mean_norm for row in some],
        place=30,
    )
    yield BarPicture(
        label="Signal to noise of each parameter",
        title=f"Signal to noise{which}",
        across="signal to noise" + (f" (dashed: noise alone, 1/{n:,})" if n > 1 else ""),
        names=names,
        values=[row.signal_to_noise for row in some],
        mark=1 / n if n > 1 else None,
        second=True,
        place=40,
    )


@statistic("parameters", place=50, sections=_sections, answers=_answer, pictures=_pictures)
def parameters(data: Data) -> tuple[ParameterRow, ...]:
    """Summarise every parameter."""
    return parameter_rows(data.file, finite_samples(data.file), data.products, data.entries)
