"""Defects put into the engine on purpose, one at a time, and which guard of the product tells.

python -m tests.mutants        prints the table
"""

from tests.mutants import (  # noqa: F401  (importing files the mutants)
    blocks,
    files,
    formulas,
    graph,
    others,
    reductions,
    rules,
)
from tests.mutants.base import MUTANTS, Mutant, Scenario, wrong

__all__ = ["MUTANTS", "Mutant", "Scenario", "wrong"]
