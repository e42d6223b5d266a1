"""Order statistics over samples: the smallest and the largest value, and quantiles.

Quantiles are exact while the values are few, within a relative error beyond. Up to `EXACT` numbers
(samples times entries, all parameters together) are kept. Beyond, each entry has a logarithmic
histogram (DDSketch: Masson, Rim and Lee 2019, arXiv:1908.10693), with buckets (γⁱ⁻¹, γⁱ],
γ = (1 + a)/(1 − a), whose value 2γⁱ/(γ + 1) is within the relative error a of all in it. Only
buckets that hold something are stored. Which of the two is used, and the counts, depend on the
values alone, so that any split of the data gives the same result.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from math import ceil, floor, log, prod

import torch
from torch import Tensor

from gradscope.blocks import Gradients
from gradscope.stages.reducers.base import (
    Reducer,
    State,
    count,
    entries,
    for_each_parameter,
    on_one_device,
    ordered,
    reducers,
    tiles,
)

EXACT = 1_000_000  # numbers that are kept as they are
_LARGEST = 750.0  # |log x| of any float64, rounded up


@reducers.register("min")
def minimum() -> Reducer:
    """minᵢ T(gᵢ), elementwise over the samples; complex gradients are refused."""
    return _extreme("min", torch.amin, torch.minimum)


@reducers.register("max")
def maximum() -> Reducer:
    """maxᵢ T(gᵢ), elementwise over the samples; complex gradients are refused."""
    return _extreme("max", torch.amax, torch.maximum)


@reducers.register("quantile")
def quantile(q: float, error: float = 0.01) -> Reducer:
    """The q-quantile over the samples, elementwise, interpolated linearly between two ranks.

    Exact up to a million numbers (samples × entries). Beyond, each of the two order statistics is
    within the relative error `error` of the true one, zeros are exact, and memory holds one
    (key, count) pair for each entry and non-empty bucket: at error 0.01 at most 116 buckets for
    each sign and factor of ten that the entry ranges over. An entry with a NaN is NaN.
    """
    if not 0 <= q <= 1:
        raise ValueError(f"q must be between 0 and 1, not {q}")
    if not 1e-6 <= error < 1:
        raise ValueError(f"error must be between 1e-6 and 1, not {error}")
    return quantiles(q, error)


def quantiles(q: float, error: float, most: int = EXACT) -> Reducer:
    """Return the reducer that keeps up to `most` numbers as they are."""
    buckets = _Buckets(error)

    def start(gradients: Gradients) -> State:
        state: State = {"n": count(gradients)}
        exact = gradients.n * sum(prod(block.shape) for block in gradients.values()) <= most
        for name, block in ordered(gradients, "quantile").items():
            if exact:
                state[f"values:{name}"] = torch.cat(list(tiles(block)))
            else:
                state |= buckets.state(name, tiles(block))
        return state

    @on_one_device
    def merge(a: State, b: State) -> State:
        n = a["n"] + b["n"]
        kept = [entries(state, "values") for state in (a, b)]
        size = sum(prod(values.shape[1:]) for values in kept[0].values())
        if kept[0] and kept[1] and int(n) * size <= most:
            values = {f"values:{k}": torch.cat([v, kept[1][k]]) for k, v in kept[0].items()}
            return {"n": n, **values}
        return {"n": n, **_joined(buckets.all(a), buckets.all(b))}

    def result(state: State) -> dict[str, Tensor]:
        n = int(state["n"])
        kept = entries(state, "values")
        if kept:
            low, high, share = _ranks(n, q)
            every = {name: values.sort(0)[0] for name, values in kept.items()}
            return {k: _between(v[low], v[high], v[-1], share) for k, v in every.items()}
        return {name: buckets.quantile(state, name, n, q) for name in entries(state, "keys")}

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
    """Numbers of buckets, and keys that hold an entry's number and a bucket's.

    The codes of an entry are in the order of the values: -top is -∞, 0 is zero, top is ∞, and
    top + 1 is NaN.
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
        """Return the value that stands for each key's bucket."""
        code = keys % self.stride - self.top
        size = (code.abs() - self.middle).double() * log(self.gamma)
        found = code.sign() * size.exp() * (2 / (1 + self.gamma))
        found = torch.where(code.abs() == self.top, code.sign() * torch.inf, found)
        return torch.where(code > self.top, torch.nan, found)

    def state(self, name: str, tiles: Iterable[Tensor]) -> State:
        """Return the state's entries for values (m, *shape), tile after tile."""
        shape, found, counts = torch.empty(0), [], []
        for tile in tiles:
            keys, held = torch.unique(self.keys(tile), return_counts=True)
            shape = torch.tensor(tile.shape[1:], dtype=torch.int64, device=tile.device)
            found.append(keys)
            counts.append(held)
        return {f"shape:{name}": shape, **_packed(name, torch.cat(found), torch.cat(counts))}

    def all(self, state: State) -> State:
        """Return a state whose values are in buckets."""
        converted: State = {key: v for key, v in state.items() if not key.startswith("values:")}
        for name, values in entries(state, "values").items():
            converted |= self.state(name, [values])
        return converted

    def quantile(self, state: State, name: str, n: int, q: float) -> Tensor:
        """Return the interpolated quantile (*shape); every entry has n values."""
        packed = _packed(name, state[f"keys:{name}"], state[f"counts:{name}"])
        ends = packed[f"counts:{name}"].cumsum(0)
        shape = state[f"shape:{name}"].tolist()
        first = torch.arange(prod(shape), device=ends.device) * n
        ranks = torch.tensor([*_ranks(n, q)[:2], n - 1], device=ends.device)
        place = torch.searchsorted(ends, ranks[:, None] + first, right=True)
        low, high, last = self.values(packed[f"keys:{name}"][place])
        return _between(low, high, last, _ranks(n, q)[2]).reshape(shape)


def _packed(name: str, keys: Tensor, counts: Tensor) -> State:
    """Return the state's entries with every key once, in order."""
    found, place = torch.unique(keys, return_inverse=True)
    held = torch.zeros_like(found).index_add_(0, place, counts)
    size = torch.tensor(len(found), device=keys.device)
    return {f"keys:{name}": found, f"counts:{name}": held, f"packed:{name}": size}


def _joined(a: State, b: State) -> State:
    """Join two lists of buckets, sorted only when they have doubled since the last time."""
    merged: State = {f"shape:{name}": shape for name, shape in entries(a, "shape").items()}
    for name, keys in entries(a, "keys").items():
        both = torch.cat([keys, b[f"keys:{name}"]])
        counts = torch.cat([a[f"counts:{name}"], b[f"counts:{name}"]])
        size = torch.maximum(a[f"packed:{name}"], b[f"packed:{name}"])
        if len(both) > 2 * int(size):
            merged |= _packed(name, both, counts)
        else:
            merged |= {f"keys:{name}": both, f"counts:{name}": counts, f"packed:{name}": size}
    return merged


def _ranks(n: int, q: float) -> tuple[int, int, float]:
    """Return the ranks below and above position q (n - 1), and how far it is between them."""
    position = q * (n - 1)
    return floor(position), ceil(position), position - floor(position)


def _between(low: Tensor, high: Tensor, last: Tensor, share: float) -> Tensor:
    """Return low + share (high - low); NaN where the last value in order is NaN."""
    found = torch.where(low == high, low, low + share * (high - low))
    return torch.where(last.isnan(), last, found)
