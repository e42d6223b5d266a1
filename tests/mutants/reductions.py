"""Defects in reducers: what is carried from batch to batch."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from gradscope.stages.reducers import Reducer, State, moments, order, reducers
from tests.mutants.base import Install, after, around, before, entry, mutant
from tests.mutants.scenarios import Expected, Streamed, each, largest, mean, median, variance


def _caught(name: str, defect: str, what: str, expected: Expected, install: Install) -> None:
    scenario = Streamed("mlp", what=what, expected=expected)
    mutant(name, "reducers", defect, scenario, "certificate", install)


_caught(
    "carry lost",
    "a sum forgets the batches before the last",
    "mean",
    mean,
    around(moments, "added", lambda original: lambda a, b: b),
)
_caught(
    "one sample too many",
    "every batch counts one sample more than it has",
    "mean",
    mean,
    around(moments, "count", after(lambda n, *_: n + 1)),
)


def _between_dropped(a: State, b: State, n_a: Tensor, n_b: Tensor) -> State:
    return spread_merged(a, b, n_a, n_b) | {"m2": a["m2"] + b["m2"]}


spread_merged = moments.merge_spread
_caught(
    "batches' means ignored",
    "a variance leaves out how far the batches' means are from each other",
    "var",
    variance,
    lambda patch: patch.setattr(moments, "merge_spread", _between_dropped),
)


def _other_share(a: State, b: State, n_a: Tensor, n_b: Tensor) -> State:
    return spread_merged(a, b, n_b, n_a)


_caught(
    "weights exchanged",
    "two batches' means are merged with each other's number of samples",
    "mean:standard_error=true",
    each(lambda g: g.mean(0)),
    around(moments, "merge_spread", lambda original: _other_share),
)
_caught(
    "largest of the last batch",
    "a maximum forgets the batches before the last",
    "max",
    largest,
    around(order, "_extreme", before(lambda name, over, _: (name, over, lambda a, b: b))),
)


def _first_twice(original: Callable[..., Reducer]) -> Callable[..., Reducer]:
    @wraps(original)
    def factory(**options: Any) -> Reducer:
        made = original(**options)
        return made._replace(merge=lambda a, b: made.merge(a, a))

    return factory


_caught(
    "one batch twice",
    "of two batches a quantile holds the first one twice",
    "quantile:q=0.5",
    median,
    entry(reducers, "quantile", _first_twice),
)
