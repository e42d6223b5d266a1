"""Reducers over samples, streamed and mergeable, one family a file."""

from gradscope.stages.reducers import (  # noqa: F401  each registers its reducers
    counts,
    gram,
    kfac,
    moments,
    order,
)
