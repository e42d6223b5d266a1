"""The trace of the Fisher, by whose labels the run was made with."""

from typing import Literal

import numpy as np

from gradscope.stats.base import Record, Source, number
from gradscope.stats.stored import aggregate_of, labels_of
from gradscope.stats.table import Table

_KINDS: dict[str, Literal["empirical", "sampled", "exact"]] = {
    "data": "empirical",
    "sampled": "sampled",
    "exact": "exact",
}


class Fisher(Record):
    """tr (1/N) Σ gᵢ gᵢᵀ.

    Attributes:
        kind: empirical with the data's labels; sampled or exact with the model's own.
        trace: None for the exact one without a chain `second_moment`.
    """

    kind: Literal["empirical", "sampled", "exact"]
    trace: float | None


def fisher(file: Source, table: Table) -> Fisher:
    """Return the trace: mean‖gᵢ‖², or the sum of a stored second moment with exact labels."""
    kind = _KINDS.get(labels_of(file), "empirical")
    if kind != "exact":
        trace = number(np.square(table.norm).mean()) if table.n else None
        return Fisher(kind=kind, trace=trace)
    second = aggregate_of(file, "second_moment")  # norms are expectations over labels there
    return Fisher(
        kind=kind, trace=None if second is None else number(sum(v.sum() for v in second.values()))
    )
