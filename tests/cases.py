"""The table of cases: models and losses with well-defined per-sample gradients, and coupled ones.

Every case is built by a function of its own name in one of the files of `tests/zoo`, in float64,
with a smooth loss in which no two entries count alike, and sizes of which no two coincide unless
the case is about that.
"""

from tests.zoo import (  # noqa: F401  (importing files the cases)
    coupled,
    layers,
    linear,
    objectives,
    programs,
    raw,
    sequences,
    shared,
)
from tests.zoo.base import CASES, Case, Setup

INDEPENDENT = [c for c in CASES.values() if not c.coupled]
COUPLED = [c for c in CASES.values() if c.coupled]

__all__ = ["CASES", "COUPLED", "INDEPENDENT", "Case", "Setup"]
