"""Reducers over samples, streamed and mergeable, one family a file."""

from gradscope.stages.reducers import (  # noqa: F401  each registers its reducers
    counts,
    ekfac,
    gram,
    kfac,
    moments,
    order,
)
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
