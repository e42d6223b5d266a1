"""Reducers over samples, streamed and mergeable, one family a file."""

from gradscope.stages.reducers import counts, gram, kfac, moments, order  # noqa: F401  each registers its reducers
