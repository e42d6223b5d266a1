"""Floor 3: reducers over samples, streamed and mergeable, one family a file."""

from gradscope.reducers import (
    extremes,
    gram,
    histogram,
    kfac,
    moments,
    nonfinite,
    quantile,
    spread,
)
from gradscope.reducers.base import Reducer, State, carried_state, reducers

__all__ = [
    "Reducer",
    "State",
    "carried_state",
    "extremes",
    "gram",
    "histogram",
    "kfac",
    "moments",
    "nonfinite",
    "quantile",
    "reducers",
    "spread",
]
