"""Reducers over samples, streamed and mergeable, one family a file."""

from gradscope.stages.reducers import (
    extremes,
    gram,
    histogram,
    kfac,
    moments,
    nonfinite,
    quantile,
    spread,
)
from gradscope.stages.reducers.base import Reducer, State, carried_state, reducers

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
