"""Reducers over samples, streamed and mergeable, one family a file."""

from gradscope.stages.reducers import (  # each registers its reducers
    counts,
    gram,
    kfac,
    moments,
    order,
)
from gradscope.stages.reducers.base import (
    Reducer,
    State,
    carried_state,
    depends_on_split,
    reducers,
)

__all__ = [
    "Reducer",
    "State",
    "carried_state",
    "counts",
    "depends_on_split",
    "gram",
    "kfac",
    "moments",
    "order",
    "reducers",
]
