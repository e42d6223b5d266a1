"""Reducers over samples, streamed and mergeable, one family a file."""

from gradscope.stages.reducers import counts, gram, kfac, moments, order  # noqa: F401  register
from gradscope.stages.reducers.base import (
    Reducer,
    State,
    add_in_place,
    carried_bytes,
    carried_state,
    depends_on_split,
    reducers,
)

__all__ = [
    "Reducer",
    "State",
    "add_in_place",
    "carried_bytes",
    "carried_state",
    "depends_on_split",
    "reducers",
]
