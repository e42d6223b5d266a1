"""Counts of entries that are not finite, and histograms of a parameter's entries over all samples.

With a given range, the bins of a histogram have equal width in the scale's coordinate between low
and high. Without a range, the bins are cells [k·2ᵉ, (k+1)·2ᵉ) of the coordinate. e is the smallest
exponent for which the values fit into the requested number of cells. As more values arrive, pairs
of cells are merged. The merge is exact, so the result depends on the values only, not on their
order or batches.
"""

from collections.abc import Callable
from functools import reduce
from math import floor, frexp, inf, isfinite, ldexp, log, log2
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradscope.blocks import Block
from gradscope.blocks.base import as_rows
from gradscope.core.precision import double, doubled
from gradscope.stages.reducers.base import (
    ParameterState,
    Reducer,
    for_each_parameter,
    reducers,
    tiles,
)

_MOST = 2**24  # the largest number of bins
_DIGITS = 40  # the width of cells is at least 2^-40 of the largest coordinate


class BinScale(NamedTuple):
    """A coordinate in which bins have equal width."""

    forward: Callable[[Tensor], Tensor]  # values to coordinates; -inf for a value without one
    back: Callable[[Tensor], Tensor]  # coordinates to values
    finest: int  # the smallest exponent e for which the edges of cells are distinct numbers


@reducers.register("nonfinite")
def nonfinite() -> Reducer:
    """Numbers of entries and of samples that are infinite or NaN, for each parameter.

    NAME.entries () counts such entries over all samples. NAME.samples () counts the samples with at
    least one such entry. Samples with a raw gradient that is not finite reach a reducer only with
    nonfinite = "keep". Without it, the counted values come from the transforms.
    """

    def start(block: Block) -> ParameterState:
        bad = torch.cat([(~as_rows(tile).isfinite()).sum(1) for _, tile in block.tiles()])
        return {"entries": bad.sum(), "samples": (bad > 0).sum()}

    return for_each_parameter(start, None, lambda part, _: {k: doubled(v) for k, v in part.items()})


@reducers.register("histogram")
def histogram(
    bins: int = 50,
    scale: Literal["linear", "log", "symlog"] = "linear",
    low: float | None = None,
    high: float | None = None,
    linear: float = 1e-8,
) -> Reducer:
    """Counts of the entries of a parameter, all samples pooled, in bins between edges.

    NAME (bins,) are the counts. NAME.edges (bins + 1,) are the edges, in the values' units.
    NAME.outside (3,) counts values below the range, above the range, and NaN. The sum of all counts
    is N times the number of entries. A bin includes its left edge. With a given range, the last bin
    also includes its right edge.

    Scales are `linear`; `log` for positive numbers (zero and negative numbers count as below: put
    `abs` before it); and `symlog` for both signs, x ↦ sign(x) log₂(1 + |x|/linear) (Webber 2013),
    linear below `linear`. `low` and `high` are the ends of the range. Without them, the range
    follows from the values, with bins whose width is a power of two in the scale's coordinate.
    """
    if not 0 < linear < inf:
        raise ValueError(f"linear must be positive, not {linear}")
    scales = {"linear": _LINEAR, "log": _LOG, "symlog": _symlog(linear)}
    if not 2 <= bins <= _MOST:
        raise ValueError(f"bins must be from 2 to {_MOST:,}, not {bins:,}")
    if low is None and high is None:
        return _found(scales[scale], bins)
    if low is None or high is None:
        raise ValueError("give both low and high, or neither")
    if not (isfinite(low) and isfinite(high) and low < high and (low > 0 or scale != "log")):
        positive = "positive and " if scale == "log" else ""
        raise ValueError(f"low must be {positive}below high, not {low} and {high}")
    start, end = scales[scale].forward(torch.tensor([low, high], dtype=torch.float64)).tolist()
    edges = scales[scale].back(torch.linspace(start, end, bins + 1, dtype=torch.float64))
    edges[0], edges[-1] = low, high
    return _given(edges)


def _given(edges: Tensor) -> Reducer:
    """Count between fixed edges (bins + 1,)."""
    bins = len(edges) - 1

    def counted(values: Tensor) -> ParameterState:
        here = edges.to(double(values.device)).to(values.device)
        outside = torch.stack([values < here[0], values > here[-1], values.isnan()])
        inside = values[(values >= here[0]) & (values <= here[-1])]
        place = (torch.searchsorted(here, inside, right=True) - 1).clamp_max(bins - 1)
        unused = values.new_tensor([inf, -inf])
        return {
            "inside": place.bincount(minlength=bins),
            "outside": outside.sum(1),
            "reach": unused,
        }

    def merged(a: ParameterState, b: ParameterState, *_: Tensor) -> ParameterState:
        return a | {kind: a[kind] + b[kind] for kind in ("inside", "outside")}

    return _reducer(counted, merged, lambda reach: edges)


def _found(scale: BinScale, bins: int) -> Reducer:
    """Count in cells whose width follows the values."""

    def grid(reach: Tensor) -> tuple[int, int]:
        return _grid(reach, bins, scale.finest)

    def counted(values: Tensor) -> ParameterState:
        where = scale.forward(values)
        outside = torch.stack([where == -inf, where == inf, where.isnan()])
        inside = where[where.isfinite()]
        ends = torch.aminmax(inside) if len(inside) else inside.new_tensor([inf, -inf])
        reach = torch.stack([*ends])
        exponent, first = grid(reach)
        cells = (inside * ldexp(1.0, -exponent)).floor()
        # a negative number that underflows here still belongs to the cell below zero
        place = torch.where((inside < 0) & (cells == 0), -1, cells).long() - first
        return {"inside": place.bincount(minlength=bins), "outside": outside.sum(1), "reach": reach}

    def merged(a: ParameterState, b: ParameterState, *_: Tensor) -> ParameterState:
        low, high = torch.stack([a["reach"], b["reach"]]).T
        reach = torch.stack([low.min(), high.max()])
        exponent, first = grid(reach)
        inside = torch.zeros_like(a["inside"])
        for part in (a, b):
            finer, start = grid(part["reach"])
            held = part["inside"].nonzero().flatten()
            cells = (held + start) >> min(exponent - finer, 62)
            inside = inside.index_add(0, cells - first, part["inside"][held])
        return {"inside": inside, "outside": a["outside"] + b["outside"], "reach": reach}

    def edges(reach: Tensor) -> Tensor:
        exponent, first = grid(reach)
        cells = torch.arange(first, first + bins + 1, dtype=torch.float64)
        return scale.back(cells * ldexp(1.0, exponent))

    return _reducer(counted, merged, edges)


def _reducer(
    counted: Callable[[Tensor], ParameterState],
    merged: Callable[..., ParameterState],
    edges: Callable[..., Tensor],
) -> Reducer:
    """Return the reducer with the state `inside` (bins,) and `outside` (3,), both int64.

    `outside` counts values below, above and NaN. `reach` (2,) is the smallest and largest
    coordinate inside, or (inf, -inf) if no value is inside.
    """

    def start(block: Block) -> ParameterState:
        return reduce(merged, (counted(tile.flatten()) for tile in tiles(block)))

    def result(part: ParameterState, _: Tensor) -> dict[str, Tensor]:
        inside, outside = doubled(part["inside"]), doubled(part["outside"])
        own = edges(part["reach"]).to(inside)
        return {"": inside, "edges": own, "outside": outside}

    return for_each_parameter(start, merged, result, ordered_for="histogram")


def _grid(reach: Tensor, bins: int, finest: int) -> tuple[int, int]:
    """Return the exponent e of the cells' width 2ᵉ and the number of the first cell."""
    low, high = (float(x) for x in reach)
    if low > high or low == 0 == high:
        return finest, 0
    exponent = max(finest, frexp(max(abs(low), abs(high)))[1] - _DIGITS)
    width = high / bins - low / bins  # the range itself may overflow
    if width > 0:
        exponent = max(exponent, floor(log2(width)))
    while _cell(high, exponent) - _cell(low, exponent) >= bins:
        exponent += 1
    return exponent, _cell(low, exponent)


def _cell(x: float, exponent: int) -> int:
    """Return ⌊x / 2ᵉ⌋, also if the quotient underflows."""
    cell = floor(ldexp(x, -exponent))
    return -1 if x < 0 and cell == 0 else cell


def _symlog(linear: float) -> BinScale:
    def forward(x: Tensor) -> Tensor:
        return x.sign() * (x.abs() / linear).log1p() / _LN2

    def back(y: Tensor) -> Tensor:
        size = y.abs()
        small = linear * (size * _LN2).expm1()
        large = torch.exp2(size + log2(linear))  # for large sizes: without the 1, no overflow
        return y.sign() * torch.where(size < 60, small, large)

    return BinScale(forward, back, finest=-300)


_LN2 = log(2)
_LINEAR = BinScale(lambda x: x, lambda y: y, finest=-1000)
_LOG = BinScale(lambda x: x.clamp_min(0).log2(), torch.exp2, finest=-_DIGITS)
