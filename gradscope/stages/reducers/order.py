"""Order statistics over samples: the smallest and the largest value, and quantiles.

Quantiles are exact for few values, and have a bounded relative error for more values. Up to `EXACT`
numbers (samples times entries, all parameters together) are kept. For more numbers, each entry has
a logarithmic histogram (DDSketch: Masson, Rim and Lee 2019, arXiv:1908.10693). Its buckets are
(γⁱ⁻¹, γⁱ] with γ = (1 + a)/(1 − a). The value 2γⁱ/(γ + 1) is within the relative error a of every
number in the bucket. Empty buckets are not stored. Any split of the data gives the same result,
because the counts, and the choice between numbers and histogram, do not depend on the batches.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from math import ceil, floor, log, prod

import torch
from torch import Tensor

from gradscope.blocks import Block, Gradients
from gradscope.core.precision import doubled
from gradscope.stages.reducers.base import (
    ParameterState,
    Reducer,
    State,
    count,
    for_each_parameter,
    joined,
    on_one_device,
    ordered,
    parts,
    reducers,
    tiles,
)

EXACT = 1_000_000  # the most numbers to keep
_LARGEST = 750.0  # |log x| of any float64, rounded up


@reducers.register("min")
def minimum() -> Reducer:
    """minᵢ T(gᵢ), elementwise over the samples; raises for complex gradients."""
    return _extreme("min", torch.amin, torch.minimum)


@reducers.register("max")
def maximum() -> Reducer:
    """maxᵢ T(gᵢ), elementwise over the samples; raises for complex gradients."""
    return _extreme("max", torch.amax, torch.maximum)


@reducers.register("quantile")
def quantile(q: float, error: float = 0.01) -> Reducer:
    """The q-quantile over the samples, elementwise, interpolated linearly between two ranks.

    The result is exact up to a million numbers (samples × entries). For more numbers, each of the
    two ranks' values has a relative error of at most `error`; zeros are exact. Memory then holds a
    (key, count) pair for each entry and non-empty bucket. At error 0.01 an entry has at most 116
    buckets for each sign and factor of ten of its range. An entry with a NaN is NaN.
    """
    if not 0 <= q <= 1:
        raise ValueError(f"q must be between 0 and 1, not {q}")
    if not 1e-6 <= error < 1:
        raise ValueError(f"error must be between 1e-6 and 1, not {error}")
    return quantiles(q, error)


def quantiles(q: float, error: float, most: int = EXACT) -> Reducer:
    """Return the reducer that keeps up to `most` numbers before it counts in buckets."""
    buckets = _Buckets(error)

    def start(gradients: Gradients) -> State:
        n, every = gradients.n, ordered(gradients, "quantile").items()
        exact = n * sum(prod(block.shape) for _, block in every) <= most

        def taken(block: Block) -> ParameterState:
            values = tiles(block)
            return {"values": torch.cat(list(values))} if exact else buckets.filled(values)

        return joined(count(gradients), {name: taken(block) for name, block in every})

    @on_one_device
    def merge(a: State, b: State) -> State:
        n, left, right = a["n"] + b["n"], parts(a), parts(b)
        kept = [p["values"] for p in (*left.values(), *right.values()) if "values" in p]
        entries = sum(prod(values.shape[1:]) for values in kept) // 2
        exact = len(kept) == 2 * len(left) and int(n) * entries <= most

        def merged(*pair: ParameterState) -> ParameterState:
            if exact:
                return {"values": torch.cat([part["values"] for part in pair])}
            return _joined(*(buckets.filled([p["values"]]) if "values" in p else p for p in pair))

        return joined(n, {name: merged(part, right[name]) for name, part in left.items()})

    def result(state: State) -> dict[str, Tensor]:
        n = int(state["n"])
        position = q * (n - 1)
        ranks = [floor(position), ceil(position), n - 1]

        def quantile(part: ParameterState) -> Tensor:
            if "values" in part:
                low, high, last = part["values"].sort(0)[0][ranks]
            else:
                low, high, last = buckets.ranked(part, n, ranks)
            found = torch.where(low == high, low, low + (position - ranks[0]) * (high - low))
            return torch.where(last.isnan(), last, found)  # last is NaN if any value is NaN

        return {name: quantile(part) for name, part in parts(state).items()}

    return Reducer(start, merge, result)


def _extreme(
    name: str, over: Callable[[Tensor, int], Tensor], of_two: Callable[[Tensor, Tensor], Tensor]
) -> Reducer:
    return for_each_parameter(
        lambda block: {"value": reduce(of_two, (over(tile, 0) for tile in tiles(block)))},
        lambda a, b, *_: {"value": of_two(a["value"], b["value"])},
        lambda part, _: {"": part["value"]},
        ordered_for=name,
    )


class _Buckets:
    """Codes of buckets, and keys that combine an entry's index with a bucket's code.

    The codes have the order of the values: -top is -∞, 0 is zero, top is ∞, and top + 1 is NaN.
    """

    def __init__(self, error: float) -> None:
        self.gamma = (1 + error) / (1 - error)
        self.middle = ceil(_LARGEST / log(self.gamma)) + 1  # the code of 1
        self.top = 2 * self.middle + 1
        self.stride = 2 * self.top + 2

    def keys(self, values: Tensor) -> Tensor:
        """Return the key of each number (m·entries,) of `values` (m, *shape)."""
        size = (values.abs().log() / log(self.gamma)).ceil() + self.middle
        size = torch.where(values == 0, 0, size.clamp(1, self.top - 1))
        size = torch.where(values.isinf(), self.top, size)
        code = torch.where(values.isnan(), self.top + 1, values.sign() * size).long()
        rows = code.flatten(1) if code.dim() > 1 else code[:, None]
        entry = torch.arange(rows.shape[1], device=rows.device)
        return (entry * self.stride + rows + self.top).flatten()

    def values(self, keys: Tensor) -> Tensor:
        """Return the value that represents each key's bucket."""
        code = keys % self.stride - self.top
        size = doubled(code.abs() - self.middle) * log(self.gamma)
        found = code.sign() * size.exp() * (2 / (1 + self.gamma))
        found = torch.where(code.abs() == self.top, code.sign() * torch.inf, found)
        return torch.where(code > self.top, torch.nan, found)

    def filled(self, tiles: Iterable[Tensor]) -> ParameterState:
        """Return the part of a state for tiles of values (m, *shape)."""
        shape, found, counts = torch.empty(0), [], []
        for tile in tiles:
            keys, held = torch.unique(self.keys(tile), return_counts=True)
            shape = torch.tensor(tile.shape[1:], dtype=torch.int64, device=tile.device)
            found.append(keys)
            counts.append(held)
        return {"shape": shape, **_packed(torch.cat(found), torch.cat(counts))}

    def ranked(self, part: ParameterState, n: int, ranks: list[int]) -> Tensor:
        """Return the values (ranks, *shape) of these ranks; every entry has n values."""
        packed = _packed(part["keys"], part["counts"])
        ends, shape = packed["counts"].cumsum(0), part["shape"].tolist()
        first = torch.arange(prod(shape), device=ends.device) * n
        wanted = torch.tensor(ranks, device=ends.device)[:, None] + first
        place = torch.searchsorted(ends, wanted, right=True)
        return self.values(packed["keys"][place]).reshape(-1, *shape)


def _packed(keys: Tensor, counts: Tensor) -> ParameterState:
    """Return buckets with unique sorted keys, and their number `packed`."""
    found, place = torch.unique(keys, return_inverse=True)
    held = torch.zeros_like(found).index_add_(0, place, counts)
    return {"keys": found, "counts": held, "packed": torch.tensor(len(found), device=keys.device)}


def _joined(a: ParameterState, b: ParameterState) -> ParameterState:
    """Join two lists of buckets; sort them only if the length doubled since the last sort."""
    keys, counts = (torch.cat([a[kind], b[kind]]) for kind in ("keys", "counts"))
    size = torch.maximum(a["packed"], b["packed"])
    if len(keys) > 2 * int(size):
        return {"shape": a["shape"], **_packed(keys, counts)}
    return {"shape": a["shape"], "keys": keys, "counts": counts, "packed": size}
